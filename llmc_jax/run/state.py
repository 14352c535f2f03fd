"""A run as plain data: one that can begin, what stays the same while it loops, how far it has come, how it ended."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.checkpoint.contents import Counters, Metadata
from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.evalfile import Item
from llmc_jax.data.tokenizers import Choice
from llmc_jax.machine.device import Device
from llmc_jax.machine.nvml import GpuMonitor
from llmc_jax.plan.plan import Plan
from llmc_jax.run.beside import Beside
from llmc_jax.run.console import Console
from llmc_jax.run.find_lr import RangeTest, test_of
from llmc_jax.run.fitting import Fitted
from llmc_jax.run.folder import LockedFolder, RunLog
from llmc_jax.run.inputs import Data
from llmc_jax.run.processes import Votes
from llmc_jax.run.programs import Programs
from llmc_jax.run.saver import Saver
from llmc_jax.run.trackers import Trackers
from llmc_jax.training.parallel.placement import Placement
from llmc_jax.training.state import TrainState


class Setup(NamedTuple):
    """A run that can begin."""

    plan: Plan
    name: str
    weights: Path | None  # the checkpoint that they come from
    place: Placement  # of its arrays
    data: Data
    questions: Sequence[Item]  # of HellaSwag; none: it is not evaluated
    steps: int
    val_batches: int  # of one validation
    tokenizer: Choice
    device: Device
    fitted: Fitted | None  # how -b auto came to its number
    asked: TrainConfig  # the configuration before devices were counted, and before --find-lr did without some of it
    earlier: Checkpoint | None  # the checkpoint that the run resumes from
    metadata: Metadata  # of its checkpoints, as it begins
    monitor: GpuMonitor | None  # of -lg
    notes: list[str]
    warnings: list[str]

    @property
    def config(self) -> TrainConfig:
        return self.plan.config

    @property
    def model(self) -> ModelShape:
        return self.plan.model


class Run(NamedTuple):
    """What stays the same while the loop runs."""

    setup: Setup
    held: LockedFolder  # its folder
    log: RunLog
    console: Console
    beside: Beside
    saver: Saver
    votes: Votes  # on whether the run ends
    trackers: Trackers
    programs: Programs

    @property
    def stop(self) -> threading.Event:
        """Return what is set when the run ends after this step, in all its processes at the same one."""
        return self.votes.stop


class Progress(NamedTuple):
    """How far the run has come. A new one after each step."""

    state: TrainState
    step: int = 0  # steps given to the device, those without an update included
    begun_at: int = 0  # steps that were made before this process began
    read: int = 0  # of the steps, those whose metrics have been read: all but one, where the loop runs ahead
    saving: int = -1  # the step of the last checkpoint that was begun, -1: none
    saved: Path | None = None  # the last checkpoint that is complete
    counters: Counters = Counters()
    seconds: float = 0.0  # in all steps of this process but the first, which llm.c leaves out of its mean too
    test: RangeTest = RangeTest()  # of --find-lr


def first_step(setup: Setup) -> int:
    """Return the step that the run begins at: 0, or where a checkpoint left it."""
    return 0 if setup.earlier is None else setup.earlier.step


def first_progress(setup: Setup, state: TrainState) -> Progress:
    """Return where the run begins: at its start, or where a checkpoint left it."""
    if setup.earlier is None:
        return Progress(state)
    step, counters = setup.earlier.step, setup.earlier.metadata.counters or Counters()
    if 0 < setup.config.max_nonfinite <= counters.skipped_in_a_row:  # it had diverged; now it gets another chance
        counters = counters._replace(skipped_in_a_row=0)
    return Progress(
        state, step=step, begun_at=step, read=step, saving=step, saved=setup.earlier.folder, counters=counters,
        test=test_of(setup.earlier.metadata.range_test),
    )  # fmt: skip


class Outcome(NamedTuple):
    """How the loop ended; problem: what broke, where something did."""

    code: ExitCode
    progress: Progress
    problem: InputError | None = None


def diverged(config: TrainConfig, progress: Progress) -> bool:
    """Return whether so many steps in a row were not finite that the run ends."""
    return 0 < config.max_nonfinite <= progress.counters.skipped_in_a_row
