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
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import plural
from llmc_jax.logs.curves import NONE, Curve
from llmc_jax.logs.files import OF_ALL, OF_STEPS, figure_of, time_of
from llmc_jax.logs.follow import Follower

TORN = "the last line is incomplete (still being written, or cut off) and is skipped"
ABSENT = np.int64(0x7FF8_0000_0000_0ABC).view(np.float64)  # in place of a number: a NaN that no computation makes
MOST_OTHERS = 20_000  # events that are kept as they are, other than those of OF_STEPS


@dataclass
class Table:
    """The events of one kind, in the order of the file."""

    steps: array = field(default_factory=lambda: array("q"))
    times: array = field(default_factory=lambda: array("d"))  # seconds since 1970, NaN where an event has none
    columns: dict[str, array] = field(default_factory=dict)  # of all rows up to the last that has a number; else ABSENT

    def put(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take some events."""
        row = len(self.steps)
        self.steps.extend(event["step"] for event in events)
        self.times.extend(_time(event) for event in events)
        for name in {*chain.from_iterable(events)} - OF_ALL:
            column = self.columns.setdefault(name, array("d"))
            column.extend([ABSENT] * (row - len(column)))
            values = [event.get(name) for event in events]
            try:
                column.extend(array("d", values))
            except (TypeError, OverflowError):  # a word, nothing, an enormous integer
                numbers = map(figure_of, values)
                column.extend(ABSENT if number is None else number for number in numbers)


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
    if table is None or name not in table.columns:
        return NONE
    values = np.frombuffer(table.columns[name], np.float64)
    steps, times = np.frombuffer(table.steps, np.int64)[: len(values)], np.frombuffer(table.times)[: len(values)]
    having = values.view(np.int64) != ABSENT.view(np.int64)
    if not having.all():
        steps, values, times = steps[having], values[having], times[having]
    if len(steps) > 1 and not (np.diff(steps) > 0).all():
        unique, places = np.unique(steps[::-1], return_index=True)  # of equal steps the first, which was the last
        last = len(steps) - 1 - places
        steps, values, times = unique, values[last], times[last]
    return Curve(steps, values, times)


def read_events(path: Path) -> Events:
    """Return the events of a file of ours; lines that are none become a note. Raises InputError, naming the file."""
    events, follower = Events(), Follower(path)
    if not os.path.exists(path):
        raise InputError(f"{path}: cannot read it: No such file or directory")
    for found in follower.all():
        if follower.begun > 1:  # a resume has cut the file back
            return read_events(path)
        _take(events, found)
        del found  # before the next are there
    if count := follower.damaged:
        events.first_bad = follower.first_damaged
        words = f"{plural(count, 'line')} without an event, the first is line {events.first_bad}"
        events.notes.append(f"{path.name}: left out: {words}")
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
