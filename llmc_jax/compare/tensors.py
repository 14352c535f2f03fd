"""How far two arrays lie apart: the measures that every comparison of tensors reports.

Takes arrays in pieces, so that tensors larger than memory can be compared. Leaves out where the arrays come from.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

DIFFERS = 4  # exit status: what was compared does not agree (2 is bad input, as everywhere)
CHUNK = 1 << 20  # elements compared at a time: the float64 copies stay at 8 MiB each

Shape = tuple[int, ...]


class Limit(NamedTuple):
    """What |a - b| may be at most, b being the reference: absolute + relative |b|."""

    absolute: float
    relative: float = 0.0
    strict: bool = False  # it must stay below, and not only within

    def __str__(self) -> str:
        sign = "<" if self.strict else "<="
        return f"{sign} {self.absolute:g}" + (f" + {self.relative:g} |b|" if self.relative else "")


class Difference(NamedTuple):
    """How a differs from the reference b. Where there are NaN or infinities the sums are those of the other values."""

    shape: Shape
    largest: float  # |a - b|; NaN or infinite where one of them is
    mean: float  # of |a - b|
    relative: float  # ||a - b|| / ||b||; infinite where b is all zero and a is not
    worst: Shape | None  # position: of the first that is not finite, else of the largest; None of nothing
    a: float  # there
    b: float
    other_values: int  # values whose bits differ
    other_bits: int  # bits that differ
    nonfinite: int  # differences that are NaN or infinite
    beyond: int  # values outside the limit; NaN always is
    share: float  # the largest |a - b| as a share of what the limit allows there; infinite with NaN
    rms_error: float  # root of the mean square of a - b

    @property
    def same_bits(self) -> bool:
        return self.other_values == 0

    @property
    def agrees(self) -> bool:
        """Return whether every value is within the limit."""
        return self.beyond == 0


class Measure:
    """Accumulates a Difference from pieces in C order.

    nan_agrees: a NaN or an infinity is no difference where both sides have the same bits of it, which is what matters
    of two files. Otherwise each is one, on whichever side, which is what matters of a computation.
    """

    def __init__(self, limit: Limit | None = None, *, nan_agrees: bool = False) -> None:
        self._limit, self._nan_agrees = limit, nan_agrees
        self.other_values = 0  # so far
        self._size = self._other_bits = self._nonfinite = self._beyond = 0
        self._sum = self._squares = self._reference = self._share = 0.0
        self._worst = (-1.0, 0, math.nan, math.nan)  # |a - b|, position, a, b

    def add(self, a: Any, b: Any) -> None:
        """Take in the next piece: two float arrays of the same shape."""
        a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        assert a.size == b.size, (a.size, b.size)
        for start in range(0, a.size, CHUNK):
            self._chunk(a[start : start + CHUNK], b[start : start + CHUNK])

    def _chunk(self, a: np.ndarray, b: np.ndarray) -> None:
        changed = _changed_bits(a, b)
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; differences beyond float64
            x, y = a.astype(np.float64), b.astype(np.float64)
            distance = np.abs(x - y)
            if self._nan_agrees:
                distance[changed == 0] = 0.0
            finite = np.isfinite(distance)
            self._count(x, y, distance, finite)
        self.other_values += int(np.count_nonzero(changed))
        self._other_bits += int(np.bitwise_count(changed).sum(dtype=np.int64))
        counted = distance[finite]
        self._sum += float(counted.sum())
        self._squares += float(np.dot(counted, counted))
        reference = y[finite & np.isfinite(y)]
        self._reference += float(np.dot(reference, reference))
        self._size += a.size

    def _count(self, x: np.ndarray, y: np.ndarray, distance: np.ndarray, finite: np.ndarray) -> None:
        """Count what is beyond the limit, and find the worst element."""
        bad = int(np.count_nonzero(~finite))
        if distance.size and not self._nonfinite:
            at = int(np.argmin(finite) if bad else np.argmax(distance))
            if bad or distance[at] > self._worst[0]:
                self._worst = (float(distance[at]), self._size + at, float(x[at]), float(y[at]))
        self._nonfinite += bad
        if self._limit is None:
            return
        allowed = self._limit.absolute + self._limit.relative * np.abs(y)
        inside = distance < allowed if self._limit.strict else distance <= allowed
        self._beyond += int(np.count_nonzero(~(inside & finite)))
        with np.errstate(divide="ignore"):
            share = np.where(distance == 0, 0.0, distance / allowed)
        self._share = math.inf if bad else max(self._share, float(share.max(initial=0.0)))

    def result(self, shape: Sequence[int]) -> Difference:
        """Return the difference of everything added, which together has this shape."""
        assert math.prod(shape) == self._size, (shape, self._size)
        largest, at, a, b = self._worst
        finite = self._size - self._nonfinite
        size = math.nan if self._size and not finite else max(finite, 1)  # only NaN: no figure
        norm = math.sqrt(self._squares)
        return Difference(
            shape=tuple(shape),
            largest=max(largest, 0.0) if not math.isnan(largest) else largest,
            mean=self._sum / size,
            relative=self._relative(norm, finite),
            worst=tuple(int(i) for i in np.unravel_index(at, tuple(shape))) if self._size else None,
            a=a,
            b=b,
            other_values=self.other_values,
            other_bits=self._other_bits,
            nonfinite=self._nonfinite,
            beyond=self._beyond,
            share=self._share,
            rms_error=norm / math.sqrt(size),
        )

    def _relative(self, norm: float, finite: int) -> float:
        if self._size and not finite:
            return math.nan
        return norm / math.sqrt(self._reference) if self._reference else (math.inf if norm else 0.0)


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
    """Write a position as Python does, without spaces: [1,17,3]."""
    return "" if index is None else f"[{','.join(map(str, index))}]"


def as_json(found: Difference) -> dict[str, Any]:
    """Return the fields of a difference under the names that JSON has for them."""
    return {
        "shape": list(found.shape),
        "largest_error": found.largest,
        "mean_error": found.mean,
        "relative_norm": found.relative,
        "worst_index": None if found.worst is None else list(found.worst),
        "worst_values": [found.a, found.b],
        "differing_values": found.other_values,
        "differing_bits": found.other_bits,
        "not_finite": found.nonfinite,
        "same_bits": found.same_bits,
    }
