"""Proof that the comparisons of test_spread.py can fail: each mistake in mistakes.py makes one of them do so."""

from pathlib import Path

import pytest

from tests.training.parallel.mistakes import MISTAKES
from tests.training.parallel.spread import Case, Result, results
from tests.training.parallel.test_spread import BF16, FP32, STOCHASTIC, close

IN_ORDER = FP32._replace(fixed=True)

# Where each of them shows.
SHOWN = {
    "all_reduce": [FP32.on(2, 0), FP32.on(8, 0)],
    "reduce_scatter": [FP32.on(2, 1)],
    "gather": [FP32.on(2, 1), IN_ORDER.on(2, 0)],
    "gather_of_weights": [BF16.on(2, 1)],
    "exchange": [IN_ORDER.on(2, 0), IN_ORDER.on(2, 2)],
    "summed_number": [FP32.on(2, 0), IN_ORDER.on(2, 2)],
    "norm_of_the_own_part": [FP32.on(2, 1)],
    "norm_in_the_order_of_the_parts": [IN_ORDER.on(2, 2)],
    "decay_by_the_place": [IN_ORDER.on(2, 2)],
    "noise_by_the_place": [STOCHASTIC.on(2, 1, fixed=True)],
    "sum_from_first_to_last": [IN_ORDER.on(8, 0)],
    "neighbours_on_one_device": [IN_ORDER.on(2, 2)],
    "micro_batches_summed_in_turn": [IN_ORDER.on(2, 2)],
    "loss_of_one_device": [FP32.on(2, 0), IN_ORDER.on(2, 0)],
    "same_batch_on_every_device": [FP32.on(2, 1)],
    "narrow_sums": [BF16.on(4, 2, fixed=True)],
}
CASES = [case for cases in SHOWN.values() for case in cases]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(together: Path) -> dict[Case, Result]:
    wrong = [case._replace(mistake=name) for name, cases in SHOWN.items() for case in cases]
    right = [*CASES, *(case.alone() for case in CASES)]
    return results(list(dict.fromkeys([*right, *wrong])), together / "mistakes.json")


def right(found: dict[Case, Result], case: Case) -> bool:
    """Whether the comparison of test_spread.py holds."""
    ours, alone = found[case], found[case.alone()]
    return ours == alone if case.fixed else close(ours, alone, case.dtype)


def test_every_mistake_is_made() -> None:
    assert SHOWN.keys() == MISTAKES.keys()


def test_without_a_mistake_the_comparisons_hold(found: dict[Case, Result]) -> None:
    assert [case for case in CASES if not right(found, case)] == []


@pytest.mark.parametrize("name", SHOWN)
def test_the_runs_show_it(found: dict[Case, Result], name: str) -> None:
    for case in SHOWN[name]:
        assert not right(found, case._replace(mistake=name))
