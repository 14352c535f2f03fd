"""Figures with standard errors, and differences of two that were measured on the same rows or items.

A figure is a function of sums over independent units. What each unit moves it by, to first order, is kept: from these
parts follow its standard error and, unit by unit, that of a difference. Leaves out what the units are.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Mean(NamedTuple):
    """A mean and its standard error; nan of too few values."""

    value: float
    error: float


class Figure(NamedTuple):
    """A figure, and what each of its n units moves it by: parts (n,) float64, whose sum is 0."""

    name: str
    value: float
    parts: np.ndarray

    @property
    def mean(self) -> Mean:
        """Return it with its standard error, which is nan of fewer than two units."""
        return Mean(self.value, error_of(self.parts))


def error_of(parts: np.ndarray) -> float:
    """Return the standard error of what units move by their parts (n,). Of a mean it is the usual s / sqrt(n)."""
    n = len(parts)
    return math.sqrt(n / (n - 1) * float(np.sum(np.square(parts)))) if n > 1 else math.nan


def ratio(name: str, sums: np.ndarray, sizes: np.ndarray | Sequence[int]) -> Figure:
    """Return the sum of sums (n,) over that of sizes (n,): a mean over what the units consist of, such as tokens."""
    sizes = np.asarray(sizes, np.float64)
    total = float(sizes.sum())
    value = float(np.sum(sums, dtype=np.float64)) / total if total else math.nan
    return Figure(name, value, (sums - value * sizes) / total if total else np.full(len(sizes), math.nan))


def mean(name: str, values: np.ndarray) -> Figure:
    """Return the mean of values (n,)."""
    return ratio(name, np.asarray(values, np.float64), np.ones(len(values)))


def exponential(name: str, figure: Figure) -> Figure:
    """Return e to the power of a figure; infinite where that is too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(np.exp(figure.value))
        return Figure(name, value, value * figure.parts)


def difference(figure: Figure, first: Figure) -> Mean:
    """Return what a figure is larger by than another that was measured on the same units, and the error of that."""
    return Mean(figure.value - first.value, error_of(figure.parts - first.parts))
