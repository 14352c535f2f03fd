"""The view on a terminal: drawn again and again, with keys; or once, as plain lines. It only reads."""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from llmc_jax.base.errors import InputError
from llmc_jax.base.streams import escaped, takes_ascii_only
from llmc_jax.logs.files import METRICS, runs_in
from llmc_jax.logs.follow import Follower
from llmc_jax.logs.state import read_state, run_state
from llmc_jax.watch.folder import ShelfPage
from llmc_jax.watch.story import Story
from llmc_jax.watch.view import Moment, Room, view

MOMENT = 0.3  # seconds of reading between two views
QUIT = ("q", "Q", "\x1b")


class RunPage:
    """The view of one run."""

    plain_width = 80  # cells where there is no terminal

    def __init__(self, name: str, metrics: Path) -> None:
        self.name = name
        self._follower = Follower(metrics)
        self._story, self._begun = Story(), 1
        self._problem: str | None = None

    def look(self) -> bool:
        """Read what is new, for a moment; return whether there is more. What cannot be read is said and tried again."""
        until = time.monotonic() + MOMENT
        try:
            for events in self._follower.all():
                if self._follower.begun != self._begun:  # a resume has cut the file: what it dropped is forgotten
                    self._story, self._begun = Story(), self._follower.begun
                self._story.take(events)
                if time.monotonic() > until:
                    break
            self._problem = None if self._follower.path.exists() else f"{self._follower.path}: no longer exists"
        except InputError as error:
            self._problem = str(error)
            return False
        return self._follower.behind

    def ended(self) -> bool:
        """Return whether the run has ended, without reading all of it. Raises InputError."""
        return read_state(self._follower.path).ended

    def moment(self) -> Moment:
        """Return all that the view shows."""
        state = run_state(self._story.seen)
        return Moment(self.name, self._story, state, time.time(), tuple(self._notes()))

    def _notes(self) -> Iterator[str]:
        if self._follower.behind:
            yield f"reading: {self._follower.place / 1e6:,.0f} MB so far"
        if self._follower.damaged:
            yield f"{self._follower.damaged} damaged lines of {self._follower.path.name} skipped"
        if self._problem:
            yield escaped(self._problem)

    def lines(self, room: Room) -> list[Text]:
        """Return the view."""
        return view(self.moment(), room)


Page = RunPage | ShelfPage  # what is on the screen


def page_of(path: Path) -> Page:
    """Return the page of a path: a run's, or that of a folder of them. Raises InputError."""
    is_folder = path.is_dir()
    metrics = path / METRICS if is_folder else path
    if metrics.is_file() and metrics.suffix == Path(METRICS).suffix:
        return RunPage(path.resolve().name if is_folder else str(path), metrics)
    if not is_folder or not runs_in(path):
        raise InputError(f"{path}: no run (no {METRICS}); give a run folder (-o of train.py), or a folder of them")
    return ShelfPage(path)


# ----- once ---------------------------------------------------------------------------------------------------------


def look_all(page: Page) -> None:
    """Read all that there is."""
    while page.look():
        pass


def show_once(page: Page) -> None:
    """Print what a page shows, as plain lines; on a terminal with colours."""
    look_all(page)
    console = Console(file=sys.stdout, highlight=False, force_jupyter=False)
    width = console.width if sys.stdout.isatty() else page.plain_width
    for line in page.lines(Room(width, None, takes_ascii_only(sys.stdout.encoding))):
        line.rstrip()
        console.print(line, soft_wrap=True)


# ----- live ---------------------------------------------------------------------------------------------------------


@contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yield what waits for a key, so many seconds, and returns it.

    Keys come without Enter. A signal raises SystemExit, but for Ctrl-Z, which would leave the terminal as the view has
    it and does nothing. In the end the terminal is as it was.
    """
    with ExitStack() as closing:
        descriptor = _unbuffered(closing)
        for each, does in ((signal.SIGTERM, _end), (signal.SIGHUP, _end), (signal.SIGTSTP, signal.SIG_IGN)):
            closing.callback(signal.signal, each, signal.signal(each, does))
        yield lambda seconds: _wait(descriptor, seconds)


def _end(number: int, _: object = None) -> NoReturn:
    raise SystemExit(128 + number)


def _unbuffered(closing: ExitStack) -> int | None:
    """Let the terminal hand on each key at once; return what keys are read from, None where there is no terminal."""
    import termios
    import tty

    if sys.stdin is None or not sys.stdin.isatty():
        return None
    descriptor = sys.stdin.fileno()
    closing.callback(termios.tcsetattr, descriptor, termios.TCSADRAIN, termios.tcgetattr(descriptor))
    tty.setcbreak(descriptor)
    return descriptor


def _wait(descriptor: int | None, seconds: float) -> str:
    """Return the key that was pressed within some seconds; nothing where none was."""
    if descriptor is None:
        time.sleep(seconds)
        return ""
    if not select.select([descriptor], [], [], seconds)[0]:
        return ""
    key = os.read(descriptor, 64)
    return key.decode(errors="replace") if key else _end(signal.SIGHUP)  # the terminal is gone


def show_live(page: Page, every: float) -> int:
    """Show a page until `q`, `Esc` or a signal; return the exit status. Its last view stays on the terminal."""
    console = Console(file=sys.stdout, highlight=False, force_jupyter=False)
    with keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        more = True
        while wait(0.0 if more else every) not in QUIT:
            more = page.look()
            live.update(_screen(page, console), refresh=True)
    show_once(page)
    return 0


def _screen(page: Page, console: Console) -> Group:
    width, height = console.size
    ascii_only = takes_ascii_only(console.encoding)
    lines = page.lines(Room(width, height - 1, ascii_only))[: height - 1]
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines, *[Text("")] * (height - 1 - len(lines)), Text("q: quit"[:width], "dim", no_wrap=True))
