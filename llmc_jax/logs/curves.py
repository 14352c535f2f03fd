"""Values over steps: averaged, and thinned for drawing. Leaves out reading them (events.py) and the drawing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

BINS = 1000  # longer curves are drawn as this many bins with their mean, least and greatest: about one per pixel
SMOOTHING = 50  # the smooth curve averages over one part in this many of the run
SPIKES = 0.005  # the part of the steps that may lie above the picture, so that a few spikes do not flatten the rest
LARGEST_SHOWN = 1e100  # of an axis; float32 ends at 3.4e38, and only damaged files have more
LARGEST = 1e6  # times the median: larger values count as this in averages, whose running sums they would spoil


class Curve(NamedTuple):
    """Values over steps, each step once and in order."""

    steps: np.ndarray  # (n,) int64
    values: np.ndarray  # (n,) float64
    times: np.ndarray | None = None  # (n,) seconds since 1970, NaN where they are not known

    def at(self, places: Any) -> "Curve":
        """Return the points at some places: a mask, or a slice."""
        times = None if self.times is None else self.times[places]
        return Curve(self.steps[places], self.values[places], times)


NONE = Curve(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


class Bins(NamedTuple):
    """A curve for drawing: one point per bin."""

    steps: np.ndarray  # mean step of the bin
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def finite(c: Curve) -> Curve:
    """Return the curve without infinities and NaNs."""
    return c.at(np.isfinite(c.values))


def median(c: Curve | None) -> float | None:
    """Return the median without the first step, which compiles or warms up; None where there is no figure."""
    later = NONE if c is None else finite(c.at(slice(1, None)) if len(c.steps) > 1 else c)
    return float(np.median(later.values)) if len(later.steps) else None


def binned(c: Curve, bins: int = BINS) -> Bins:
    """Gather runs of consecutive points into at most `bins` bins of equal count; short curves stay as they are."""
    edges = np.linspace(0, len(c.steps), min(bins, len(c.steps)) + 1).astype(np.int64)
    starts, counts = edges[:-1], np.diff(edges)
    return Bins(
        steps=np.add.reduceat(c.steps.astype(np.float64), starts) / counts,
        mean=np.add.reduceat(c.values, starts) / counts,
        low=np.minimum.reduceat(c.values, starts),
        high=np.maximum.reduceat(c.values, starts),
    )


def thinned_places(values: np.ndarray, points: int) -> np.ndarray:
    """Return where some of the points are, in order, which show what all of them show; `points`, or a few more.

    Of each of the bins of equal count they are the first, the last, the least and the greatest. Of the points that are
    not finite a quarter of `points` is kept, spread over all of them.
    """
    count = len(values)
    if count <= points:
        return np.arange(count)
    bad = np.flatnonzero(~np.isfinite(values))
    kept = [bad[spread(len(bad), max(1, points // 4))]]
    good = np.flatnonzero(np.isfinite(values)) if len(bad) else np.arange(count)
    edges = np.linspace(0, len(good), min(max(1, (points - len(kept[0])) // 4), len(good)) + 1).astype(np.int64)
    numbers = values[good]
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = numbers[start:end]
        kept.append(good[[start, start + int(inside.argmin()), start + int(inside.argmax()), end - 1]])
    return np.unique(np.concatenate(kept))


def spread(count: int, most: int) -> np.ndarray:
    """Return at most so many of the numbers below `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def window_of(count: int) -> int:
    """Return how many points, an odd number, a curve of `count` points is averaged over: about one in SMOOTHING."""
    return count // SMOOTHING | 1


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the finite values among the `window` (odd) round each point: at the ends of those there are.

    Of a window of one, the values themselves. NaN where no value of a window is finite.
    """
    if window == 1:
        return values
    half, count = window // 2, len(values)
    good = np.isfinite(values)
    bound = LARGEST * max(1.0, float(np.median(np.abs(values[good]))) if good.any() else 0.0)
    bounded = np.clip(np.where(good, values, 0.0), -bound, bound)
    low, high = np.maximum(np.arange(count) - half, 0), np.minimum(np.arange(count) + half + 1, count)
    totals, counts = (np.concatenate([[0.0], np.cumsum(each)]) for each in (bounded, good))
    inside = counts[high] - counts[low]
    return np.where(inside > 0, (totals[high] - totals[low]) / np.maximum(inside, 1), np.nan)


def smoothed(c: Curve, window: int) -> Curve:
    """Return the mean of `window` points, an odd number, at the middle one of them: no lag.

    Every mean is one of so many points: the curve begins half a window behind the first and ends as far before the
    last.
    """
    half, count = window // 2, len(c.steps)
    full = slice(half, max(half, count - half))
    return Curve(c.steps[full], moving_mean(c.values, window)[full])


class LossRange(NamedTuple):
    """The losses that a picture shows."""

    low: float
    high: float
    log: bool  # the axis is logarithmic


def loss_range(training: Sequence[Curve], others: Sequence[np.ndarray]) -> LossRange | None:
    """Choose the range of a loss axis; None where no value is finite.

    All of `others` lie within, and of each training curve the first loss and all but SPIKES, the largest. Where the
    loss halves or more the axis is logarithmic, or the first steps would leave no room for the others.
    """
    shown = [each[np.isfinite(each)] for each in others]
    for each in training:
        values = finite(each).values
        if len(values):
            # higher: between two values it would cut off the larger one, however few there are
            shown += [np.quantile(values, [0.0, 1 - SPIKES], method="higher"), values[:1]]
    values = np.concatenate(shown) if shown else np.zeros(0)
    if not len(values):
        return None
    low, high = (float(each) for each in np.clip([values.min(), values.max()], -LARGEST_SHOWN, LARGEST_SHOWN))
    if low > 1e-9 and high / low >= 2:  # from nothing, no logarithm would leave the rest any room
        margin = (high / low) ** 0.06
        return LossRange(low / margin, high * margin, log=True)
    margin = 0.06 * (high - low) or max(0.5, 0.06 * abs(high))
    return LossRange(low - margin, high + margin, log=False)
