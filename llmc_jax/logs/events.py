"""All events of a run, read in little memory: figures of steps as columns, all others as they are.

A damaged file gives what can be read of it, and a note about the rest. Leaves out single files' names (files.py).
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmc_jax.errors import FormatError, InputError
from llmc_jax.files import reason
from llmc_jax.logs.curves import Curve
from llmc_jax.logs.files import NON_FINITE, parse_event

OF_STEPS = frozenset({"train", "val", "eval", "gpu"})  # kinds of events that are kept as columns
LONGEST_LINE = 1 << 22  # bytes; a sample takes a hundredth
LARGEST_STEP = 10**12
LARGEST_TIME = 1e11  # seconds since 1970
LARGEST_NUMBER = 10**300  # a larger integer is no float
MOST_OTHERS = 20_000  # events that are kept as they are
ABSENT = -1.0  # a time that an event does not have


@dataclass
class Column:
    """The numbers of one field."""

    rows: array = field(default_factory=lambda: array("I"))  # of the events that have it
    values: array = field(default_factory=lambda: array("d"))


@dataclass
class Table:
    """The events of one kind, in the order of the file."""

    steps: array = field(default_factory=lambda: array("q"))
    times: array = field(default_factory=lambda: array("d"))  # seconds since 1970, or ABSENT
    columns: dict[str, Column] = field(default_factory=dict)
    words: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # of text fields: row and word at each change

    def put(self, step: int, time: float, event: dict[str, Any]) -> None:
        """Take an event."""
        row = len(self.steps)
        self.steps.append(step)
        self.times.append(time)
        for name, value in event.items():
            kind = type(value)
            if kind is float or kind is bool or (kind is int and abs(value) < LARGEST_NUMBER):
                pass
            elif kind is str and value in NON_FINITE:
                value = float(value)
            elif kind is str:
                changes = self.words.setdefault(name, [])
                if not changes or changes[-1][1] != value:
                    changes.append((row, value))
                continue
            else:
                continue
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = Column()
            column.values.append(value)
            column.rows.append(row)


@dataclass
class Events:
    """What a metrics.jsonl holds."""

    tables: dict[str, Table] = field(default_factory=dict)  # by the kinds in OF_STEPS
    others: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be read
    last_time: float | None = None  # of the last event that has one
    first_time: float | None = None

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of some kinds that are no columns, in order."""
        return [event for event in self.others if event["event"] in kinds]


@dataclass(frozen=True)
class Figures:
    """One field over the steps, each step once and in order, with the time of each."""

    steps: np.ndarray  # (n,) int64
    values: np.ndarray  # (n,) float64
    times: np.ndarray  # (n,) float64, NaN where the event has none

    @property
    def curve(self) -> Curve:
        return Curve(self.steps, self.values)


NO_FIGURES = Figures(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


def figures(events: Events, kind: str, name: str) -> Figures:
    """Return a field of one kind of event. A step logged again (after a resume) counts once, as it was last."""
    table = events.tables.get(kind)
    column = table.columns.get(name) if table else None
    if table is None or column is None:
        return NO_FIGURES
    rows = np.frombuffer(column.rows, np.uint32) if len(column.rows) else np.zeros(0, np.uint32)
    steps = np.frombuffer(table.steps, np.int64)[rows]
    times = np.frombuffer(table.times, np.float64)[rows]
    values = np.array(column.values, np.float64)
    if len(steps) > 1 and not (np.diff(steps) > 0).all():
        unique, places = np.unique(steps[::-1], return_index=True)  # of equal steps the first, which was the last
        last = len(steps) - 1 - places
        steps, values, times = unique, values[last], times[last]
    return Figures(steps, values, np.where(times == ABSENT, np.nan, times))


def read_events(path: Path) -> Events:
    """Return the events of a file of ours; lines that are none become a note. Raises InputError, naming the file."""
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {reason(error)}") from error


def _read(path: Path, file: BinaryIO) -> Events:
    events, bad = Events(), array("Q")
    for number, line in enumerate(_lines(file, events.notes), 1):
        try:
            _take(events, parse_event("", line))
        except FormatError:
            bad.append(number)
    if bad:
        words = f"line {bad[0]} is no event" if len(bad) == 1 else f"{len(bad):,} lines are no events, first {bad[0]}"
        events.notes.append(f"{path.name}: {words}; left out")
    if len(events.others) == MOST_OTHERS:
        events.notes.append(
            f"{path.name}: more than {MOST_OTHERS:,} events beside those of steps; the rest is left out"
        )
    return events


def _take(events: Events, event: dict[str, Any]) -> None:
    """Keep an event. Raises FormatError for what is none."""
    kind, step, time = event.get("event"), event.get("step"), _time(event.get("time"))
    if not isinstance(kind, str):
        raise FormatError("an event has a kind")
    if time is not None:
        events.last_time = time
        events.first_time = time if events.first_time is None else events.first_time
    if kind in OF_STEPS:
        if type(step) is not int or not 0 <= step <= LARGEST_STEP:
            raise FormatError("its step is a whole number from 0")
        events.tables.setdefault(kind, Table()).put(step, ABSENT if time is None else time, event)
    elif len(events.others) < MOST_OTHERS:
        events.others.append(event)


def _time(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < LARGEST_TIME else None


def _lines(file: BinaryIO, notes: list[str]) -> Iterator[bytes]:
    """Yield the lines in bounded memory; of one that is too long nothing."""
    while text := file.readline(LONGEST_LINE):
        rest = text
        while len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
        if not rest.endswith(b"\n"):
            notes.append("the last line has no end (still being written, or cut off) and is left out")
            return
        yield text if rest is text else b""
