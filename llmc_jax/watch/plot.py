"""Curves drawn with characters. Leaves out what they show.

A package for this, plotext, has no wheel for some platforms; braille dots take fifty lines.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from llmc_jax.logs.curves import Curve, LossRange, finite

BLANK = 0x2800  # the braille character without a dot; each dot is a bit
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # by row and column within a character
LABEL = 7  # cells of the numbers beside the axis
NARROWEST, LOWEST = 10, 3  # cells of a plot


class Plot(NamedTuple):
    """A plot as cells: rows of characters, and which cells show a mark."""

    rows: list[str]
    marked: np.ndarray  # (height, width) bool
    labels: list[str]  # beside the rows; empty where a row has none
    axis: str  # below them: the steps at both ends


def plot(line: Curve, marks: Curve, shown: LossRange, width: int, height: int, ascii_only: bool = False) -> Plot:
    """Draw a curve as a line of dots, and another one's points as marks over it.

    shown: the range of values; what lies outside is drawn at its edge. width, height: in cells.
    """
    steps = np.concatenate([line.steps, marks.steps])
    first, last = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
    dots = np.zeros((4 * height, 2 * width), bool)
    for column, low, high in _columns(line, shown, first, last, dots.shape):
        dots[low : high + 1, column] = True
    cells = dots.reshape(height, 4, width, 2)
    codes = BLANK + np.einsum("hrwc,rc->hw", cells, DOTS)
    rows = [[_character(code, ascii_only) for code in row] for row in codes.tolist()]
    marked = np.zeros((height, width), bool)
    marks = finite(marks)
    for x, y in zip(_across(marks.steps, first, last, width), _down(marks.values, shown, height), strict=True):
        rows[y][x], marked[y, x] = "o" if ascii_only else "●", True
    left, right = f"{first:,}", f"{last:,}"
    axis = f"{left}{right:>{max(0, width - len(left))}}"[:width]
    return Plot(["".join(row) for row in rows], marked, _labels(shown, height), axis)


def _character(code: int, ascii_only: bool) -> str:
    if code == BLANK:  # some fonts show this one as eight small circles
        return " "
    return "." if ascii_only else chr(code)


def _columns(
    line: Curve, shown: LossRange, first: int, last: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """Yield the columns of dots that a line takes: column, its highest and its lowest row, joined to the one before."""
    line = finite(line)
    if not len(line.steps):
        return
    across = _across(line.steps, first, last, shape[1])
    counts = np.bincount(across, minlength=shape[1])
    there = np.flatnonzero(counts)
    means = np.bincount(across, weights=line.values, minlength=shape[1])[there] / counts[there]
    columns = np.arange(there[0], there[-1] + 1)
    down = _down(np.interp(columns, there, means), shown, shape[0])
    before = down[0]
    for column, row in zip(columns.tolist(), down.tolist(), strict=True):
        # up to the neighbour's dot, and not beside it
        low, high = (before + 1, row) if row > before else (row, max(row, before - 1))
        yield column, min(low, row), high
        before = row


def _across(steps: np.ndarray, first: int, last: int, width: int) -> np.ndarray:
    """Return the columns of some steps."""
    return ((steps - first) * (width - 1) / max(1, last - first)).round().astype(np.int64)


def _down(values: np.ndarray, shown: LossRange, height: int) -> np.ndarray:
    """Return the rows of some values, 0 the topmost."""
    low, high = _scaled(np.array([shown.low, shown.high]), shown.log)
    part = (high - _scaled(np.clip(values, shown.low, shown.high), shown.log)) / (high - low)
    return np.minimum((part * height).astype(np.int64), height - 1)


def _scaled(values: np.ndarray, log: bool) -> np.ndarray:
    return np.log(values) if log else values


def _labels(shown: LossRange, height: int) -> list[str]:
    """Return the values at the first, the middle and the last row; between them none."""
    ends = _scaled(np.array([shown.high, shown.low]), shown.log)
    parts = (np.arange(height) + 0.5) / height
    values = ends[0] + parts * (ends[1] - ends[0])
    values = np.exp(values) if shown.log else values
    named = {0, height // 2, height - 1}
    return [f"{value:.4g}"[:LABEL] if row in named else "" for row, value in enumerate(values.tolist())]
