"""Proof that the comparisons of test_spread.py can fail: each mistake in mistakes.py makes one of them do so."""

from pathlib import Path

import pytest

from tests.training.parallel import test_spread as two_layers
from tests.training.parallel.mistakes import MISTAKES
from tests.training.parallel.spread import Case, Result, results
from tests.training.parallel.test_spread import ONE_LAYER, close

# Each program that is compiled takes seconds: so one layer, and as few runs without a mistake as there can be.
FP32, STOCHASTIC = (case._replace(shape=ONE_LAYER) for case in (two_layers.FP32, two_layers.STOCHASTIC))
ANY_ORDER = FP32.on(2, 1)
IN_ORDER = FP32._replace(fixed=True)
TREE = IN_ORDER.on(2, 2)
MATRICES = FP32.on(2, 1, fixed=True, optimizer="muon")
ROUNDED = STOCHASTIC.on(2, 1, fixed=True)

# Where each of them shows.
SHOWN = {
    "all_reduce": FP32.on(2, 0),
    "reduce_scatter": ANY_ORDER,
    "gather": ANY_ORDER,
    "gather_of_weights": ROUNDED,
    "exchange": TREE,
    "summed_number": TREE,
    "norm_of_the_own_part": ANY_ORDER,
    "norm_in_the_order_of_the_parts": TREE,
    "decay_by_the_place": TREE,
    "noise_by_the_place": ROUNDED,
    "sum_from_first_to_last": IN_ORDER.on(8, 0),
    "neighbours_on_one_device": TREE,
    "micro_batches_summed_in_turn": TREE,
    "loss_of_one_device": ANY_ORDER,
    "same_batch_on_every_device": ANY_ORDER,
    "narrow_sums": STOCHASTIC.on(4, 2, fixed=True),
    "matrices_of_the_own_rows": MATRICES,
}
CASES = list(dict.fromkeys(SHOWN.values()))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(together: Path) -> dict[Case, Result]:
    wrong = [case._replace(mistake=name) for name, case in SHOWN.items()]
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
    assert not right(found, SHOWN[name]._replace(mistake=name))
