"""What happened to a run, in words: skipped steps, saves, resumes, stops. Leaves out figures of steps."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmc_jax.logs.events import Events, figures
from llmc_jax.logs.files import LARGEST_TIME, finite_number, is_step
from llmc_jax.logs.words import event_words
from llmc_jax.report.content import Event
from llmc_jax.report.series import Axes
from llmc_jax.report.words import plural

MOST = 400  # events of a run that a page lists
OF_STEP = ("skipped", "gpu_cap")  # events that come with a step's figures
SAME = ("start", "resume", "compiled", "end")  # what all processes log, which is told of the first


def events_of(events: Events, axes: Axes, of_ranks: Mapping[int, Events]) -> list[Event]:
    """Return the events of a run in the order of steps, of very many some. of_ranks: its other processes' logs."""
    found = [*_told(events, axes), *_skipped(events, axes), *_caps(events, axes)]
    for rank, own in of_ranks.items():
        told = (each for each in _told(own, axes) if each.kind not in SAME)
        found += [replace(each, words=f"rank {rank}: {each.words}") for each in told]
    found.sort(key=lambda each: (each.step, each.time or 0.0))  # stable: without times, in the order of the file
    return found if len(found) <= MOST else [*found[: MOST // 2], _gap(found), *found[-MOST // 2 + 1 :]]


def _gap(found: list[Event]) -> Event:
    middle = found[MOST // 2 : -MOST // 2 + 1]
    first, last = middle[0], middle[-1]
    words = f"{plural(len(middle), 'more event')} up to step {last.step} are not listed"
    return Event("left_out", first.step, first.tokens, first.time, words)


def _event(kind: str, step: int, time: Any, axes: Axes, words: str) -> Event:
    """Return an event at its place. One of a step counts its update, as the step's figures do."""
    made = step + (kind in OF_STEP)
    tokens = None if axes.tokens is None else float(axes.tokens.at(np.array([float(made)]))[0])
    known = axes.clock == "wall" and finite_number(time, 0, LARGEST_TIME) is not None
    return Event(kind, step, tokens, round(time - axes.began, 3) if known else None, words)


def _told(events: Events, axes: Axes) -> Iterator[Event]:
    """Yield the events that are logged as such; samples have a place of their own."""
    for row in events.others:
        step = row.get("step")
        if row["event"] != "sample" and is_step(step):
            yield _event(row["event"], step, row.get("time"), axes, event_words(row))


def _skipped(events: Events, axes: Axes) -> Iterator[Event]:
    """Yield the steps without an update, those in a row as one event."""
    marks = figures(events, "train", "skipped")
    places = np.flatnonzero(marks.values)
    if not len(places):
        return
    for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        first, last = (int(marks.steps[place]) for place in (run[0], run[-1]))
        which = f"step {first}" if len(run) == 1 else f"{plural(len(run), 'step')}, {first} to {last}"
        time = None if marks.times is None else float(marks.times[run[0]])
        yield _event("skipped", first, time, axes, f"skipped, no update: {which}")


def _caps(events: Events, axes: Axes) -> Iterator[Event]:
    """Yield where what holds a GPU's clock back changes."""
    table = events.tables.get("gpu")
    if table is None:
        return
    for row, cap in table.words.get("cap", ()):
        words = "the GPU's clock is held back no more" if cap == "no" else f"the GPU's clock is held back: {cap}"
        if cap != "no" or row:
            yield _event("gpu_cap", table.steps[row], table.times[row], axes, words)
