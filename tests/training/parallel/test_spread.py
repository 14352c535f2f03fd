"""Runs on 1 to 8 devices, in all stages and precisions: the same bits in a fixed order, else within rounding.

spread.py makes the runs. The quick ones cover every stage in fp32, bf16 and fp16; the slow ones, compiled as a run is,
every stage and number of devices in each precision, and twice each pair of these two.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.training.parallel.spread import Case, Result, results

# The largest relative difference of losses and norms where sums are made in another order. In 16 bits each device's
# gradients are rounded before they are summed: 2^-9 of a gradient at most, so no more of a norm; losses show less.
LOSSES = {"fp32": 1e-6, "bf16": 5e-4, "fp16": 2e-4}
NORMS = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 2e-3}

FP32 = Case()
BF16 = Case(dtype="bf16")
STOCHASTIC = Case(dtype="bf16", rounding="stochastic")
NO_MASTERS = Case(dtype="bf16", masters=False, rounding="stochastic")
NO_MASTERS_NEAREST = Case(dtype="bf16", masters=False)
FP16 = Case(dtype="fp16")
PRECISIONS = {
    "fp32": FP32, "bf16": BF16, "stochastic": STOCHASTIC, "no masters": NO_MASTERS,
    "no masters, nearest": NO_MASTERS_NEAREST, "fp16": FP16,
}  # fmt: skip


def fixed(case: Case, *spread: tuple[int, int]) -> list[Case]:
    """The run on one device, and on others: devices, stage."""
    return [case._replace(fixed=True).on(*each) for each in ((1, 0), *spread)]


# ----- what is made ---------------------------------------------------------------------------------------------------

# 8 micro-batches of an update: 1 to 8 on a device.
FIXED = {
    "fp32": fixed(FP32, (2, 2), (4, 1), (8, 0)),
    "bf16": fixed(STOCHASTIC, (8, 1)),
    "fp16": fixed(FP16, (4, 2)),
}
RECOMPUTED = [FP32.on(2, 1, fixed=True, recompute_blocks=1)]  # the same bits whatever is computed again
LOGIT_ROWS = fixed(FP32._replace(logit_rows=16, micro_batches=4, decay="all"))
LOGIT_ROWS += [LOGIT_ROWS[0].on(4, 2, recompute=2)]
LONG = [FP32._replace(steps=50).on(*each) for each in ((1, 0), (4, 2))]
LOW = [STOCHASTIC.on(1, 0), STOCHASTIC.on(8, 2), FP16.on(1, 0), FP16.on(8, 1)]
NUMBERS: dict[str, dict[str, Any]] = {  # no other program
    "no clipping": {"clip": 0.0},
    "outlying losses": {"skip_loss_z": 0.23, "steps": 8},
    "outlying norms": {"skip_norm_z": 1.3, "steps": 8},
    "a rate at which all becomes NaN": {"lr": 1e20},
}
SHORT = [case._replace(steps=4) for case in LONG]
SPOILT = [case._replace(**how) for case in (*FIXED["fp32"], *SHORT) for how in NUMBERS.values()]
OVERFLOW = {"loss_scale": 2.0**24, "scale_factor": 32.0, "steps": 8}
OVERFLOWING = [case._replace(**OVERFLOW) for case in (*FIXED["fp16"], FP16.on(1, 0), FP16.on(8, 1))]
QUICK = [*itertools.chain(*FIXED.values()), *RECOMPUTED, *LOGIT_ROWS, *LONG, *LOW, *SPOILT, *OVERFLOWING]

Found = dict[Case, Result]


@pytest.fixture(scope="module")
def found(together: Path) -> Found:
    return results(list(dict.fromkeys(QUICK)), together / "spread.json")


def differences(found: Result, expected: Result) -> dict[str, float]:
    """The largest relative difference of losses and norms."""
    return {
        name: max(
            abs(one / other - 1) for one, other in zip(getattr(found, name), getattr(expected, name), strict=True)
        )
        for name in ("losses", "norms")
    }


def close(found: Result, expected: Result, dtype: str) -> bool:
    """Whether two runs are the same but for rounding."""
    apart = differences(found, expected)
    return (
        apart["losses"] <= LOSSES[dtype]
        and apart["norms"] <= NORMS[dtype]
        and (found.applied, found.finite, found.scales) == (expected.applied, expected.finite, expected.scales)
        and healthy(found)
    )


def healthy(found: Result) -> bool:
    """Whether all devices have the same arrays, and zeros fill up what is split."""
    return (found.replicas, found.dust) == (1, 0.0)


# ----- quick ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXED)
def test_in_a_fixed_order_the_bits_are_those_of_one_device(found: Found, name: str) -> None:
    alone, *spread = (found[case] for case in FIXED[name])
    assert healthy(alone) and all(alone.applied) and alone.change > 0.5
    assert max(alone.norms) > 1.0 > min(alone.norms)  # some are clipped
    for each in spread:
        assert each == alone


@pytest.mark.parametrize("case", RECOMPUTED)
def test_what_is_computed_again_has_the_same_bits_there_too(found: Found, case: Case) -> None:
    assert found[case] == found[FIXED["fp32"][0]]


def test_logits_in_chunks_of_rows(found: Found) -> None:
    """And both GELU and layernorms computed again."""
    alone, spread = (found[case] for case in LOGIT_ROWS)
    assert spread == alone and alone.change > 0.5


def test_fifty_steps_in_any_order_are_within_rounding(found: Found) -> None:
    alone, *spread = (found[case] for case in LONG)
    assert alone.losses[-1] < alone.losses[0] - 0.8
    for each in spread:
        assert close(each, alone, "fp32")
    assert any(each != alone for each in spread)  # else nothing would have been looked at


@pytest.mark.parametrize(
    ("case", "alone"),
    [
        (LOW[1], LOW[0]),
        (LOW[3], LOW[2]),
        (FIXED["bf16"][0], LOW[0]),
        (FIXED["fp16"][0], LOW[2]),
        (FIXED["fp32"][0], FP32._replace(steps=50)),
    ],
)
def test_in_16_bits_and_beside_the_fixed_order(found: Found, case: Case, alone: Case) -> None:
    ours, theirs = found[case], found[alone]
    if alone.steps != case.steps:
        cut = ("losses", "norms", "applied", "finite", "scales")
        theirs = theirs._replace(**{name: getattr(theirs, name)[: case.steps] for name in cut})
    assert close(ours, theirs, case.dtype), differences(ours, theirs)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_device_skips_what_one_skips(found: Found, name: str) -> None:
    in_order = [found[case._replace(**NUMBERS[name])] for case in FIXED["fp32"]]
    in_any = [found[case._replace(**NUMBERS[name])] for case in SHORT]
    for alone, *spread in (in_order, in_any):
        assert all(each.applied == alone.applied and each.finite == alone.finite for each in spread)
        assert all(healthy(each) for each in (alone, *spread))
    assert all(str(each) == str(in_order[0]) for each in in_order)  # as text, so that NaN is NaN
    applied, finite = in_order[0].applied, in_order[0].finite
    if name == "no clipping":
        assert all(applied) and in_order[0] != found[FIXED["fp32"][0]]
    elif name.startswith("outlying"):
        assert all(finite) and 0 < sum(applied) < len(applied)
    else:
        assert applied == finite and applied[0] and not any(applied[1:])


def test_every_device_sees_an_overflow(found: Found) -> None:
    """In any order more may overflow: one device sums micro-batches in float32, several sum over them in 16 bits."""
    for case in OVERFLOWING:
        run = found[case]
        assert not run.applied[0] and any(run.applied) and run.applied == run.finite
        assert run.scales[1] == OVERFLOW["loss_scale"] / OVERFLOW["scale_factor"]
        assert healthy(run)
    assert str(found[OVERFLOWING[0]]) == str(found[OVERFLOWING[1]])


# ----- slow -----------------------------------------------------------------------------------------------------------

DEVICES = (2, 4, 8)
# In each precision another way to give three numbers of devices the three stages (a Latin square, twice).
SPREAD = {name: [(n, (k + turn) % 3) for k, n in enumerate(DEVICES)] for turn, name in enumerate(PRECISIONS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_stage_and_number_of_devices(name: str) -> None:
    """Compiled as a run is. In a fixed order, and in any."""
    case = PRECISIONS[name]._replace(quick=False)  # quickly, weights in 16 bits alone round otherwise
    spread = SPREAD[name]
    in_order, in_any = fixed(case, *spread), [case.on(*each) for each in ((1, 0), spread[1])]
    found = results([*in_order, *in_any])
    alone = found[in_order[0]]
    assert healthy(alone) and all(alone.applied) and alone.change > 0.5
    assert [each for each in in_order if found[each] != alone] == []
    far = {each: differences(found[each], found[in_any[0]]) for each in (*in_any, in_order[0])
           if not close(found[each], found[in_any[0]], case.dtype)}  # fmt: skip
    assert far == {}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 6, 32])
def test_every_number_of_micro_batches(micro_batches: int) -> None:
    """Also where it is no power of two, which stage 2 does not take."""
    case = STOCHASTIC._replace(micro_batches=micro_batches, steps=3)
    power = micro_batches & (micro_batches - 1) == 0
    spread = [(n, (micro_batches.bit_length() + n) % (3 if power else 2)) for n in (2, 4, 8) if micro_batches % n == 0]
    in_order = fixed(case, *spread)
    found = results([*in_order, case])
    assert [each for each in in_order if found[each] != found[in_order[0]]] == []
    assert close(found[in_order[0]], found[case], "bf16"), differences(found[in_order[0]], found[case])
