"""A module of this package run as a process: started, asked, heard and ended in time. Leaves out what it does.

Its output and its errors go to files that nobody else sees.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

KILLED = 1.0  # seconds to wait for a process that was killed
LONGEST = 1 << 16  # bytes from the end of its output and errors that are read


class Child:
    """A process, which may hang or crash as it likes. Its standard input ends where this process does."""

    def __init__(
        self,
        module: str,
        words: Sequence[str] = (),
        *,
        environment: Mapping[str, str],
        nice: int = 0,
        folder: Path | None = None,
        pass_fds: Sequence[int] = (),
        python: str = "",
        hears_signals: bool = False,
    ) -> None:
        """Start `python -m MODULE WORDS`. Raises OSError.

        nice: how much it gives way to others. folder: in which it works, and whose modules come first, of another
        checkout for example; without one those of the folder that the run works in do not. python: the interpreter;
        empty: this one. hears_signals: a Ctrl-C ends it, as this process; else it has a session of its own.
        """
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [python or sys.executable, *(() if folder else ("-P",)), "-m", module, *words],
            stdin=subprocess.PIPE, stdout=self._output, stderr=self._errors,
            env=environment, cwd=folder, start_new_session=not hears_signals, pass_fds=pass_fds,
        )  # fmt: skip
        self.pid, self._has_session = self._process.pid, not hears_signals
        if nice:
            with suppress(OSError):  # it has ended, or the system does not let us
                os.setpriority(os.PRIO_PROCESS, self.pid, nice)

    def tell(self, words: str = "") -> None:
        """Write the last words on its standard input, and end that. Does nothing the second time."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended
            if words and not self._process.stdin.closed:
                self._process.stdin.write(words.encode())
            self._process.stdin.close()

    def status(self, wait: float = 0.0) -> int | None:
        """Return its exit status, waiting so many seconds at most; None while it works."""
        if not wait:  # as at each step of a run
            return self._process.poll()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(0.0, wait))
        return None

    def said(self) -> dict[str, Any]:
        """Return the newest object that it has written as a line of JSON on its output; an empty one before."""
        for line in reversed(end_of(self._output).split(b"\n")[:-1]):
            with suppress(ValueError):
                if isinstance(found := json.loads(line), dict):
                    return found
        return {}

    def last_words(self, lines: int = 1) -> str:
        """Return the last lines that it has written on standard error, in one."""
        text = end_of(self._errors).decode(errors="replace")
        found = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(found[-lines:])[-300:] if found else "it said nothing"

    def kill(self, wait: float = KILLED) -> bool:
        """End it, and what it started where it has a session of its own.

        Return whether it is gone: it may wait for a disk or a driver.
        """
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, of a group that has ended
            if self._has_session:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                self._process.kill()
        return self.status(wait) is not None

    def close(self) -> None:
        """Give back what it wrote."""
        self.tell()
        self._output.close()
        self._errors.close()


class Failed(Exception):
    """A process has ended, or was ended, without an answer; the message says how."""


def answer_of(
    module: str,
    words: Sequence[str] = (),
    *,
    asked: str = "",
    limit: float,
    environment: Mapping[str, str],
    python: str = "",
) -> Any:
    """Return what a module that is run as a process answers: the last line of its output, a JSON object.

    asked: what it reads on its standard input. limit: seconds. Raises Failed.
    """
    try:
        child = Child(module, words, environment=environment, python=python, hears_signals=True)
    except OSError as error:
        raise Failed(str(error)) from error
    try:
        child.tell(asked)
        status = child.status(limit)
        if status is None:
            raise Failed(f"it was not done after {limit:g} s")
        if status or not (found := child.said()):
            raise Failed(f"its process ended with status {status}: {child.last_words()}")
        return found
    finally:
        child.kill()
        child.close()


def end_of(file: Any) -> bytes:
    """Return the end of an open file, of which a process may share the place: so this moves none."""
    return os.pread(file.fileno(), LONGEST, max(0, os.fstat(file.fileno()).st_size - LONGEST))
