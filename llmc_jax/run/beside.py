"""The run's page, report.html, and its picture, curves.png: written by a process of its own beside the run.

Leaves out when they are due and what is in them (report/).
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from llmc_jax.base.child import Child
from llmc_jax.logs.files import CURVES, REPORT
from llmc_jax.machine.jax_setup import ONE_THREAD, child_environment

MODULE = "llmc_jax.report.beside"
SWITCH = "LLMC_JAX_REPORT"  # of the environment: 0 writes no page in any run
AT_END = 30.0  # seconds that the run waits for both in the end, most of them only where others take the cores


class Beside:
    """The process that writes both again and again. What cannot be written is worth one warning, not the run."""

    def __init__(
        self,
        folder: Path,
        title: str,  # of the picture
        baselines: Mapping[str, float],  # in the picture
        minutes: float,  # between two pages; 0: there is none
        warn: Callable[[str], None],
        is_there: Callable[[], bool],  # whether the folder is still the run's, without which nothing is written
        *,
        writing: bool = True,  # off in all processes of a run but the first
    ) -> None:
        page = minutes if os.environ.get(SWITCH) != "0" else 0.0
        self.folder, self._warn, self._is_there = folder, warn, is_there
        request = json.dumps([str(folder.absolute()), title, dict(baselines), page])
        self._both = f"{CURVES}, {REPORT}" if page > 0 else CURVES
        self.written: set[str] = set()  # names, at least once by this run
        self._warned: set[str] = set()
        self._child = self._begun(request) if writing else None

    def _begun(self, request: str) -> Child | None:
        try:
            return Child(MODULE, [request], environment=child_environment() | ONE_THREAD, nice=10)
        except OSError as error:
            self._failed(self._both, str(error))
            return None

    def refresh(self) -> None:
        """Look after the process: show what goes wrong, once for each file."""
        if self._child is None:
            return
        status = self._child.status()
        for name, problem in self._child.said().items():
            if problem:
                self._failed(name, problem)
            else:
                self.written.add(name)
        if status:
            self._failed(self._both, f"the process ended with status {status}: {self._child.last_words()}")
        if status is not None:  # 0: the run's folder is gone
            self.close()

    def finish(self) -> None:
        """Have both written a last time, after the one in work."""
        if self._child is not None and self._is_there():
            self._child.tell("end\n")
            if self._child.status(AT_END) is None:
                self._failed(self._both, f"not complete {AT_END:.0f} s after the run's end")
            self.refresh()
        self.close()

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.status() is None:
            child.kill()
        child.close()
        with suppress(OSError):
            for name in (CURVES, REPORT):
                for unfinished in self.folder.glob(f".{name}.*.tmp"):
                    unfinished.unlink(missing_ok=True)

    def _failed(self, name: str, problem: str) -> None:
        if name not in self._warned:
            self._warn(f"{self.folder / name}: cannot be written: {problem}")
        self._warned.add(name)
