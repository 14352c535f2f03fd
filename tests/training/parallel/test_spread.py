"""Runs on 1 to 8 devices, in all stages and precisions: the same bits in a fixed order, else within rounding.

spread.py makes the runs. What takes the time is to compile a program for each. The first slow ones have each stage and
each number of devices in both orders; the others, compiled as a run is, each pair of these two.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.families import FROZEN, TOY
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
# Compiled as a run is, in fp32: so it may fuse products with sums, one way on one device, another on several.
MUON = Case(optimizer="muon", shape="L3-NH2-C48-V97-T32", micro_batches=8, quick=False)
MOMENTUM = Case(optimizer="momentum", lr=0.2, shape="L3-NH2-C32-V257-T32", quick=False)
PRECISIONS = {
    "fp32": FP32, "bf16": BF16, "stochastic": STOCHASTIC, "no masters": NO_MASTERS,
    "no masters, nearest": NO_MASTERS_NEAREST, "fp16": FP16,
}  # fmt: skip


def fixed(case: Case, *spread: tuple[int, int]) -> list[Case]:
    """The run on one device, and on others: devices, stage."""
    return [case._replace(fixed=True).on(*each) for each in ((1, 0), *spread)]


# ----- what is made ---------------------------------------------------------------------------------------------------

# 8 micro-batches of an update: 1 to 4 on a device. The second of fp32 computes each block again: the same bits.
ONE_LAYER = "L1-NH2-C48-V97-T32"
IN_CHUNKS = FP16._replace(logit_rows=16, decay="all", shape=ONE_LAYER)
FIXED = {
    "fp32": [*fixed(FP32), FP32.on(2, 2, fixed=True, recompute_blocks=1)],
    "bf16": fixed(STOCHASTIC._replace(shape=ONE_LAYER), (8, 1)),
    "fp16": [*fixed(IN_CHUNKS), IN_CHUNKS.on(4, 0, fixed=True, recompute=2)],
    # three layers on fewer devices, and on more: some have none
    "muon": fixed(MUON, (2, 2), (8, 1)),
    "momentum": fixed(MOMENTUM, (2, 1), (4, 2)),
}
ANY = {
    "fp32": FP32._replace(steps=50).on(4, 1),
    "bf16": STOCHASTIC._replace(shape=ONE_LAYER).on(2, 0),
    "fp16": IN_CHUNKS.on(8, 2),
    "muon": MUON.on(2, 1),
}
LONG = [FIXED["fp32"][0]._replace(steps=50), ANY["fp32"]]
NUMBERS: dict[str, dict[str, Any]] = {  # no other program
    "no clipping": {"clip": 0.0},
    "outlying losses": {"skip_loss_z": 0.23, "steps": 8},
    "outlying norms": {"skip_norm_z": 1.3, "steps": 8},
    "a rate at which all becomes NaN": {"lr": 1e20},
}
SHORT = ANY["fp32"]._replace(steps=4)
SPOILT = [case._replace(**how) for case in (*FIXED["fp32"], SHORT) for how in NUMBERS.values()]
OVERFLOW = {"loss_scale": 2.0**24, "scale_factor": 32.0, "steps": 8}
OVERFLOWING = [case._replace(**OVERFLOW) for case in (*FIXED["fp16"], ANY["fp16"])]
MOST = [*itertools.chain(*FIXED.values()), *ANY.values(), *LONG, *SPOILT, *OVERFLOWING]

Found = dict[Case, Result]


@pytest.fixture(scope="module")
def found(together: Path) -> Found:
    return results(list(dict.fromkeys(MOST)), together / "spread.json")


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


# ----- compiled quickly -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_devices_make_the_bits_of_one(together: Path) -> None:
    in_a_fixed_order(results(FIXED["bf16"], together / "eight.json"), "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
def test_in_a_fixed_order_the_bits_are_those_of_one_device(found: Found, name: str) -> None:
    in_a_fixed_order(found, name)


def in_a_fixed_order(found: Found, name: str) -> None:
    alone, *spread = (found[case] for case in FIXED[name])
    assert healthy(alone) and all(alone.applied) and alone.change > 0.5
    assert max(alone.norms) > 1.0 > min(alone.norms)  # some are clipped
    for each in spread:
        assert each == alone


@pytest.mark.slow
def test_fifty_steps_in_any_order_are_within_rounding(found: Found) -> None:
    alone, spread = (found[case] for case in LONG)
    assert alone.losses[-1] < alone.losses[0] - 0.8
    assert close(spread, alone, "fp32"), differences(spread, alone)
    assert spread != alone  # else nothing would have been looked at


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16", "muon"])
def test_in_16_bits_and_any_order(found: Found, name: str) -> None:
    ours, alone = found[ANY[name]], found[FIXED[name][0]]
    assert close(ours, alone, ANY[name].dtype), differences(ours, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_every_device_skips_what_one_skips(found: Found, name: str) -> None:
    in_order = [found[case._replace(**NUMBERS[name])] for case in FIXED["fp32"]]
    applied, finite = in_order[0].applied, in_order[0].finite
    for each in (*in_order, found[SHORT._replace(**NUMBERS[name])]):
        assert (each.applied, each.finite) == (applied, finite) and healthy(each)
    assert all(str(each) == str(in_order[0]) for each in in_order)  # as text, so that NaN is NaN
    if name == "no clipping":
        assert all(applied) and in_order[0] != found[FIXED["fp32"][0]]
    elif name.startswith("outlying"):
        assert all(finite) and 0 < sum(applied) < len(applied)
    else:
        assert applied == finite and applied[0] and not any(applied[1:])


@pytest.mark.slow
def test_every_device_sees_an_overflow(found: Found) -> None:
    """In any order more may overflow: one device sums micro-batches in float32, several sum over them in 16 bits."""
    for case in OVERFLOWING:
        run = found[case]
        assert not run.applied[0] and any(run.applied) and run.applied == run.finite
        assert run.scales[1] == OVERFLOW["loss_scale"] / OVERFLOW["scale_factor"]
        assert healthy(run)
    assert str(found[OVERFLOWING[0]]) == str(found[OVERFLOWING[1]])


# ----- compiled as a run is -------------------------------------------------------------------------------------------

# The fixed order has two pairs of devices and stage in each precision, all nine in the six, and any order one.
PAIRS = [(devices, stage) for stage in (0, 1, 2) for devices in (2, 4, 8)]
SPREAD = {name: [PAIRS[(2 * turn + k) % 9] for k in (0, 1, 5)] for turn, name in enumerate(PRECISIONS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_stage_and_number_of_devices(name: str) -> None:
    """Compiled as a run is. In a fixed order, and in any."""
    # Compiled quickly, weights in 16 bits alone round otherwise.
    case = PRECISIONS[name]._replace(quick=False, shape=ONE_LAYER)
    *pairs, other = SPREAD[name]
    in_order, in_any = fixed(case, *pairs), case.on(*other)
    found = results([*in_order, in_any])
    alone = found[in_order[0]]
    assert healthy(alone) and all(alone.applied) and alone.change > 0.5
    assert [each for each in in_order if found[each] != alone] == []
    assert close(found[in_any], alone, case.dtype), differences(found[in_any], alone)


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "spread"), [(6, (2, 1)), (32, (8, 2))])
def test_every_number_of_micro_batches(micro_batches: int, spread: tuple[int, int]) -> None:
    """Also where it is no power of two, which stage 2 does not take."""
    case = STOCHASTIC._replace(micro_batches=micro_batches, steps=3, shape=ONE_LAYER)
    in_order = fixed(case, spread)
    found = results([*in_order, case])
    assert found[in_order[0]] == found[in_order[1]]
    assert close(found[in_order[0]], found[case], "bf16"), differences(found[in_order[0]], found[case])


# A family without layers, whose backward is JAX's, and a GPT-2 of which two tensors do not learn. All decays.
# Without weight decay: where all elements decay, a processor rounds otherwise in parts of a buffer than in the whole.
TOY_CASE = FP32._replace(decay="none", quick=False, shape="toy-V61-C8-T32", model_file=str(TOY))
FROZEN_CASE = FP32._replace(quick=False, shape="L1-NH2-C16-V61-T32", model_file=str(FROZEN))


@pytest.mark.slow
def test_a_family_of_a_users_file() -> None:
    toys, frozen = fixed(TOY_CASE, (2, 0), (2, 1), (2, 2), (8, 2)), fixed(FROZEN_CASE, (2, 2))
    in_any = [TOY_CASE.on(2, stage) for stage in (0, 1, 2)]
    found = results([*toys, *frozen, *in_any])
    for alone, *spread in (toys, frozen):
        assert healthy(found[alone]) and all(found[alone].applied) and found[alone].change > 0.1
        assert [each for each in spread if found[each] != found[alone]] == []
    for each in in_any:
        assert close(found[each], found[toys[0]], "fp32"), differences(found[each], found[toys[0]])
