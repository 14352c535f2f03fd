"""benchmarks/plan_error.py: what is compared, what is left out, and that the page is that of the figures."""

from typing import Any

import pytest

from benchmarks import plan_error
from benchmarks.plan_error import BUSY, HELD_OUT, RUNS, Compared, calm, compared, predicted_of
from llmc_jax.base.numbers import Interval

FIRST, SECOND, *_ = HELD_OUT


def figures(*steps: tuple[str, float, float]) -> dict[str, Any]:
    """What two calibrations predict, of which one was disturbed, and some steps: flags, seconds, busy."""
    predicted = {words: [0.9, 1.0, 1.2] for words in HELD_OUT}
    late = {words: [9.0, 9.0, 9.0] for words in HELD_OUT}
    return {
        "calibrations": [
            {"took": 10.0, "busy": 0.1, "predicted": predicted},
            {"took": 10.0, "busy": 0.1 * BUSY + 0.01, "predicted": late},
        ],
        "steps": [{"words": words, "seconds": seconds, "busy": busy} for words, seconds, busy in steps],
    }


def test_what_was_disturbed_does_not_count() -> None:
    found = figures((FIRST, 1.0, 0.1), (FIRST, 1.2, 0.11), (FIRST, 5.0, 0.2), (SECOND, 2.0, 0.12))
    assert len(calm(found, "calibrations")) == 1 and len(calm(found, "steps")) == 3
    first, second = compared(found)
    assert first == Compared(FIRST, Interval(0.9, 1.0, 1.2), pytest.approx(1.1), 2)
    assert first.inside and first.error == pytest.approx(1 / 1.1 - 1)
    assert not second.inside and second.error == pytest.approx(-0.5)


@pytest.mark.parametrize("run", RUNS, ids=[f"{run.gpu} {run.words}" for run in RUNS])
def test_llm_c_s_runs_are_near(run: plan_error.Run) -> None:
    """As another program's, on other machines: within half of the time."""
    assert predicted_of(run).seconds.typical == pytest.approx(run.seconds, rel=0.5)


def test_the_page_is_that_of_the_figures() -> None:
    assert plan_error.PAGE.read_text() == plan_error.page(plan_error.read_figures())
