"""The content of a page, gathered from run folders and logs.

A damaged file never stands in the way: what can be read is shown, and a note says what could not.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import reason
from llmc_jax.logs.curves import Curve, spread
from llmc_jax.logs.events import Events, read_events
from llmc_jax.logs.files import KERNELS, LARGEST, METRICS, config_file, rank_log, rank_of
from llmc_jax.logs.follow import recent
from llmc_jax.logs.reading import Log, log_of, read_log
from llmc_jax.logs.state import DIED, RUNNING, UNKNOWN, RunState, Seen, after, run_state
from llmc_jax.logs.words import ENDS, event_words
from llmc_jax.machine.versions import installed
from llmc_jax.report.content import Content, Event, Rows, Run, Sample, Status
from llmc_jax.report.differences import differences_of
from llmc_jax.report.facts import facts_of, positive, settings, steps_words, summary_of, table_of
from llmc_jax.report.happened import events_of
from llmc_jax.report.panels import FACTORS, KEYS, panels_of
from llmc_jax.report.series import Axes, Figures, axes_of, drawn, with_all_times
from llmc_jax.report.words import duration

MOST_SAMPLES = 100  # of a run, spread over its steps
LONGEST_SAMPLE = 10_000  # characters
STATES = {RUNNING: "running", DIED: "died", UNKNOWN: "not known whether it still runs", **ENDS}
MOST_RANKS = 256  # processes whose logs are read
RECENT = 200  # steps that the time left is reckoned from


class Read(NamedTuple):
    """What has been read of one run, before it becomes part of a page."""

    name: str
    path: str
    kind: str
    log: Log  # as the comparison of logs has it
    figures: Figures
    axes: Axes
    status: Status
    notes: list[str]
    start: Mapping[str, Any] = {}  # the event of its last start
    config: Mapping[str, Any] = {}  # as config.json has it
    kernels: Mapping[str, Any] = {}
    processes: Rows | None = None  # of a run that has several, where each is
    samples: Sequence[Sample] = ()
    events: Sequence[Event] = ()


def content_of(runs: Sequence[Read], title: str = "") -> Content:
    """Return the content of a page about some runs."""
    groups = [settings(run.config, run.kernels) for run in runs]
    shown = [_shown(run, group) for run, group in zip(runs, groups, strict=True)]
    names = [run.name for run in runs]
    return Content(
        title=title or " · ".join(names),
        made=round(time.time(), 3),
        version=installed("llmc-jax").get("llmc-jax", ""),
        runs=shown,
        panels=panels_of({key for run in shown for key in run.curves}),
        differences=differences_of(names, groups) if len(runs) > 1 else None,
    )


def _shown(run: Read, groups: Mapping[str, Mapping[str, str]]) -> Run:
    return Run(
        name=run.name,
        path=run.path,
        kind=run.kind,
        status=run.status,
        clock=run.axes.clock,
        summary=summary_of(run.status, run.figures, run.axes, run.start),
        facts=[*facts_of(groups, run.config), *([("Processes", run.processes)] if run.processes else [])],
        curves={key: drawn(series, run.axes, key) for key, series in run.figures.items()},
        samples=run.samples,
        events=run.events,
        notes=run.notes,
    )


def read_runs(paths: Sequence[str | Path], names: Sequence[str] = ()) -> list[Read]:
    """Return what is known of runs and logs. names: theirs, else what their paths differ in.

    Raises InputError where one of them is not there or no log, or where none holds anything that could be shown.
    """
    names = names or names_of([str(path) for path in paths])
    runs = [read_run(Path(path))._replace(name=name) for path, name in zip(paths, names, strict=True)]
    if not any(run.figures or run.events or run.samples for run in runs):
        raise InputError(f"{paths[0]}: no events in it; expected those of a run, one a line")
    return runs


def names_of(paths: Sequence[str]) -> list[str]:
    """Return names for runs: the last part of each path, and as many parts before as it takes to tell them apart."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]).replace("//", "/") for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" for number, name in enumerate(names, 1)]  # the same path twice


def read_run(path: Path) -> Read:
    """Return what is known of a run folder or a log. Raises InputError where it is neither."""
    if path.is_dir() and (path / METRICS).is_file():
        return read_ours(path / METRICS)._replace(name=path.name, path=str(path), kind="run folder of ours")
    is_ours = path.suffix == ".jsonl" and path.is_file()  # a copy, too
    return read_ours(path) if is_ours else read_other(path)


# ----- ours -----------------------------------------------------------------------------------------------------------


def read_ours(path: Path) -> Read:
    """Return what is known of a run of ours. path: of its metrics.jsonl, beside which its other files are."""
    folder, events = path.parent, read_events(path)
    start: Mapping[str, Any] = next(iter(reversed(events.of("start", "resume"))), {})
    log = log_of(events, path.name, f"{METRICS} of ours")
    found = figures_of(log)
    found |= _utilization(found, start)
    axes = axes_of(found, log.of("tokens"), positive(start.get("tokens_per_step")), events.first_time)
    notes = list(events.notes)
    config = _config(folder, start, notes)
    of_ranks = _of_ranks(folder, notes)
    if not found and not events.others:
        notes.append("no events yet")  # it has just begun, or lost them: no reason to refuse the runs beside it
    return Read(
        name=path.name,
        path=str(path),
        kind=log.kind,
        log=log,
        figures=with_all_times(found, axes),
        axes=axes,
        status=status_of(_state(path, notes), found),
        start=start,
        config=config,
        kernels=_json(folder / KERNELS, notes),
        processes=_processes({0: events, **of_ranks}) if of_ranks else None,
        samples=samples_of(events),
        events=events_of(events, axes, of_ranks),
        notes=notes,
    )


def figures_of(log: Log) -> dict[str, Curve]:
    """Return the figures of a log that panels show, in their units."""
    return {
        key: curve._replace(values=curve.values * FACTORS[key]) if key in FACTORS else curve
        for key, curve in log.curves.items()  # each copy of a long run's figure takes 8 bytes a step
        if key in KEYS
    }


def _of_ranks(folder: Path, notes: list[str]) -> dict[int, Events]:
    """Return the logs of a run's processes other than the first, by rank."""
    ranks = sorted(rank for path in folder.glob("rank_*.jsonl") if (rank := rank_of(path)) is not None)
    found = {}
    for rank in ranks[:MOST_RANKS]:
        try:
            found[rank] = read_events(rank_log(folder, rank))
            notes += found[rank].notes
        except InputError as error:
            notes.append(str(error))
    if len(ranks) > MOST_RANKS:
        notes.append(f"of the logs of {len(ranks)} more processes, {MOST_RANKS} are read")
    return found


def _processes(logs: Mapping[int, Events]) -> Rows:
    starts = {rank: events.of("start", "resume") for rank, events in logs.items()}
    return [(f"rank {rank}", event_words(found[-1])) for rank, found in starts.items() if found]


def _utilization(found: Figures, start: Mapping[str, Any]) -> dict[str, Curve]:
    """Return how well a run uses its devices: of the peak where that is known, else the rate itself."""
    speed, flops, peak = (
        found.get("tokens_per_second"),
        *map(positive, map(start.get, ("flops_per_token", "peak_flops"))),
    )
    if speed is None or flops is None:
        return {}
    if peak is None:
        return {"flops": speed._replace(values=speed.values * (flops / 1e9))}
    return {"mfu": speed._replace(values=speed.values * (100 * flops / peak))}


def _config(folder: Path, start: Mapping[str, Any], notes: list[str]) -> Mapping[str, Any]:
    """Return the configuration of the last start, from its event or else its file."""
    if isinstance(start.get("config"), Mapping):
        return table_of(start["config"])
    file = config_file(folder)
    if file is None:
        notes.append("no config.json: options and versions are not known")
        return {}
    return _json(file, notes)


def _json(path: Path, notes: list[str]) -> Mapping[str, Any]:
    """Return a JSON object; an empty one, and a note, for what is none."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        value = json.loads(data)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name}: cannot be read: {reason(error) if isinstance(error, OSError) else 'no JSON'}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name}: cannot be read: no JSON object")
    return table_of(value)


def samples_of(events: Events) -> list[Sample]:
    """Return the samples, of very many some, each up to its limit."""
    rows = [row for row in events.of("sample") if type(row.get("step")) is int and isinstance(row.get("text"), str)]
    return [_sample(rows[place]) for place in spread(len(rows), MOST_SAMPLES)]


def _sample(row: Mapping[str, Any]) -> Sample:
    text, tokens = row["text"], row.get("tokens")
    cut = text if len(text) <= LONGEST_SAMPLE else f"{text[:LONGEST_SAMPLE]}…"
    return Sample(row["step"], tokens if type(tokens) is int else None, cut)


def _state(path: Path, notes: list[str]) -> RunState | None:
    try:
        return run_state(after(Seen(), recent(path).events))
    except InputError as error:
        notes.append(str(error))
        return None


def status_of(state: RunState | None, found: Figures) -> Status:
    """Return how far a run is, or how it ended."""
    if state is None:
        return Status("unknown", None, None, None, None, "")
    left = seconds_left(state, found.get("train.loss")) if state.state == RUNNING else None
    step, steps = state.step, state.steps
    return Status(state.state, step, steps, state.last, left, _status_words(state, steps_words(step, steps), left))


def _status_words(state: RunState, far: str, left: float | None) -> str:
    words = STATES.get(state.state, state.state)
    when = ""
    if state.state == RUNNING:
        when = "" if left is None else f"; about {duration(left)} left"
    elif state.state in (DIED, UNKNOWN) and state.silent is not None:
        when = f"; its last event came {duration(state.silent)} before this page was made"
    return f"{words}{f', {far}' if far else ''}{when}"


def seconds_left(state: RunState, train: Curve | None) -> float | None:
    """Return the time for the remaining steps: each takes what the last RECENT took, with what lay between them."""
    if train is None or train.times is None or state.step is None or state.steps is None:
        return None
    steps, times = train.steps[-RECENT:], train.times[-RECENT:]
    if len(steps) < 2 or not np.isfinite(times).all() or times[-1] <= times[0]:
        return None
    return float((times[-1] - times[0]) / (steps[-1] - steps[0]) * max(0, state.steps - state.step))


# ----- other programs' ------------------------------------------------------------------------------------------------


def read_other(path: Path) -> Read:
    """Return what another program's log tells of its run. Raises InputError where it is none."""
    log = read_log(path)
    found = figures_of(log)
    axes = axes_of(found, None, log.tokens_per_step, None)
    last = max(int(found[key].steps[-1]) + (key == "train.loss") for key in ("train.loss", "val.loss") if key in found)
    status = Status("unknown", last, None, None, None, steps_words(last, None))
    return Read(
        name=path.name,
        path=str(path),
        kind=log.kind,
        log=log,
        figures=found,
        axes=axes,
        status=status,
        notes=list(log.notes),
    )
