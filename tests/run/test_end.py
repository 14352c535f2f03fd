"""The end of a run of several processes: what only one of them finds must not let the others wait for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc_jax import cluster
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.cluster.agreement import Agreed
from llmc_jax.cluster.worker import Group
from llmc_jax.config.train import TrainConfig
from llmc_jax.run.end import last_save
from llmc_jax.run.saver import Saved
from llmc_jax.run.state import Outcome, Progress


class OfTwo(Group):
    size = 2


def ended(group: Group, saved: Saved, full: bool) -> Outcome:
    """The end of a run whose last save was under way. full: its log cannot be written."""

    def event(kind: str, **fields: Any) -> None:
        if full:
            raise InputError("metrics.jsonl: No space left on device")

    run: Any = SimpleNamespace(
        setup=SimpleNamespace(config=TrainConfig(save=False), steps=8),
        saver=SimpleNamespace(wait=lambda: [saved], prune=lambda least: ((), None)),
        log=SimpleNamespace(event=event),
        console=SimpleNamespace(warning=lambda words: None),
    )
    state: Any = None
    batches: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_here", group)
        return last_save(run, Outcome(ExitCode.DONE, Progress(state, step=8, saving=8)), batches)


def test_a_log_that_cannot_be_written_ends_the_process() -> None:
    """Alone it still says where everything is; of several it leaves, for the others go on to save with it."""
    good = Saved(8, Path("state_00000008"), None, 0.0, 0.0)
    with pytest.raises(InputError, match="No space"):
        ended(OfTwo(), good, full=True)
    assert ended(Group(), good, full=True).code == ExitCode.BAD_INPUT


def test_a_save_that_fails_for_all_ends_all_alike() -> None:
    outcome = ended(OfTwo(), Saved(8, Path("state_00000008"), "no room", 0.0, 0.0), full=False)
    assert (outcome.code, type(outcome.problem)) == (ExitCode.BAD_INPUT, Agreed)
