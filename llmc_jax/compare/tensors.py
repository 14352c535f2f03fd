"""How far two arrays lie apart: the measures that every comparison of tensors reports.

Takes arrays in pieces, so that tensors larger than memory can be compared. Leaves out where the arrays come from.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.numbers import small

CHUNK = 1 << 20  # elements compared at a time: the float64 copies stay at 8 MiB each

Shape = tuple[int, ...]
Show = Callable[[str], None]  # prints a line or a table, unless standard output is for JSON


class Limit(NamedTuple):
    """What |a - b| may be at most, b being the reference: absolute + relative |b|."""

    absolute: float
    relative: float = 0.0
    strict: bool = False  # it must stay below, and not only within

    def __str__(self) -> str:
        sign = "<" if self.strict else "<="
        return f"{sign} {self.absolute:g}" + (f" + {self.relative:g} |b|" if self.relative else "")


@dataclass
class Difference:
    """How a differs from the reference b, both taken in by pieces. Sums are those of the values that are finite.

    nan_agrees: a NaN or an infinity is no difference where both sides have the same bits of it, which is what matters
    of two files. Otherwise each is one, on whichever side, which is what matters of a computation.
    """

    shape: Shape  # of all pieces together
    limit: Limit | None = None  # within which they agree; None: only where all bits are the same
    nan_agrees: bool = False
    largest_error: float = 0.0  # |a - b|; NaN or infinite where one of them is
    worst_values: tuple[float, float] = (math.nan, math.nan)  # a and b there
    differing_values: int = 0  # values whose bits differ
    differing_bits: int = 0  # bits that differ
    not_finite: int = 0  # differences that are NaN or infinite
    beyond: int = 0  # values outside the limit; NaN always is
    share: float = 0.0  # the largest |a - b| as a share of what the limit allows there; infinite with NaN
    _size: int = 0  # values so far
    _place: int = 0  # of the worst among them
    _sum: float = 0.0  # of |a - b|
    _squares: float = 0.0  # of a - b
    _reference: float = 0.0  # squares of b

    @property
    def worst_index(self) -> Shape | None:
        """Return the position of the first value that is not finite, else of the largest error; None of nothing."""
        return tuple(int(i) for i in np.unravel_index(self._place, self.shape)) if self._size else None

    @property
    def _count(self) -> float:
        """Return how many values the sums are of, at least 1; NaN where no value is finite."""
        finite = self._size - self.not_finite
        return math.nan if self._size and not finite else max(finite, 1)

    @property
    def mean_error(self) -> float:
        return self._sum / self._count

    @property
    def relative_norm(self) -> float:
        """Return ||a - b|| / ||b||; infinite where b is all zero and a is not."""
        error, reference = math.sqrt(self._squares), math.sqrt(self._reference)
        if math.isnan(self._count):
            return math.nan
        return error / reference if reference else math.inf if error else 0.0

    @property
    def same_bits(self) -> bool:
        return self.differing_values == 0

    @property
    def agrees(self) -> bool:
        """Return whether every value is within the limit."""
        return self.same_bits if self.limit is None else self.beyond == 0

    def add(self, a: Any, b: Any) -> None:
        """Take in the next piece in C order: two float arrays of the same shape."""
        a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        assert a.size == b.size, (a.size, b.size)
        for start in range(0, a.size, CHUNK):
            self._chunk(a[start : start + CHUNK], b[start : start + CHUNK])

    def _chunk(self, a: np.ndarray, b: np.ndarray) -> None:
        changed = _changed_bits(a, b)
        self.differing_values += int(np.count_nonzero(changed))
        self.differing_bits += int(np.bitwise_count(changed).sum(dtype=np.int64))
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; differences beyond float64
            x, y = a.astype(np.float64), b.astype(np.float64)
            distance = np.abs(x - y)
            if self.nan_agrees:
                distance[changed == 0] = 0.0
            finite = np.isfinite(distance)
            bad = a.size - int(np.count_nonzero(finite))
            if not self.not_finite:
                at = int(np.argmin(finite) if bad else np.argmax(distance))
                if bad or not self._size or distance[at] > self.largest_error:
                    self.largest_error, self._place = float(distance[at]), self._size + at
                    self.worst_values = float(x[at]), float(y[at])
            if self.limit is not None:
                self._hold_against(self.limit, distance, finite, y)
        self.not_finite += bad
        counted, reference = distance[finite], y[finite & np.isfinite(y)]
        self._sum += float(counted.sum())
        self._squares += float(np.dot(counted, counted))
        self._reference += float(np.dot(reference, reference))
        self._size += a.size

    def _hold_against(self, limit: Limit, distance: np.ndarray, finite: np.ndarray, y: np.ndarray) -> None:
        allowed = limit.absolute + (limit.relative * np.abs(y) if limit.relative else 0.0)
        inside = distance < allowed if limit.strict else distance <= allowed
        self.beyond += int(np.count_nonzero(~(inside & finite)))
        with np.errstate(divide="ignore"):
            share = np.where(distance == 0, 0.0, distance / allowed)
        self.share = max(self.share, float(share.max())) if finite.all() else math.inf


def _changed_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the exclusive or of two arrays' bits (unsigned integers); of different types: as float64."""
    if a.dtype != b.dtype:
        with np.errstate(invalid="ignore"):
            a, b = a.astype(np.float64), b.astype(np.float64)
    kind = np.dtype(f"u{a.dtype.itemsize}")
    return a.view(kind) ^ b.view(kind)


def difference(a: Any, b: Any, limit: Limit | None = None, *, nan_agrees: bool = False) -> Difference:
    """Return how a float array differs from the reference b of the same shape."""
    found = Difference(np.shape(a), limit, nan_agrees)
    found.add(a, b)
    return found


def index_text(index: Shape | None) -> str:
    """Return a position as Python writes it, without spaces: [1,17,3]."""
    return "" if index is None else f"[{','.join(map(str, index))}]"


def cells(found: Difference) -> list[str]:
    """Return what tables show of a difference: largest and mean error, relative norm, where it is worst, both there."""
    sizes = (found.largest_error, found.mean_error, found.relative_norm)
    return [*map(small, sizes), index_text(found.worst_index), *(f"{value:.6g}" for value in found.worst_values)]


MEASURES = (
    "shape", "largest_error", "mean_error", "relative_norm", "worst_index", "worst_values", "differing_values",
    "differing_bits", "not_finite", "same_bits", "agrees",
)  # fmt: skip


def as_json(found: Difference) -> dict[str, Any]:
    """Return what JSON has of a difference; with a limit also how far it is kept."""
    of_limit = () if found.limit is None else ("limit", "share", "beyond")
    return {name: getattr(found, name) for name in (*MEASURES, *of_limit)}
