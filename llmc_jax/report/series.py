"""A run's figures as curves to draw: thinned, averaged, and placed by step, tokens and time."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from llmc_jax.logs.curves import BINS, Curve, binned, finite, thinned_places
from llmc_jax.report.content import BEFORE, LINES, Figure, Points, X

POINTS = 2000  # of a curve, or a few more
SPIKES = 0.005  # the part of a curve's values that may lie off scale at either end

Figures = Mapping[str, Curve]  # as they were logged, by the key of the curve


class Scale(NamedTuple):
    """Something that grows with the steps made, known after some of them, and as much per step as last beyond them."""

    made: np.ndarray  # (n,) steps made, growing, from 0
    value: np.ndarray  # (n,)
    slope: float  # beyond the last

    def at(self, made: np.ndarray) -> np.ndarray:
        """Return its value after so many steps, which need not be whole."""
        beyond = np.maximum(0.0, made - self.made[-1])
        return np.interp(made, self.made, self.value) + self.slope * beyond


class Axes(NamedTuple):
    """What places the points of a run."""

    tokens: Scale | None
    began: float | None  # time of the first event, in seconds since 1970; None where some points have no time


def axes_of(figures: Figures, tokens: Curve | None, tokens_per_step: float | None, began: float | None) -> Axes:
    """Return the axes of a run. tokens: seen after each step, where that is known; began: the first event's time."""
    timed = all(each.times is not None and np.isfinite(each.times).all() for each in figures.values())
    return Axes(tokens_scale(tokens, tokens_per_step), began if timed else None)


def tokens_scale(tokens: Curve | None, per_step: float | None) -> Scale | None:
    """Return the tokens seen after so many steps."""
    if tokens is not None and len(tokens.steps) and _grows(tokens.values):
        slope = per_step or float(tokens.values[-1] / (tokens.steps[-1] + 1))
        return Scale(np.append(0, tokens.steps + 1), np.append(0.0, tokens.values), slope)
    return Scale(np.zeros(1), np.zeros(1), float(per_step)) if per_step else None


def _grows(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).all() and (np.diff(values, prepend=0.0) >= 0).all() and values[-1] > 0)


def place(axes: Axes, key: str, steps: np.ndarray, times: np.ndarray | None) -> X:
    """Return where points lie. times: seconds since 1970."""
    made = steps + (0 if key in BEFORE else 1)
    tokens = None if axes.tokens is None else np.rint(axes.tokens.at(made))
    return X(steps, tokens, None if axes.began is None or times is None else np.round(times - axes.began, 3))


def drawn(series: Curve, axes: Axes, key: str) -> Figure:
    """Return a figure as a curve to draw."""
    steps, values, times = series
    places = thinned_places(values, POINTS)
    shown = place(axes, key, steps[places], None if times is None else times[places])
    mean = None if len(places) == len(steps) else means(series, axes, key)
    return Figure(shown, values[places], mean, usual(values, key))


def usual(values: np.ndarray, key: str) -> tuple[float, float] | None:
    """Return the range of a curve's values without spikes; None where it has none that would squeeze the others."""
    good = values[np.isfinite(values)]
    if len(good) <= 50 or key not in LINES:
        return None
    low, high = np.quantile(good, [SPIKES, 1 - SPIKES], method="nearest").tolist()
    room = (high - low) / 2
    least, most = float(good.min()), float(good.max())
    low = low if low - least > room else least
    high = (max(high, float(good[0])) if key == "train.loss" else high) if most - high > room else most
    return None if (low, high) == (least, most) else (low, high)


def means(series: Curve, axes: Axes, key: str) -> Points | None:
    """Return the means of bins of finite values; None where there are none."""
    good = finite(series)
    if not len(good.steps):
        return None
    bins = binned(good, BINS)
    times = None if series.times is None else np.interp(bins.steps, series.steps, series.times)
    return Points(place(axes, key, bins.steps, times), bins.mean)
