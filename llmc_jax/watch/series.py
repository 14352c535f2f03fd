"""A figure over the steps in bounded memory, however long the run. Leaves out drawing it."""

import math
from typing import NamedTuple

import numpy as np

from llmc_jax.logs.curves import Curve

MOST = 2000  # bins; a wide terminal has a tenth of that in dots


class Odd(NamedTuple):
    """The values of a series that are no finite numbers."""

    number: int = 0
    last: int | None = None  # its step


class Series:
    """Values over steps, as means of bins of equal count: of one value, until there are too many."""

    def __init__(self) -> None:
        self._steps: list[float] = []  # sums over a bin, its values likewise
        self._values: list[float] = []
        self._count = 0
        self.size = 1  # values of a bin
        self.odd = Odd()

    def add(self, step: int, value: float) -> None:
        """Take a value."""
        if not math.isfinite(value):
            self.odd = Odd(self.odd.number + 1, step)
            return
        if self._count % self.size == 0:
            self._steps.append(0.0)
            self._values.append(0.0)
        self._steps[-1] += step
        self._values[-1] += value
        self._count += 1
        if self._count == MOST * self.size:
            self._steps = [sum(pair) for pair in zip(self._steps[::2], self._steps[1::2], strict=True)]
            self._values = [sum(pair) for pair in zip(self._values[::2], self._values[1::2], strict=True)]
            self.size *= 2

    def curve(self) -> Curve:
        """Return the means of the bins, at their mean steps."""
        counts = np.full(len(self._steps), float(self.size))
        if self._count % self.size:
            counts[-1] = self._count % self.size
        return Curve((np.array(self._steps) / counts).astype(np.int64), np.array(self._values) / counts)
