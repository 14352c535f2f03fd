"""Progress of what takes long, on standard error: a bar on a terminal, else a line now and then.

Leaves out the bar of a training run (run/console.py).
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llmc_jax.base.streams import print_error

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, Task

PROGRESS_SECONDS = 10.0  # between two lines
MEGABYTE = 1e6


@contextmanager
def show_progress(
    columns: Sequence["ProgressColumn"], total: float | None, line: Callable[["Task"], str]
) -> Iterator[Callable[..., None]]:
    """Show progress on standard error: a bar on a terminal, else a line now and then.

    total: of what is counted, None: not known. line: what to say of the task beside the time left. Yields what takes
    rich's arguments that bring the task up to date.
    """
    from rich.console import Console
    from rich.progress import Progress

    on_terminal = sys.stderr.isatty()
    shown = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not on_terminal) as bar:
        bar.add_task("", total=total)
        [task] = bar.tasks

        def update(**changes: Any) -> None:
            nonlocal shown
            bar.update(task.id, **changes)
            if on_terminal or time.monotonic() - shown < PROGRESS_SECONDS:
                return
            shown = time.monotonic()
            print_error(f"{line(task)} | {task.time_remaining or 0:.0f} s left")

        yield update


@contextmanager
def show_bytes(total: int | None) -> Iterator[Callable[..., None]]:
    """Show how many bytes are done, beside the task's description; otherwise as `show_progress`."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    words = TextColumn("{task.description}")
    columns = (words, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())

    def line(task: "Task") -> str:
        done, of, speed = (value / MEGABYTE for value in (task.completed, task.total or 0, task.speed or 0))
        return f"{task.description} | {done:,.0f} of {of:,.0f} MB | {speed:.1f} MB/s"

    with show_progress(columns, total, line) as update:
        yield update
