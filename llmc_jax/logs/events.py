"""All events of a run, read in little memory: figures of steps as columns, all others as they are.

A damaged file gives what can be read of it, and a note about the rest. Leaves out single files' names (files.py).
"""

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.logs.curves import NONE, Curve
from llmc_jax.logs.files import OF_ALL, OF_STEPS, figure_of, time_of
from llmc_jax.logs.follow import Follower

TORN = "the last line is incomplete (still being written, or cut off) and is skipped"
PIECE = 1 << 17  # bytes that are read at once, of which the events take ten times as many
MOST_OTHERS = 20_000  # events that are kept as they are, other than those of OF_STEPS


@dataclass
class Column:
    """The numbers of one field."""

    values: array = field(default_factory=lambda: array("d"))  # of all rows up to the last that has it
    absent: array = field(default_factory=lambda: array("I"))  # rows that lack it; their value is NaN

    def put(self, row: int, values: array, absent: Sequence[int] = ()) -> None:
        """Take the values of the rows from `row` on; those before it that have none yet lack it."""
        gap = range(len(self.values), row)
        self.absent.extend((*gap, *absent))
        self.values.extend([math.nan] * len(gap))
        self.values.extend(values)


@dataclass
class Table:
    """The events of one kind, in the order of the file."""

    steps: array = field(default_factory=lambda: array("q"))
    times: array = field(default_factory=lambda: array("d"))  # seconds since 1970, NaN where an event has none
    columns: dict[str, Column] = field(default_factory=dict)

    def put(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take some events."""
        row = len(self.steps)
        self.steps.extend(event["step"] for event in events)
        self.times.extend(_time(event) for event in events)
        for name in {*chain.from_iterable(events)} - OF_ALL:
            try:
                values = list(map(itemgetter(name), events))  # twice as fast
            except KeyError:
                values = [event.get(name) for event in events]
            self._put(name, row, values)

    def _put(self, name: str, row: int, values: list[Any]) -> None:
        try:
            self.columns.setdefault(name, Column()).put(row, array("d", values))
        except (TypeError, OverflowError):  # a word, nothing, an enormous integer
            numbers = [figure_of(value) for value in values]
            absent = [row + at for at, number in enumerate(numbers) if number is None]
            self.columns[name].put(row, array("d", [math.nan if each is None else each for each in numbers]), absent)


@dataclass
class Events:
    """What a metrics.jsonl holds."""

    tables: dict[str, Table] = field(default_factory=dict)  # by the kinds in OF_STEPS
    others: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be read
    first_bad: int | None = None  # the number of the first line that is not an event
    first_time: float | None = None  # of the first event that has one

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of some kinds that are no columns, in order."""
        return [event for event in self.others if event["event"] in kinds]


def figures(events: Events, kind: str, name: str) -> Curve:
    """Return a field of one kind of event. A step logged again (after a resume) counts once, as it was last."""
    table = events.tables.get(kind)
    column = table.columns.get(name) if table else None
    if table is None or column is None:
        return NONE
    values = np.frombuffer(column.values, np.float64)
    steps, times = np.frombuffer(table.steps, np.int64)[: len(values)], np.frombuffer(table.times)[: len(values)]
    if column.absent:
        having = np.ones(len(values), bool)
        having[np.frombuffer(column.absent, np.uint32)] = False
        steps, values, times = steps[having], values[having], times[having]
    if len(steps) > 1 and not (np.diff(steps) > 0).all():
        unique, places = np.unique(steps[::-1], return_index=True)  # of equal steps the first, which was the last
        last = len(steps) - 1 - places
        steps, values, times = unique, values[last], times[last]
    return Curve(steps, values, times)


def read_events(path: Path) -> Events:
    """Return the events of a file of ours; lines that are none become a note. Raises InputError, naming the file."""
    events, follower = Events(), Follower(path, piece=PIECE)
    if not os.path.exists(path):
        raise InputError(f"{path}: cannot read it: No such file or directory")
    for found in follower.all():
        if follower.begun > 1:  # a resume has cut the file back
            return read_events(path)
        _take(events, found)
        del found  # before the next are there
    if count := follower.damaged:
        events.first_bad = follower.first_damaged
        several = f"{count:,} lines are not events, the first is line {events.first_bad}"
        words = several if count > 1 else f"line {events.first_bad} is not an event"
        events.notes.append(f"{path.name}: {words}; skipped")
    if follower.torn:
        events.notes.append(TORN)
    if len(events.others) == MOST_OTHERS:
        events.notes.append(f"{path.name}: only the first {MOST_OTHERS:,} events other than steps are read")
    return events


def _take(events: Events, found: Sequence[dict[str, Any]]) -> None:
    """Keep some events."""
    if events.first_time is None:
        events.first_time = next((time for event in found if not math.isnan(time := _time(event))), None)
    by_kind = defaultdict(list)
    for event in found:
        by_kind[event["event"] if event["event"] in OF_STEPS else ""].append(event)
    events.others += by_kind.pop("", [])[: MOST_OTHERS - len(events.others)]
    for kind, each in by_kind.items():
        events.tables.setdefault(kind, Table()).put(each)


def _time(event: Mapping[str, Any]) -> float:
    seconds = time_of(event.get("time"))
    return math.nan if seconds is None else float(seconds)
