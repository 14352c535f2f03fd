"""The content of a page, gathered from run folders and logs.

A damaged file never stands in the way: what can be read is shown, and a note says what could not.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import read_json_object
from llmc_jax.base.numbers import duration, plural
from llmc_jax.logs.curves import Curve, spread
from llmc_jax.logs.events import Events, figures, read_events
from llmc_jax.logs.files import KERNELS, LARGEST, METRICS, step_of, table_of, time_of
from llmc_jax.logs.reading import Log, log_of, read_log
from llmc_jax.logs.state import DIED, UNKNOWN, RunState, event_words, read_state, state_words
from llmc_jax.machine.device import installed
from llmc_jax.report import facts
from llmc_jax.report.content import FACTORS, KEYS, Content, Event, Run, Sample, Status, panels_of
from llmc_jax.report.series import Axes, Figures, axes_of, drawn

MOST_SAMPLES = 100  # of a run, spread over its steps
LONGEST_SAMPLE = 10_000  # characters
MOST_EVENTS = 400  # of a run that a page lists


def content_of(runs: Sequence[Run], title: str = "") -> Content:
    """Return the content of a page about some runs."""
    return Content(
        title=title or " · ".join(each.name for each in runs),
        made=round(time.time(), 3),
        version=installed("llmc-jax").get("llmc-jax", ""),
        runs=list(runs),
        panels=panels_of({key for each in runs for key in each.curves}, len(runs) > 1),
        differences=list(facts.differences_of([each.settings for each in runs])) if len(runs) > 1 else None,
    )


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Return what is known of runs and logs, named by what their paths differ in.

    Raises InputError where one of them is not there or no log, or where none holds anything that could be shown.
    """
    found = [read_run(Path(path)) for path in paths]
    if not any(each.curves or each.events or each.samples for each in found):
        raise InputError(f"{paths[0]}: no events found; expected a run's events, one per line")
    names = names_of([str(path) for path in paths])
    return [each._replace(name=name) for each, name in zip(found, names, strict=True)]


def names_of(paths: Sequence[str]) -> list[str]:
    """Return names for runs: the last part of each path, and as many parts before as it takes to tell them apart."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]).replace("//", "/") for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # the same path twice


def read_run(path: Path) -> Run:
    """Return what is known of a run folder or a log. Raises InputError where it is neither."""
    if path.is_dir() and (path / METRICS).is_file():
        return read_ours(path / METRICS, str(path), "run folder of ours")
    is_ours = path.suffix == ".jsonl" and path.is_file()  # a copy, too
    return read_ours(path, str(path), f"{METRICS} of ours") if is_ours else read_other(path)


# ----- ours -----------------------------------------------------------------------------------------------------------


def read_ours(path: Path, given: str, kind: str) -> Run:
    """Return what is known of a run of ours. path: of its metrics.jsonl, beside which its other files are."""
    folder, events = path.parent, read_events(path)
    start: Mapping[str, Any] = next(iter(reversed(events.of("start", "resume"))), {})
    log = log_of(events, given, kind)
    found = figures_of(log)
    found |= _utilization(found, start)
    axes = axes_of(found, log.of("tokens"), facts.positive(start.get("tokens_per_step")), events.first_time)
    notes = list(events.notes)
    if not (config := table_of(start.get("config"))):
        notes.append("no event of its start: options and versions are unknown")
    if not found and not events.others:
        notes.append("no events yet")  # it has just begun, or lost them: no reason to refuse the runs beside it
    kernels: dict[str, Any] = {}
    if (folder / KERNELS).exists():
        try:
            kernels = read_json_object(folder / KERNELS, LARGEST)
        except InputError as error:
            notes.append(str(error))
    groups = facts.settings(config, kernels)
    status = status_of(read_state(path))
    run = _run(log, found, axes, status, start)
    baseline = facts.positive(start.get("bigram_nats"))
    return run._replace(
        facts=facts.facts_of(groups, config),
        settings=groups,
        samples=samples_of(events),
        events=events_of(events, axes),
        notes=notes,
        baseline=baseline,
    )


def _run(log: Log, figures: Figures, axes: Axes, status: Status, start: facts.Config) -> Run:
    """Return what a page shows of any log. start: the event of its last start."""
    summary = facts.summary_of(status, figures, axes, start)
    curves = {key: drawn(series, axes, key) for key, series in figures.items()}
    return Run(log.path, log.path, log.kind, status, summary, [], {}, curves, [], [], list(log.notes))


def figures_of(log: Log) -> dict[str, Curve]:
    """Return the figures of a log that panels show, in their units."""
    return {
        key: curve._replace(values=curve.values * FACTORS[key]) if key in FACTORS else curve
        for key, curve in log.curves.items()  # each copy of a long run's figure takes 8 bytes a step
        if key in KEYS
    }


def _utilization(found: Figures, start: Mapping[str, Any]) -> dict[str, Curve]:
    """Return how well a run uses its devices: of the peak where that is known, else the rate itself."""
    speed, flops = found.get("tokens_per_second"), facts.positive(start.get("flops_per_token"))
    if speed is None or flops is None:
        return {}
    peak = facts.positive(start.get("peak_flops"))
    name, factor = ("flops", flops / 1e9) if peak is None else ("mfu", 100 * flops / peak)
    return {name: speed._replace(values=speed.values * factor)}


def samples_of(events: Events) -> list[Sample]:
    """Return the samples, of very many some, each up to its limit."""
    rows = [row for row in events.of("sample") if step_of(row) is not None and isinstance(row.get("text"), str)]
    return [_sample(rows[place]) for place in spread(len(rows), MOST_SAMPLES)]


def _sample(row: Mapping[str, Any]) -> Sample:
    text, tokens = row["text"], row.get("tokens")
    cut = text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]}…"
    return Sample(row["step"], tokens if type(tokens) is int else None, cut)


def status_of(state: RunState) -> Status:
    """Return how far a run is, or how it ended."""
    words = ", ".join(filter(None, (state_words(state.state), facts.steps_words(state.step, state.steps))))
    if state.state in (DIED, UNKNOWN) and state.silent is not None:
        words += f"; last event {duration(state.silent)} before this page was written"
    return Status(state.state, state.step, state.steps, words)


# ----- what happened --------------------------------------------------------------------------------------------------


def events_of(events: Events, axes: Axes) -> list[Event]:
    """Return the events of a run in the order of steps, of very many some."""
    found = [*_logged(events, axes), *_skipped(events, axes)]
    found.sort(key=lambda each: (each.step, each.time or 0.0))  # stable: without times, in the order of the file
    if len(found) > MOST_EVENTS:
        middle = slice(MOST_EVENTS // 2, 1 - MOST_EVENTS // 2)
        left_out = found[middle]
        words = f"{plural(len(left_out), 'more event')} up to step {left_out[-1].step} not shown"
        found[middle] = [left_out[0]._replace(kind="left_out", words=words)]
    return found


def _event(kind: str, step: int, time: Any, axes: Axes, words: str) -> Event:
    """Return an event at its place. One of a step counts its update, as the step's figures do."""
    made = step + (kind == "skipped")
    tokens = None if axes.tokens is None else float(axes.tokens.at(np.array([float(made)]))[0])
    known = axes.began is not None and time_of(time) is not None
    return Event(kind, step, tokens, round(time - axes.began, 3) if known else None, words)


def _logged(events: Events, axes: Axes) -> Iterator[Event]:
    """Yield the events that are logged as such; samples have a place of their own."""
    for row in events.others:
        step = step_of(row)
        if row["event"] != "sample" and step is not None:
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
        yield _event("skipped", first, time, axes, f"update skipped: {which}")


# ----- other programs' ------------------------------------------------------------------------------------------------


def read_other(path: Path) -> Run:
    """Return what another program's log tells of its run. Raises InputError where it is none."""
    log = read_log(path)
    found = figures_of(log)
    axes = axes_of(found, None, log.tokens_per_step, None)
    last = max(int(found[key].steps[-1]) + (key == "train.loss") for key in ("train.loss", "val.loss") if key in found)
    return _run(log, found, axes, Status("unknown", last, None, facts.steps_words(last, None)), {})
