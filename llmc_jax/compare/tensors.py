"""How far two arrays lie apart: the measures that every comparison of tensors reports.

Takes arrays in pieces, so that tensors larger than memory can be compared. Leaves out where the arrays come from.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.compare.report import small

CHUNK = 1 << 20  # elements compared at a time: the float64 copies stay at 8 MiB each

Shape = tuple[int, ...]


class Limit(NamedTuple):
    """What |a - b| may be at most, b being the reference: absolute + relative |b|."""

    absolute: float
    relative: float = 0.0
    strict: bool = False  # it must stay below, and not only within
    rms: float = math.inf  # what the root of the mean square of all a - b may be

    def __str__(self) -> str:
        sign = "<" if self.strict else "<="
        return f"{sign} {self.absolute:g}" + (f" + {self.relative:g} |b|" if self.relative else "")


class Difference(NamedTuple):
    """How a differs from the reference b. Where there are NaN or infinities the sums are those of the other values."""

    shape: Shape
    largest_error: float  # |a - b|; NaN or infinite where one of them is
    mean_error: float  # of |a - b|
    relative_norm: float  # ||a - b|| / ||b||; infinite where b is all zero and a is not
    worst_index: Shape | None  # position: of the first that is not finite, else of the largest; None of nothing
    worst_values: tuple[float, float]  # a and b there
    differing_values: int  # values whose bits differ
    differing_bits: int  # bits that differ
    not_finite: int  # differences that are NaN or infinite
    same_bits: bool
    rms_error: float  # root of the mean square of a - b
    limit: Limit | None = None
    beyond: int = 0  # values outside the limit; NaN always is
    share: float = 0.0  # the largest |a - b| as a share of what the limit allows there; infinite with NaN

    @property
    def agrees(self) -> bool:
        """Return whether every value, and all together, are within the limit."""
        return self.same_bits if self.limit is None else self.beyond == 0 and self.rms_error <= self.limit.rms


class Measure:
    """Accumulates a Difference from pieces in C order.

    nan_agrees: a NaN or an infinity is no difference where both sides have the same bits of it, which is what matters
    of two files. Otherwise each is one, on whichever side, which is what matters of a computation.
    """

    def __init__(self, limit: Limit | None = None, *, nan_agrees: bool = False) -> None:
        self._limit, self._nan_agrees = limit, nan_agrees
        self.differing_values = 0  # so far
        self._size = self._differing_bits = self._not_finite = self._beyond = 0
        self._sum = self._squares = self._reference = self._share = 0.0
        self._worst = (0.0, 0, math.nan, math.nan)  # |a - b|, position, a, b

    def add(self, a: Any, b: Any) -> None:
        """Take in the next piece: two float arrays of the same shape."""
        a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        assert a.size == b.size, (a.size, b.size)
        for start in range(0, a.size, CHUNK):
            self._chunk(a[start : start + CHUNK], b[start : start + CHUNK])

    def _chunk(self, a: np.ndarray, b: np.ndarray) -> None:
        changed = _changed_bits(a, b)
        self.differing_values += int(np.count_nonzero(changed))
        self._differing_bits += int(np.bitwise_count(changed).sum(dtype=np.int64))
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; differences beyond float64
            x, y = a.astype(np.float64), b.astype(np.float64)
            distance = np.abs(x - y)
            if self._nan_agrees:
                distance[changed == 0] = 0.0
            finite = np.isfinite(distance)
            bad = a.size - int(np.count_nonzero(finite))
            if not self._not_finite:
                at = int(np.argmin(finite) if bad else np.argmax(distance))
                if bad or not self._size or distance[at] > self._worst[0]:
                    self._worst = (float(distance[at]), self._size + at, float(x[at]), float(y[at]))
            if self._limit is not None:
                self._hold_against(self._limit, distance, finite, y)
        self._not_finite += bad
        counted, reference = distance[finite], y[finite & np.isfinite(y)]
        self._sum += float(counted.sum())
        self._squares += float(np.dot(counted, counted))
        self._reference += float(np.dot(reference, reference))
        self._size += a.size

    def _hold_against(self, limit: Limit, distance: np.ndarray, finite: np.ndarray, y: np.ndarray) -> None:
        allowed = limit.absolute + (limit.relative * np.abs(y) if limit.relative else 0.0)
        inside = distance < allowed if limit.strict else distance <= allowed
        self._beyond += int(np.count_nonzero(~(inside & finite)))
        with np.errstate(divide="ignore"):
            share = np.where(distance == 0, 0.0, distance / allowed)
        self._share = max(self._share, float(share.max())) if finite.all() else math.inf

    def result(self, shape: Sequence[int]) -> Difference:
        """Return the difference of everything added, which together has this shape."""
        assert math.prod(shape) == self._size, (shape, self._size)
        largest, at, *values = self._worst
        finite = self._size - self._not_finite
        nothing = bool(self._size) and not finite  # only NaN: no figure
        count = math.nan if nothing else max(finite, 1)
        norm, reference = math.sqrt(self._squares), math.sqrt(self._reference)
        return Difference(
            shape=tuple(shape),
            largest_error=largest,
            mean_error=self._sum / count,
            relative_norm=math.nan if nothing else norm / reference if reference else math.inf if norm else 0.0,
            worst_index=tuple(int(i) for i in np.unravel_index(at, tuple(shape))) if self._size else None,
            worst_values=(values[0], values[1]),
            differing_values=self.differing_values,
            differing_bits=self._differing_bits,
            not_finite=self._not_finite,
            same_bits=self.differing_values == 0,
            rms_error=norm / math.sqrt(count),
            limit=self._limit,
            beyond=self._beyond,
            share=self._share,
        )


def _changed_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the exclusive or of two arrays' bits (unsigned integers); of different types: as float64."""
    if a.dtype != b.dtype:
        with np.errstate(invalid="ignore"):
            a, b = a.astype(np.float64), b.astype(np.float64)
    kind = np.dtype(f"u{a.dtype.itemsize}")
    return a.view(kind) ^ b.view(kind)


def difference(a: Any, b: Any, limit: Limit | None = None, *, nan_agrees: bool = False) -> Difference:
    """Return how a float array differs from the reference b of the same shape."""
    measure = Measure(limit, nan_agrees=nan_agrees)
    measure.add(a, b)
    return measure.result(np.shape(a))


def tolerance_of(text: str) -> float:
    """Read a tolerance on the command line: a finite number, at least 0. For argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text}: must be a number, at least 0")
    return value


def index_text(index: Shape | None) -> str:
    """Return a position as Python writes it, without spaces: [1,17,3]."""
    return "" if index is None else f"[{','.join(map(str, index))}]"


def cells(found: Difference) -> list[str]:
    """Return what tables show of a difference: largest and mean error, relative norm, where it is worst, both there."""
    sizes = (found.largest_error, found.mean_error, found.relative_norm)
    return [*map(small, sizes), index_text(found.worst_index), *(f"{value:.6g}" for value in found.worst_values)]


def as_json(found: Difference) -> dict[str, Any]:
    """Return what JSON has of every difference: all but what is about a limit."""
    measures = Difference._fields[: Difference._fields.index("rms_error")]
    return {name: getattr(found, name) for name in measures}
