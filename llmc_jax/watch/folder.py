"""A table of the runs in a folder. Leaves out the view of one (view.py)."""

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from llmc_jax.base import text
from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import number
from llmc_jax.base.streams import escaped
from llmc_jax.logs.files import METRICS, figure_of, runs_in
from llmc_jax.logs.follow import recent
from llmc_jax.logs.state import RUNNING, RunState, run_state, state_words
from llmc_jax.run.console import duration
from llmc_jax.watch.story import Story
from llmc_jax.watch.view import BAD, STYLES, Room

LONGEST_NAME = 32  # characters of a run's name in the table
HEADINGS = ("run", "state", "last event", "step", "loss", "val loss", "tok/s", "time left")
WORDS = ("run", "state")
OPTIONAL = ("tok/s", "time left", "last event", "val loss")  # the first one goes first where there is no room


class Row(NamedTuple):
    """One run of the table."""

    path: Path
    story: Story  # of its newest events alone
    state: RunState


class ShelfPage:
    """The table of the runs in a folder, each read from its last start that made a step."""

    plain_width = 1000  # cells where there is no terminal: a pipe has all columns

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Row] = []  # those with the newest event first

    def look(self, now: float | None = None) -> bool:
        """Read what is new of all runs. Raises InputError where the folder cannot be read."""
        rows = []
        for path in runs_in(self.folder):
            with suppress(InputError):  # it is gone, or must not be read
                story = Story()
                story.take(recent(path / METRICS, ("val",)))
                rows.append(Row(path, story, run_state(story.seen, now)))
        self.rows = sorted(rows, key=lambda row: (-(row.state.last or 0.0), row.path.name))
        return False

    def lines(self, room: Room) -> list[Text]:
        """Return the table under its title."""
        now = time.time()
        running = sum(row.state.state == RUNNING for row in self.rows)
        when = time.strftime("%H:%M:%S", time.localtime(now))
        words = f"  runs: {len(self.rows)}, running: {running}, at {when}"
        return [Text.assemble((escaped(str(self.folder)), "bold"), words), *table(self.rows, room, now)]


def table(rows: list[Row], room: Room, now: float) -> list[Text]:
    """Return the table of runs as lines: as many runs as there is room for."""
    most = len(rows) if room.height is None else max(1, room.height - 4)
    cells = [_cells(row, now) for row in rows[:most]]
    lines = [
        Text(line) for line in text.table(HEADINGS, cells, left=WORDS, optional=OPTIONAL, width=room.width).split("\n")
    ]
    for line, row in zip(lines[2:], rows, strict=False):
        line.stylize(STYLES.get(row.state.state, BAD).removeprefix("bold "))
    return [*lines, *([Text(f"and {len(rows) - most} more", "dim")] if len(rows) > most else [])]


def _cells(row: Row, now: float) -> list[str]:
    story, state = row.story, row.state
    name = escaped(row.path.name)
    train, val = story.latest.get("train", {}), story.latest.get("val", {})
    running = state.state == RUNNING
    left, speed = story.left(state, now), story.tokens_per_second() if running else None
    return [
        name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…",
        escaped(state_words(state.state))[:12],
        "" if state.silent is None else f"{duration(state.silent)} ago",
        f"{state.step or 0}/{'?' if state.steps is None else state.steps}",
        number(figure_of(train.get("loss"))),
        number(figure_of(val.get("loss"))),
        number(speed, 0),
        "" if left is None else duration(left),
    ]
