"""What a page contains, as plain data: runs with their curves, samples and events, charts, differences.

Leaves out gathering it (gather.py) and drawing it (page.py).
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np


class X(NamedTuple):
    """Where points lie, by each of the axes; None where a run does not say it."""

    step: np.ndarray  # (n,) int64
    tokens: np.ndarray | None  # (n,) float64, seen by then
    time: np.ndarray | None  # (n,) float64, seconds since the run's first start


class Points(NamedTuple):
    """Values at places, in the order of steps."""

    x: X
    y: np.ndarray  # (n,) float64


class Figure(NamedTuple):
    """One figure of a run over its steps."""

    x: X
    y: np.ndarray  # (n,) float64: points that were logged, thinned so that extremes stay
    mean: Points | None  # means of bins of equal count, which smoothing works on; None where nothing was thinned
    usual: tuple[float, float] | None = None  # values without a few spikes, which may lie off scale; None: without any


class Status(NamedTuple):
    """How far a run is, or how it ended."""

    state: str  # running, done, stopped, diverged, bad_input, died, unknown
    step: int | None  # steps made so far
    steps: int | None  # that were planned
    words: str


class Sample(NamedTuple):
    """What a model wrote before a step. Its text may hold anything."""

    step: int
    tokens: int | None  # that it has
    text: str


class Event(NamedTuple):
    """Something that happened to a run."""

    kind: str  # as metrics.jsonl has it; skipped: steps without an update, gathered
    step: int
    tokens: float | None
    time: float | None  # as X has it
    words: str


Rows = list[tuple[str, str]]  # name and value, as shown
Groups = Mapping[str, Mapping[str, str]]  # settings by group and name, as shown


class Run(NamedTuple):
    """One run, or one log of another program."""

    name: str
    path: str
    kind: str  # what it was read from
    status: Status
    summary: Rows
    facts: Sequence[tuple[str, Rows]]  # by group
    settings: Groups  # which are compared with other runs'
    curves: Mapping[str, Figure]  # by key, as panels name them
    samples: Sequence[Sample]
    events: Sequence[Event]
    notes: list[str]  # what could not be read, or is not as it seems
    baseline: float | None = None  # validation loss of guessing each byte from the one before; None: not known


class PanelCurve(NamedTuple):
    """A curve that a panel has of every run."""

    key: str
    label: str
    mark: str  # line, points


class Panel(NamedTuple):
    """One chart."""

    key: str
    title: str
    unit: str
    log: bool  # may be shown on a logarithmic axis
    curves: list[PanelCurve]


class Difference(NamedTuple):
    """A setting in which runs differ."""

    group: str
    name: str
    values: list[str]  # of each run; empty where it has none


class Content(NamedTuple):
    """All that a page shows."""

    title: str
    made: float  # seconds since 1970
    version: str  # of llmc-jax
    runs: list[Run]
    panels: list[Panel]  # those that have data
    differences: list[Difference] | None  # None for one run


# ----- the charts ---------------------------------------------------------------------------------------------------

FACTORS = {"memory": 2.0**-30, "accuracy_norm": 100.0, "accuracy": 100.0}  # from a log's units to those of the panels
BEFORE = ("val.loss", "train.estimate", "accuracy_norm", "accuracy")  # the step's update; the others come after it


def _panel(key: str, title: str, unit: str, *curves: tuple[str, str], log: bool = False, points: str = "") -> Panel:
    """Return a panel; points: keys of curves that have single points and no line."""
    drawn = [PanelCurve(name, label, "points" if name in points.split() else "line") for name, label in curves]
    return Panel(key, title, unit, log, drawn)


PANELS = (
    _panel(
        "loss", "Loss", "nats per token",
        ("train.loss", "training"), ("val.loss", "validation"), ("train.estimate", "training data, evaluation"),
        log=True, points="val.loss train.estimate",
    ),
    _panel(
        "hellaswag", "HellaSwag", "% correct",
        ("accuracy_norm", "by mean loss per token (llm.c's)"), ("accuracy", "by summed loss"),
        points="accuracy_norm accuracy",
    ),
    _panel("norm", "Gradient norm", "", ("norm", "before clipping"), log=True),
    _panel("lr", "Learning rate", "", ("lr", "learning rate")),
    _panel("tokens_per_second", "Speed", "tokens per second", ("tokens_per_second", "per step")),
    _panel("ms", "Time per step", "ms", ("ms", "per step"), log=True),
    _panel("mfu", "Model FLOPs utilization", "% of peak", ("mfu", "per step")),
    _panel("flops", "Model compute rate", "GFLOP/s", ("flops", "per step")),
    _panel("memory", "Memory", "GiB", ("memory", "peak of the first GPU, else of the process")),
    _panel("loss_scale", "Loss scale", "", ("loss_scale", "per step"), log=True),
    _panel("z", "Outliers", "standard deviations", ("z_loss", "loss"), ("z_norm", "gradient norm")),
    _panel("gpu_clock", "GPU clock", "MHz", ("gpu.clock", "SM clock")),
    _panel("gpu_power", "GPU power", "W", ("gpu.power", "power")),
    _panel("gpu_temperature", "GPU temperature", "°C", ("gpu.temperature", "GPU")),
    _panel("gpu_load", "GPU load", "%", ("gpu.compute", "compute"), ("gpu.memory_busy", "memory busy")),
)  # fmt: skip

KEYS = tuple(curve.key for panel in PANELS for curve in panel.curves)
LINES = tuple(curve.key for panel in PANELS for curve in panel.curves if curve.mark == "line")


def panels_of(keys: Collection[str], several: bool = False) -> list[Panel]:
    """Return the panels that have data, with the curves that do.

    Of several runs, a panel of several lines becomes a panel for each, as one of several kinds of points does: a colour
    can say but one thing.
    """
    kept = [panel._replace(curves=[each for each in panel.curves if each.key in keys]) for panel in PANELS]
    return [part for panel in kept if panel.curves for part in (_parts(panel) if several else [panel])]


def _parts(panel: Panel) -> list[Panel]:
    """Return a panel as panels of one line and one kind of points each."""
    lines, points = ([each for each in panel.curves if each.mark == mark] for mark in ("line", "points"))
    if max(len(lines), len(points)) < 2:
        return [panel]
    pairs = [[each for each in pair if each is not None] for pair in zip_longest(lines, points)]
    return [
        panel._replace(
            key=f"{panel.key}.{curves[0].key}" if index else panel.key,
            title=panel.title if len(curves) > 1 else f"{panel.title}: {curves[0].label}",
            curves=curves,
        )
        for index, curves in enumerate(pairs)
    ]
