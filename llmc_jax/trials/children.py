"""Processes that measure for a parent, and that may crash or hang without it: each failure costs one task.

A child stays for one task after the other. Where one fails or runs out of time, its GPU context may be spoilt: it is
killed, and the next task begins a new one. The child's side is worker.py. Imports no JAX.
"""

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.child import Child
from llmc_jax.base.commands import ROOT
from llmc_jax.machine.jax_setup import child_environment

Figures = dict[str, float | int | str]
SAME, OTHER, FREE = "the same", "OTHER", "not promised"  # the figure `bits` of numerics


tell: Callable[[bool], object] = bool  # a measuring process's parent whether it runs (worker.py); elsewhere nobody


@contextmanager
def running() -> Iterator[None]:
    """Run within the block what is compiled already: what does not come back from there hangs."""
    tell(True)
    yield
    tell(False)


class Tried(NamedTuple):
    """A kernel, or a whole step."""

    problem: str = ""  # what is wrong with it; empty: nothing
    seconds: float = 0.0  # of a step; 0: not known
    unjudged: str = ""  # why nobody knows whether it is right
    beside: float = 0.0  # seconds of the step that took turns with it; 0: none did


class NotMeasured(Exception):
    """This cannot be measured here; the message says why. No error."""


START_SECONDS = 30.0  # that a process may take to start, beside its first task's own time
# In an error that says nothing of what was measured: the GPU, the host or its disk is full, or ptxas was killed.
OF_THE_MACHINE = re.compile(
    r"(?i)RESOURCE_EXHAUSTED|out.of.memory|bad_alloc|cannot allocate memory|no space left|"
    r"ptxas exited with \D*(9|15|137|143)\b"
)
LATE = "not done when time was up"
END_SECONDS = 10.0  # after which a process that was killed and is still there counts as one that cannot be ended


class Task(NamedTuple):
    """One call of `measure(**arguments)` of a module."""

    name: str
    module: str  # its full name
    arguments: Mapping[str, Any]  # that pickle takes
    seconds: float  # that it may take to compile, once its process has started, and then to run


class Outcome(NamedTuple):
    """What came of a task."""

    # DONE, SKIPPED, FAILED, UNJUDGED (the machine failed, or compiling took too long: that says nothing of what was
    # measured); TIME: `until` came before its own time
    kind: str
    content: Any  # the figures; of the others why there are none
    seconds: float
    ran: float = 0.0  # seconds for which it was running when time was up


class Stuck(Exception):
    """A child is still there although it was killed: what it waits for is in the driver, and holds the GPU."""


class Children:
    """One child at a time, begun when a task needs it; `close` ends the last one.

    A child ends by itself where its connection does: when the parent is gone too. folder: as of a `Child`.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path | None = ROOT) -> None:
        self.environment = child_environment(environment)
        self.folder = folder
        self.stuck: int | None = None  # the id of a process that cannot be ended
        self._child: tuple[Child, Connection] | None = None

    def measure(self, task: Task, until: float = float("inf")) -> Outcome:
        """Return what came of a task. until: a time of `time.monotonic` at which it is over, come what may.

        Raises Stuck once a child could not be ended.
        """
        if self.stuck is not None:
            raise Stuck(f"process {self.stuck} cannot be ended")
        began, limit = time.monotonic(), time.monotonic() + task.seconds
        if began >= until:
            return Outcome("TIME", LATE, 0.0)
        if self._child is None:
            self._child, limit = self._begun(), limit + START_SECONDS
        kind, content = self.ask(task, min(limit, until))
        since = None  # when it began to run what is compiled
        while kind == "RUNNING":
            now = time.monotonic()
            since, limit = now if content else None, now + task.seconds
            kind, content = self.ask(None, min(limit, until))
        if kind == "TIME" and limit <= until:
            told = f"not done after {task.seconds:g} s"
            kind, content = ("FAILED", told) if since else ("UNJUDGED", f"{told}, compilation included")
        if kind in ("FAILED", "UNJUDGED", "TIME"):
            self.close()
        now = time.monotonic()
        return Outcome(kind, content, now - began, now - since if since else 0.0)

    def _begun(self) -> tuple[Child, Connection]:
        ours, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            words = {"environment": self.environment, "folder": self.folder, "pass_fds": [number]}
            return Child("llmc_jax.trials.worker", [str(number)], **words), ours  # type: ignore[arg-type]

    def ask(self, task: Task | None, within: float) -> tuple[str, Any]:
        """Return kind and content of the child's next answer, to a task if given; TIME: it ran out.

        Of one that has ended: UNJUDGED if the system has killed it, else FAILED; and its last words.
        """
        assert self._child is not None
        process, connection = self._child
        try:
            if task:
                connection.send(task)
            if connection.poll(max(0.0, within - time.monotonic())):
                return connection.recv()
        except (EOFError, OSError):
            status = process.status(END_SECONDS)
            words = f"the process ended with status {'unknown' if status is None else status}: {process.last_words(2)}"
            by_the_system = status in (-signal.SIGKILL, -signal.SIGTERM) or OF_THE_MACHINE.search(words)
            return "UNJUDGED" if by_the_system else "FAILED", words
        return "TIME", LATE

    def close(self) -> None:
        """End the child, if there is one; the next task begins another. Sets `stuck` where it cannot be ended."""
        if self._child is None:
            return
        process, connection = self._child
        self._child = None
        connection.close()
        if process.kill(END_SECONDS):
            process.close()
        else:
            self.stuck = process.pid
