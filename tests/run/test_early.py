"""Early stopping: which validation counts, where a run stops, what it leaves, and that a killed one stops there too."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc_jax.checkpoint.contents import Counters, Identity, Metadata, judged, stops_early
from llmc_jax.checkpoint.store import open_checkpoint
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.run.command import main
from tests.run.in_turn import forget
from tests.same_run import Result, check_same

pytestmark = pytest.mark.usefixtures("nothing_lasts", "quick_compilation")

# A tiny model that learns 20 batches by heart: the validation loss falls until step 3 and then rises.
FLAGS = ["-e", "L1-NH1-C16-V257-T16", "-b", 2, "-t", 16, "-l", "1e-2", "-v", 3, "-m", 2, "-s", 5, "-g", 4, "-x", 90]
STOPPED, BEST = 12, 3


# ----- which validation counts ----------------------------------------------------------------------------------------

LOSSES = st.lists(st.floats(0, 9) | st.sampled_from([math.nan, math.inf, 3.0, 3.5]), max_size=30)


@given(LOSSES, st.sampled_from([0.0, 0.25, 1.0]))
@example([math.nan, 3.0, math.inf], 0.0)
def test_counts_validations_since_the_last_improvement(losses: list[float], delta: float) -> None:
    counters = Counters()
    for step, loss in enumerate(losses):
        counters = judged(counters, step, loss, delta)
    improvements = list[int]()
    for step, loss in enumerate(losses):
        if math.isfinite(loss) and (not improvements or loss < losses[improvements[-1]] - delta):
            improvements.append(step)
    best = min((loss for loss in losses if math.isfinite(loss)), default=None)
    assert counters.stale == len(losses) - 1 - (improvements[-1] if improvements else -1)
    assert counters.improved == (losses[improvements[-1]] if improvements else None)
    assert (counters.best_loss, counters.best_step) == (best, -1 if best is None else losses.index(best))


@given(LOSSES.filter(bool), st.integers(0, 30), st.sampled_from([0.0, 0.25]))
def test_a_checkpoint_keeps_all_that_is_counted(losses: list[float], at: int, delta: float) -> None:
    whole = kept = Counters()
    for step, loss in enumerate(losses):
        if step == at:
            metadata = Metadata(step, Identity(ModelConfig(8, 16, 128, 1, 1, 4), "fp32", True), 99, counters=kept)
            kept = Metadata.from_json(metadata.to_json(), Path("here")).counters
        whole, kept = judged(whole, step, loss, delta), judged(kept, step, loss, delta)
    assert repr(whole) == repr(kept)  # as text, so that NaN is NaN


def test_without_patience_nothing_stops() -> None:
    assert not stops_early(TrainConfig(), Counters(stale=99))
    assert [stops_early(TrainConfig(patience=3), Counters(stale=n)) for n in (2, 3, 4)] == [False, True, True]


# ----- whole runs -----------------------------------------------------------------------------------------------------


def run(folder: Path, *flags: Any) -> Result:
    code = main([str(word) for word in (*FLAGS, "-o", folder, *flags)])
    return Result(code, folder, "", "")


@pytest.fixture(scope="module")
def stopped(data: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that stopped early, with a checkpoint of each step; read-only by agreement."""
    return run(tmp_path_factory.mktemp("stopped") / "run", *data, "--patience", 3, "-n", 1)


def test_a_run_stops_when_its_validation_loss_falls_no_more(stopped: Result) -> None:
    losses = dict(zip(stopped.values("val", "step"), stopped.values("val", "loss"), strict=True))
    assert stopped.code == 0 and max(losses) == STOPPED and min(losses, key=losses.__getitem__) == BEST
    assert stopped.values("train", "step") == list(range(STOPPED))
    assert stopped.values("sample", "step") == [5, 10, STOPPED]  # the last one as at a normal end
    assert stopped.checkpoints[-1] == STOPPED
    early, end = stopped.events[-2:]
    expected = {"event": "early_stop", "step": STOPPED, "best_loss": losses[BEST], "best_step": BEST, "stale": 3}
    assert (expected | {"patience": 3, "delta": 0.0, "steps": 90}).items() <= early.items()
    assert {"event": "end", "step": STOPPED, "outcome": "done"}.items() <= end.items()


def test_a_stopped_run_ends_at_once_when_started_again(data: list[Any], stopped: Result, tmp_path: Path) -> None:
    """And with more patience goes on where it was."""
    folder = Path(shutil.copytree(stopped.folder, tmp_path / "run"))
    again = run(folder, *data, "--patience", 3, "-y", 1)
    assert again.code == 0 and again.values("train", "step") == list(range(STOPPED))
    assert again.values("resume", "step") == [STOPPED] and len(again.values("early_stop", "step")) == 2
    more = run(folder, *data, "--patience", 4, "-y", 1)
    assert more.code == 0 and more.values("early_stop", "step")[-1] == STOPPED + 3
    assert more.values("train", "step") == list(range(STOPPED + 3))


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, STOPPED))
def test_a_killed_run_stops_at_the_same_step(data: list[Any], stopped: Result, tmp_path: Path, step: int) -> None:
    folder = Path(shutil.copytree(stopped.folder, tmp_path / "run"))
    forget(folder, *range(step + 1, STOPPED + 1))
    found = run(folder, *data, "--patience", 3, "-n", 1, "-y", 1)
    check_same(found.folder, stopped.folder)
    assert found.values("early_stop", "step") == [STOPPED]
    last = [open_checkpoint(each.folder / f"state_{STOPPED:08d}") for each in (found, stopped)]
    ours, theirs = (each.metadata.counters for each in last)
    assert ours == theirs and ours is not None and ours.stale == 3


def test_a_validation_that_is_due_may_be_the_improvement(data: list[Any], tmp_path: Path) -> None:
    """Where a run goes on with less patience than validations in a row had failed before."""
    first = run(tmp_path / "run", *data, "-n", 1, "-s", 0, "-v", 2, "-x", 4, "--patience-delta", 99)
    forget(first.folder, 4)
    flags = ["-v", 3, "-s", 0, "-x", 5, "--patience", 1, "--patience-delta", 0, "-y", 1]
    found = run(first.folder, *data, *flags)
    assert found.code == 0 and found.values("val", "step") == [0, 2, 3, 5]
    assert found.values("train", "step") == list(range(5)) and found.values("early_stop", "step") == []


def test_the_best_checkpoint_stays(data: list[Any], tmp_path: Path) -> None:
    found = run(tmp_path / "run", *data, "--patience", 2, "-n", 3, "-nk", 1, "-s", 0)
    assert found.code == 0 and found.checkpoints == [BEST, STOPPED - 3]
