"""The run's page, report.html: written by a process of its own every few minutes and at the end, beside the run.

Leaves out what is on the page (report/).
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmc_jax.logs.files import REPORT
from llmc_jax.machine.jax_setup import ONE_THREAD, child_environment

SWITCH = "LLMC_JAX_REPORT"  # of the environment: 0 writes no page in any run
FIRST = 20.0  # seconds until the first page, so that there soon is one to open
SHARE = 0.03  # of one core's time at most, which the page of a very long run would exceed
LONGEST = 300.0  # seconds that one page may take
AT_END = 10.0  # seconds that the run waits in the end
KILLED = 1.0  # seconds that it waits for a process that it has killed


def command(folder: Path) -> list[str]:
    """Return the command that writes the page of a run folder once."""
    return [sys.executable, "-P", "-m", "llmc_jax.report", "--quiet", str(folder.absolute())]


@dataclass
class PageWriter:
    """Writes the page again and again. A page that cannot be written is worth one warning, not the run."""

    folder: Path
    minutes: float  # between two pages; 0: there is none
    warn: Callable[[str], None]
    is_there: Callable[[], bool]  # whether the folder is still the run's, without which nothing is written
    writing: bool = True  # off in all processes of a run but the first

    def __post_init__(self) -> None:
        self._on = self.writing and self.minutes > 0 and os.environ.get(SWITCH) != "0"
        self.path = self.folder / REPORT
        self.written = False  # at least once, by this run
        self._child: _Child | None = None
        self._warned = False
        self._next = time.monotonic() + min(FIRST, 60 * self.minutes) if self._on else math.inf

    def refresh(self) -> None:
        """Begin a new page if the last one is old enough; look after the one in work."""
        if self._child is not None:
            self._look(0.0)
        elif time.monotonic() >= self._next and self.is_there():
            self._begin()

    def finish(self) -> None:
        """Write the last page, after the one in work. Takes ten seconds at most."""
        if not self._on:
            return
        until = time.monotonic() + AT_END
        if self._child is not None:
            self._look(until - time.monotonic())
        if self._child is None and self.is_there():
            self._begin()
        if self._child is not None:
            self._look(until - time.monotonic())
        self.close()

    def close(self) -> None:
        """End the process in work."""
        if self._child is not None:
            self._end(f"was not complete after {self._child.seconds:.0f} s")

    def _begin(self) -> None:
        try:
            self._child = _Child(self.folder)
        except OSError as error:
            self._failed(str(error))
            self._on, self._next = False, math.inf

    def _look(self, wait: float) -> None:
        """Wait for the process in work, so many seconds at most; one that takes too long is ended."""
        assert self._child is not None
        status = self._child.status(max(0.0, wait))
        if status is None:
            if self._child.seconds > LONGEST:
                self._end(f"took longer than {LONGEST:.0f} s")
            return
        self._ended(None if status == 0 else f"the process ended with status {status}: {self._child.last_words()}")

    def _end(self, problem: str) -> None:
        assert self._child is not None
        self._child.kill()
        with suppress(OSError):
            for unfinished in self.folder.glob(f".{REPORT}.*.tmp"):
                unfinished.unlink(missing_ok=True)
        self._ended(problem)

    def _ended(self, problem: str | None) -> None:
        assert self._child is not None
        self._next = time.monotonic() + max(60 * self.minutes, self._child.seconds / SHARE)
        self._child.close()
        self._child = None
        self.written = self.written or problem is None
        if problem is not None:
            self._failed(problem)

    def _failed(self, problem: str) -> None:
        if not self._warned:
            self.warn(f"{self.path}: cannot be written, training goes on: {problem}")
        self._warned = True


class _Child:
    """A process that writes the page once. It hears no Ctrl-C of the run's, and gives way to the run."""

    def __init__(self, folder: Path) -> None:
        self._began = time.monotonic()
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command(folder),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
                env=child_environment() | ONE_THREAD, start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._errors.close()
            raise
        with suppress(OSError):  # it has ended, or the system does not let us
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 10)

    @property
    def seconds(self) -> float:
        """Return for how long it has been working."""
        return time.monotonic() - self._began

    def status(self, wait: float) -> int | None:
        """Return its exit status, waiting so many seconds at most; None while it works."""
        if not wait:
            return self._process.poll()
        try:
            return self._process.wait(timeout=wait)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """Return the last line that it wrote on standard error."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "it said nothing"

    def kill(self) -> None:
        """End it at once, or as soon as a disk answers that it waits for."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILLED)

    def close(self) -> None:
        """Give back what it wrote."""
        self._errors.close()
