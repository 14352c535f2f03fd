"""A run's trackers: the process of each is started, heard, and ended in time. Process 0 has them.

Each follows metrics.jsonl by itself (llmc_jax/trackers/), so that a step of the run costs nothing more with them.
Leaves out what they are told and what each is.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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
MODULE = "llmc_jax.trackers.child"
NICE = 10  # training comes first; at 19 a busy machine would leave no time to send the rest


def asked_trackers(config: TrainConfig) -> dict[str, str]:
    """Return the trackers of a run, keys of KINDS, and what each shows it in: a project, an experiment."""
    targets = {"wandb": config.wandb, "mlflow": config.mlflow}
    own = {"tensorboard": ""} if config.tensorboard else {}
    return own | {kind: target for kind, target in targets.items() if target}


def require_trackers(config: TrainConfig) -> None:
    """Raise InputError where a tracker's package is not installed. Imports none of them."""
    for kind in asked_trackers(config):
        if not KINDS[kind].installed:
            install = "uv run --with" if under_uv() else f"{in_environment('python')} -m pip install"
            raise InputError(f"--{kind}: needs a package that is not installed: {install} {KINDS[kind].package}")


class Trackers:
    """All trackers of a run, a process each; a context that ends them however its block ends."""

    def __init__(self, config: TrainConfig, folder: Path, rank: int, limit: float = LIMIT, *, start: int = 0) -> None:
        """Start them. start: where this start's first event, which was written, begins in metrics.jsonl."""
        self._limit = limit
        self.running: dict[str, Child] = {}
        self._problems: dict[str, str] = {}  # which `tell` shows
        self._told: set[str] = set()
        for kind, target in asked_trackers(config).items() if rank == 0 else ():
            words = [json.dumps(Request(kind, target, str(folder), start, limit))]
            try:
                self.running[kind] = Child(MODULE, words, environment=child_environment() | ONE_THREAD, nice=NICE)
            except OSError as error:
                self._problems[kind] = f"its process cannot be started: {error.strerror}"

    def tell(self, warning: Callable[[str], None]) -> None:
        """Show what has gone wrong, once for each tracker; the run continues without it. Waits for nothing."""
        found = {name: _status(child).problem for name, child in self.running.items() if name not in self._told}
        for name, problem in (self._problems | found).items():
            if problem and name not in self._told:
                self._told.add(name)
                warning(f"--{name}: {problem}; the run continues")

    def end(self) -> dict[str, Status]:
        """End all, within the limit, and return how it went with each; the second time nothing."""
        running, self.running = self.running, {}
        for child in running.values():
            child.tell()
        until, found = time.monotonic() + self._limit + GRACE, {}
        for name, child in running.items():
            over = child.status(until - time.monotonic()) is not None
            if not over:
                child.kill()
            found[name] = _status(child, "" if over else f"was not done {self._limit + GRACE:g} s after the run's end")
            child.close()
        return found

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _status(child: Child, killed: str = "") -> Status:
    """Return what a process has said. killed: why it was, where it left no last word."""
    code = child.status()  # before its words, which may come with its end
    status = Status(**child.said())
    if status.final or status.problem or (code is None and not killed):
        return status
    return status._replace(problem=f"its process {killed or 'ended early'}" + (f" (status {code})" if code else ""))


def ended_trackers(trackers: Trackers, step: int, log: RunLog, console: Console) -> list[str]:
    """End the trackers, log how it went with each, and return that in lines for the screen."""
    if not trackers.running:
        return []
    console.doing(f"sending the rest to {', '.join(trackers.running)}")
    ended = trackers.end()
    for name, status in ended.items():
        fields = status._asdict()
        del fields["final"]
        with suppress(InputError):  # a full disk was told already
            log.event("tracker", step=step, name=name, **fields)
    console.doing("")
    return [_line(*each) for each in ended.items()]


def _line(name: str, status: Status) -> str:
    lost = f", {status.dropped} dropped" if status.dropped else ""
    problem = f"; {escaped(status.problem)}" if status.problem else ""
    place = f": {escaped(status.where)}" if status.where else ""
    return f"{name + ':':<13} {status.sent} events sent{lost}{place}{problem}"
