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
    columns: Sequence["ProgressColumn"], total: float | None, line: Callable[["Task"], str], **fields: Any
) -> Iterator[tuple["Task", Callable[..., None]]]:
    """Show progress on standard error: a bar on a terminal, else a line now and then.

    total: of what is counted, None: not known. line: what to say of the task beside the time left. fields: of the task,
    their first values. Yields the task, and what takes rich's arguments that bring it up to date.
    """
    from rich.console import Console
    from rich.progress import Progress

    on_terminal = sys.stderr.isatty()
    shown = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not on_terminal) as bar:
        bar.add_task("", total=total, **fields)
        [task] = bar.tasks

        def update(**changes: Any) -> None:
            nonlocal shown
            bar.update(task.id, **changes)
            if on_terminal or time.monotonic() - shown < PROGRESS_SECONDS:
                return
            shown = time.monotonic()
            print_error(f"{line(task)} | {task.time_remaining or 0:.0f} s left")

        yield task, update


def speed_of(task: "Task") -> str:
    """Return how fast a task that counts bytes goes on."""
    return f"{(task.speed or 0) / MEGABYTE:.1f} MB/s"
