"""The view of one run, as lines that fit a terminal.

Leaves out reading the run (story.py) and the terminal (live.py).
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from rich.cells import chop_cells
from rich.text import Text

from llmc_jax.base.numbers import count
from llmc_jax.base.streams import escaped
from llmc_jax.logs.curves import Curve, binned, loss_range, moving_mean, window_of
from llmc_jax.logs.files import figure_of, finite_number, step_of, time_of
from llmc_jax.logs.state import DIED, RUNNING, UNKNOWN, RunState, event_words, state_words
from llmc_jax.machine.device import gib
from llmc_jax.machine.nvml import GpuReading, gpu_line
from llmc_jax.run.console import BarState, bar, duration, fitting
from llmc_jax.watch.plot import LABEL, LOWEST, NARROWEST, plot
from llmc_jax.watch.story import Story

NARROWEST_VIEW, LOWEST_VIEW = 20, 6  # cells; a smaller terminal sees a part of the view
STYLES = {RUNNING: "bold green", "done": "bold green", "stopped": "bold yellow", UNKNOWN: "bold yellow"}
BAD = "bold red"  # of all other states
WARNED = frozenset({"save_failed", "data", "warnings"})  # events in yellow
TRAIN, VAL = "blue", "magenta"
MOST_ROWS = 20  # of the plot
LONGEST = 1e9  # seconds that are shown as left
TEXT_ROWS = 200  # of a sample are looked at


class Moment(NamedTuple):
    """All that a view shows."""

    name: str  # of the run
    story: Story
    state: RunState
    now: float  # seconds since 1970
    notes: tuple[str, ...] = ()  # what could not be read


class Room(NamedTuple):
    """The cells that there are."""

    width: int
    height: int | None = None  # None: as many as it takes
    ascii_only: bool = False


def view(moment: Moment, room: Room) -> list[Text]:
    """Return the lines of the view: what is most important, first; as many as there is room for."""
    width = max(NARROWEST_VIEW, room.width)
    height = None if room.height is None else max(LOWEST_VIEW, room.height)
    head = [*_header(moment, width), _bar(moment, room, width)]
    facts = [*_figures(moment, width), *_gpu(moment), *(Text(each, "yellow") for each in moment.notes)]
    sample, events = _sample(moment.story, width), _events(moment, width)
    if height is not None:
        free = height - len(head) - len(facts)
        sample, events = _shared(sample, events, max(0, free - LOWEST - 2))
        rows = min(MOST_ROWS, free - len(sample) - len(events) - 2)
    else:
        sample, events, rows = sample[:9], [*events[:1], *events[1:][-8:]], 12
    lines = [*head, *_plot(moment.story, room, width, rows), *facts, *sample, *events]
    return [_cut(line, width) for line in lines][:height]


def _shared(sample: list[Text], events: list[Text], rows: int) -> tuple[list[Text], list[Text]]:
    """Return the beginning of a sample and the last events, in half of the free rows and at least a few."""
    rows = min(rows, max(8, rows // 2))
    for_sample = min(len(sample), max(rows // 2, rows - len(events)))
    for_events = min(len(events), rows - for_sample)
    last = events[len(events) - for_events + 1 :] if for_events > 1 else []
    return (sample[:for_sample] if for_sample > 1 else []), [*events[:1], *last] if last else []


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


# ----- how far it is ------------------------------------------------------------------------------------------------


def state_line(state: RunState) -> str:
    """Return the state of a run in words: since when, and where."""
    ago = "" if state.silent is None else f" {duration(state.silent)} ago"
    where = f" on {state.host}" if state.host else ""
    if state.state == RUNNING:
        return f"running{where}"
    if state.state == DIED:
        return f"died{where}, last event{ago}{_clock(state.last)}"
    if state.state == UNKNOWN:
        return f"silent for {duration(state.silent)}{where}" if state.silent is not None else "state unknown"
    return f"{state_words(state.state)}{ago}{_clock(state.last)}"


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else f" ({time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))})"


def _header(moment: Moment, width: int) -> list[Text]:
    state = moment.state
    words = Text(escaped(state_line(state)), STYLES.get(state.state, BAD))
    lines = [Text.assemble((escaped(moment.name), "bold"), "  ", words)]
    if lines[0].cell_len > width:
        lines = [Text(escaped(moment.name), "bold"), words]
    if state.state in (DIED, UNKNOWN) and state.event is not None:
        kind, step = escaped(str(state.event.get("event"))), step_of(state.event)
        place = "" if step is None else f"step {step}: "
        lines.append(Text(f"last event: {kind} {place}{event_words(state.event)}", "yellow"))
    return lines


def _bar(moment: Moment, room: Room, width: int) -> Text:
    story, state = moment.story, moment.state
    train, val = story.latest.get("train", {}), story.latest.get("val", {})
    running = state.state == RUNNING
    until = moment.now if running or state.last is None else state.last
    doing = "" if running else " "  # only what runs compiles
    total = max(0, state.steps or state.step or 0)
    left = story.left(state, moment.now)
    shown = BarState(
        done=max(0, min(state.step or 0, total)),
        total=total,
        elapsed=0.0 if state.started is None else max(0.0, until - state.started),
        left=None if left is None else min(left, LONGEST),
        loss=figure_of(train.get("loss")),
        val_loss=figure_of(val.get("loss")),
        tokens_per_second=story.tokens_per_second(),
        doing=doing,
    )
    return bar(shown, width, room.ascii_only)


# ----- the curves ---------------------------------------------------------------------------------------------------


def _plot(story: Story, room: Room, width: int, rows: int) -> list[Text]:
    """Return the losses as a plot of so many rows, with its title and axis; nothing where there is no room."""
    train, val = story.curve("train"), story.curve("val")
    cells = max(1, width - LABEL - 2)
    window = window_of(len(train.steps))
    calm = Curve(train.steps, moving_mean(train.values, window))
    dots = binned(calm, 2 * cells)  # as many as there are dots
    train = Curve(dots.steps.astype(np.int64), dots.mean)
    shown = loss_range([train], [val.values])
    if shown is None or rows < LOWEST or cells < NARROWEST:
        return []
    drawn = plot(train, val, shown, cells, rows, room.ascii_only)
    line, mark, edge, corner = ("..", "o", "|", "+") if room.ascii_only else ("⠤⠤", "●", "│", "└")
    means = f", mean of {window:,}" if window > 1 else ""
    named = [(f"{line} training{means}", TRAIN)]
    named += [(f"  {mark} validation", VAL)] if len(val.steps) else []
    title = Text.assemble(("loss", "bold"), (" (log scale)  " if shown.log else "  ", "dim"), *named)
    lines = [title]
    for label, row, marked in zip(drawn.labels, drawn.rows, drawn.marked, strict=True):
        text = Text(row, TRAIN)
        for at in np.flatnonzero(marked).tolist():
            text.stylize(VAL, at, at + 1)
        lines.append(Text.assemble((f"{label:>{LABEL}} {edge}", "dim"), text))
    return [*lines, Text(f"{'step':>{LABEL}} {corner}{drawn.axis}", "dim")]


# ----- figures ------------------------------------------------------------------------------------------------------


def _figures(moment: Moment, width: int) -> list[Text]:
    story = moment.story
    train, evaluated = story.latest.get("train", {}), story.latest.get("eval", {})
    val, best = story.curve("val"), ""
    if len(val.steps):
        at = int(val.values.argmin())
        best = f"best val {val.values[at]:.4f} at step {val.steps[at]}"
    tokens, memory = figure_of(train.get("tokens")), finite_number(train.get("memory"))
    words = [
        Text(best, VAL),
        Text(_named("norm {:.2f}", train, "norm")),
        Text(_named("lr {:.2e}", train, "lr")),
        Text(_named("{:.1f} ms", train, "ms")),
        Text(_named("HellaSwag {:.4f}", evaluated, "accuracy_norm"), VAL),
        Text(f"{story.skipped:,} skipped" if story.skipped else "", "yellow"),
        Text(story.utilization()),
        Text("" if tokens is None else f"{count(tokens)} tokens"),
        Text("" if memory is None else f"memory {gib(int(memory))}"),
    ]
    shown = fitting(words, width, gap=3)
    return [Text(" | ").join(shown)] if shown else []


def _named(form: str, event: Mapping[str, Any], name: str) -> str:
    value = figure_of(event.get(name))
    return "" if value is None else form.format(value)


def _gpu(moment: Moment) -> list[Text]:
    """Return the run's last reading of its GPU (-lg)."""
    reading = moment.story.latest.get("gpu")
    if reading is None:
        return []
    fields: dict[str, Any] = {name: finite_number(reading.get(name)) for name in GpuReading._fields}
    cap = reading["cap"] if isinstance(reading.get("cap"), str) else None
    line = gpu_line(GpuReading(**{**fields, "cap": cap})).strip()
    return [Text(escaped(f"GPU at step {reading.get('step')}: {line}"), "cyan")]


# ----- the sample and the events ------------------------------------------------------------------------------------


def _sample(story: Story, width: int) -> list[Text]:
    event = story.latest.get("sample")
    if event is None or not isinstance(event.get("text"), str):
        return []
    text = escaped(event["text"][: TEXT_ROWS * width].expandtabs(4), keep="\n").strip("\n")
    title = Text.assemble(("sample", "bold"), (f" before step {escaped(str(event.get('step')))}", "dim"))
    lines = [line for line in text.split("\n")[:TEXT_ROWS] if line.strip()]
    return [title, *(Text(f"  {piece}") for line in lines for piece in chop_cells(line, width - 2))]


def _events(moment: Moment, width: int) -> list[Text]:
    events = moment.story.events
    if not events:
        return []
    return [Text("events", "bold"), *(_event(each, moment.now) for each in events)]


def _event(event: Mapping[str, Any], now: float) -> Text:
    seconds, number = time_of(event.get("time")), step_of(event)
    when = ""
    if seconds is not None:
        form = "%m-%d %H:%M " if now - seconds > 20 * 3600 else "%H:%M:%S "
        when = time.strftime(form, time.localtime(seconds))
    step = "" if number is None else f"step {number}: "
    warned = "yellow" if event["event"] in WARNED else ""
    return Text.assemble((f"  {when}{step}", "dim"), (event_words(event), warned))
