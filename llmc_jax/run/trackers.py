"""A run's trackers: the process of each is started, heard, and ended in time. Process 0 has them.

Each follows metrics.jsonl by itself (llmc_jax/trackers/), so that a step of the run costs nothing more with them.
Leaves out what they are told and what each is.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.child import Child
from llmc_jax.base.commands import in_environment, under_uv
from llmc_jax.base.errors import InputError
from llmc_jax.base.streams import escaped
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine.jax_setup import ONE_THREAD, child_environment
from llmc_jax.run.console import Console
from llmc_jax.run.folder import RunLog
from llmc_jax.trackers.child import LIMIT, Request, Status
from llmc_jax.trackers.sinks import KINDS

GRACE = 1.0  # seconds after the limit that a tracker's process keeps to by itself
NICE = 10  # training comes first; at 19 a busy machine would leave no time to send the rest


class TrackerOption(NamedTuple):
    """A tracker that the options name."""

    kind: str  # a key of KINDS
    target: str  # project or experiment


def asked_trackers(config: TrainConfig) -> list[TrackerOption]:
    """Return the trackers of a run."""
    targets = {"wandb": config.wandb, "mlflow": config.mlflow}
    own = [TrackerOption("tensorboard", "")] if config.tensorboard else []
    return own + [TrackerOption(kind, target) for kind, target in targets.items() if target]


def require_trackers(config: TrainConfig) -> None:
    """Raise InputError where a tracker's package is not installed. Imports none of them."""
    for kind, _ in asked_trackers(config):
        if not KINDS[kind].installed:
            install = "uv run --with" if under_uv() else f"{in_environment('python')} -m pip install"
            raise InputError(f"--{kind}: needs a package that is not installed: {install} {KINDS[kind].package}")


class Tracker:
    """One tracker's process."""

    def __init__(self, asked: TrackerOption, folder: Path, start: int, limit: float) -> None:
        """Start it. folder: the run's. start: where the line of this start begins in metrics.jsonl. limit: seconds."""
        self.name, self._limit = asked.kind, limit
        self._told = False  # its problem was shown
        request = json.dumps(Request(asked.kind, asked.target, str(folder), start, limit))
        environment = child_environment() | ONE_THREAD
        self._child = Child("llmc_jax.trackers", [request], environment=environment, nice=NICE)

    def look(self) -> str:
        """Return what went wrong, if it was not returned before; else nothing. Waits for nothing."""
        if self._told or not (problem := self._status("ended early").problem):
            return ""
        self._told = True
        return problem

    def _status(self, otherwise: str) -> Status:
        """Return what the process has said. otherwise: what happened to one that left no last word."""
        code = self._child.status()  # before its words, which may come with its end
        status = Status(**self._child.said())
        if status.final or status.problem or (code is None and otherwise == "ended early"):
            return status
        return status._replace(problem=f"its process {otherwise}" + (f" (status {code})" if code else ""))

    def begin_end(self) -> None:
        """Let the process know that the run has ended. May be called twice."""
        self._child.tell()

    def end(self, until: float) -> Status:
        """Wait for the process until a time (of time.monotonic), end it if need be, and return how it went."""
        self.begin_end()
        over = self._child.status(until - time.monotonic()) is not None
        if not over:
            self._child.kill()
        status = self._status("ended early" if over else f"was not done {self._limit + GRACE:g} s after the run's end")
        self._child.close()
        return status


class Trackers:
    """All trackers of a run; a context that ends them however its block ends."""

    def __init__(self, config: TrainConfig, folder: Path, rank: int, limit: float = LIMIT, *, start: int = 0) -> None:
        """Start them. start: where this start's first event, which was written, begins in metrics.jsonl."""
        asked = asked_trackers(config) if rank == 0 else []
        self._limit = limit
        self.running: list[Tracker] = []
        self.unstarted: list[tuple[str, str]] = []  # names, and why not; not told yet
        for each in asked:
            try:
                self.running.append(Tracker(each, folder, start, limit))
            except OSError as error:
                self.unstarted.append((each.kind, f"its process cannot be started: {error.strerror}"))

    def begin_end(self) -> None:
        """Let all know that the run has ended."""
        for each in self.running:
            each.begin_end()

    def end(self) -> Iterator[tuple[str, Status]]:
        """Yield the name of each and how it went, all within the limit; the second time nothing."""
        self.begin_end()
        until = time.monotonic() + self._limit + GRACE
        running, self.running = self.running, []
        for each in running:
            yield each.name, each.end(until)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        for _each in self.end():
            pass


def tell_trackers(trackers: Trackers, warning: Callable[[str], None]) -> None:
    """Show what has gone wrong with a tracker since the last call; the run continues without it."""
    unstarted, trackers.unstarted = trackers.unstarted, []
    for name, problem in [*unstarted, *((each.name, each.look()) for each in trackers.running)]:
        if problem:
            warning(f"--{name}: {problem}; the run continues")


def ended_trackers(trackers: Trackers, step: int, log: RunLog, console: Console) -> list[str]:
    """End the trackers, log how it went with each, and return that in lines for the screen."""
    if not trackers.running:
        return []
    console.doing(f"sending the rest to {', '.join(each.name for each in trackers.running)}")
    lines = []
    for name, status in trackers.end():
        fields: Mapping[str, Any] = {key: value for key, value in status._asdict().items() if key != "final"}
        with suppress(InputError):  # a full disk was told already
            log.event("tracker", step=step, name=name, **fields)
        lines.append(_line(name, status))
    console.doing("")
    return lines


def _line(name: str, status: Status) -> str:
    lost = f", {status.dropped} dropped" if status.dropped else ""
    problem = f"; {escaped(status.problem)}" if status.problem else ""
    place = f": {escaped(status.where)}" if status.where else ""
    return f"{name + ':':<13} {status.sent} events sent{lost}{place}{problem}"
