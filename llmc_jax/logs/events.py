"""All events of a run, read in little memory: figures of steps as columns, all others as they are.

A damaged file gives what can be read of it, and a note about the rest. Leaves out single files' names (files.py).
"""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import reason
from llmc_jax.logs.curves import NONE, Curve
from llmc_jax.logs.files import LARGEST_NUMBER, LARGEST_STEP, NON_FINITE, event_in, step_of, time_of, whole_lines

OF_ALL = frozenset({"event", "step", "time"})  # fields that every event has, and that are no figures
STEP = "train"  # the kind of most events
OF_STEPS = frozenset({STEP, "val", "eval", "gpu"})  # kinds of events that are kept as columns
MOST_OTHERS = 20_000  # events that are kept as they are
ABSENT = math.nan  # a time that an event does not have


@dataclass
class Column:
    """The numbers of one field."""

    values: array = field(default_factory=lambda: array("d"))  # of all rows up to the last that has it
    absent: array = field(default_factory=lambda: array("I"))  # rows that lack it; their value is NaN

    def put(self, row: int, values: Sequence[float]) -> None:
        """Take the values of the rows from `row` on; those before it that have none yet lack it."""
        gap = range(len(self.values), row)
        self.absent.extend(gap)
        self.values.extend([math.nan] * len(gap))
        self.values.extend(values)


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
        for name in event.keys() - OF_ALL:
            value = event[name]
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
            self.columns.setdefault(name, Column()).put(row, (value,))

    def put_alike(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Take events at once, which is faster; return False, and take none, where they have other fields or words."""
        names = list(events[0]) if events else []
        if "step" not in names or set(map(len, events)) != {len(names)}:
            return False
        try:
            fields = dict(zip(names, zip(*map(itemgetter(*names), events), strict=True), strict=True))
            values = {name: array("d", numbers) for name, numbers in fields.items() if name not in OF_ALL}
        except (KeyError, TypeError, OverflowError):  # another field, a word, nothing, an enormous integer
            return False
        steps, times = fields["step"], fields.get("time", [None] * len(events))
        if set(map(type, steps)) != {int} or not 0 <= min(steps) <= max(steps) <= LARGEST_STEP:
            return False
        for name, numbers in values.items():
            self.columns.setdefault(name, Column()).put(len(self.steps), numbers)
        self.steps.extend(steps)
        self.times.extend(map(_time, times))
        return True


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
    try:
        with path.open("rb") as file:
            return events_in(path, file)
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {reason(error)}") from error


def events_in(path: Path, file: BinaryIO) -> Events:
    """Return the events of an open file of ours. path: what notes name. Raises OSError."""
    events, bad = Events(), array("Q")
    for first, lines in whole_lines(file, events.notes):
        _take_all(events, _parsed(lines), first, bad)
    if bad:
        events.first_bad = bad[0]
        several = f"{len(bad):,} lines are not events, the first is line {bad[0]}"
        words = several if len(bad) > 1 else f"line {bad[0]} is not an event"
        events.notes.append(f"{path.name}: {words}; skipped")
    if len(events.others) == MOST_OTHERS:
        events.notes.append(f"{path.name}: only the first {MOST_OTHERS:,} events other than steps are read")
    return events


def _take_all(events: Events, parsed: Sequence[dict[str, Any] | None], first: int, bad: array) -> None:
    """Keep the events of some lines; put the numbers of lines that are none into `bad`."""
    if events.first_time is None:
        times = (_time(event.get("time")) for event in parsed if event)
        events.first_time = next((time for time in times if not math.isnan(time)), None)
    steps = [event for event in parsed if event and event.get("event") == STEP]
    alike = events.tables.setdefault(STEP, Table()).put_alike(steps)
    for number, event in enumerate([] if alike and len(steps) == len(parsed) else parsed, first):
        try:
            if not (alike and event and event.get("event") == STEP):
                _take(events, event)
        except FormatError:
            bad.append(number)


def _take(events: Events, event: dict[str, Any] | None) -> None:
    """Keep an event. Raises FormatError for what is none."""
    if event is None or not isinstance(event.get("event"), str):
        raise FormatError("an event is a JSON object with a kind")
    kind, step, time = event["event"], step_of(event), _time(event.get("time"))
    if kind in OF_STEPS:
        if step is None:
            raise FormatError("its step is a whole number from 0")
        events.tables.setdefault(kind, Table()).put(step, time, event)
    elif len(events.others) < MOST_OTHERS:
        events.others.append(event)


def _time(value: Any) -> float:
    seconds = time_of(value)
    return ABSENT if seconds is None else float(seconds)


def _parsed(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """Return the JSON objects that lines are, None for those that are none.

    All at once takes a quarter of the time that one after the other takes, and fails where one of them is damaged.
    """
    try:
        found = json.loads(b"[%s]" % b",".join(lines))
        if len(found) == len(lines) and set(map(type, found)) == {dict}:
            return list(found)
    except (ValueError, RecursionError):
        pass
    return [event_in(line) for line in lines]
