"""An estimate as three numbers: what it is at least, typically and at most."""

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """Three values of one quantity, low <= typical <= high."""

    low: float
    typical: float
    high: float

    def times(self, factor: float) -> "Interval":
        """Return each of them multiplied by a factor of at least 0."""
        return Interval(factor * self.low, factor * self.typical, factor * self.high)

    def rate(self, amount: float) -> "Interval":
        """Return an amount over each of them: the least of a rate is over the most seconds."""
        return Interval(amount / self.high, amount / self.typical, amount / self.low)


def total(intervals: Iterable[Interval]) -> Interval:
    """Return the sum of some, as if all were low, typical or high together; zero for none."""
    found = list(intervals)
    return Interval(*(float(sum(each[at] for each in found)) for at in range(3)))


def certain(value: float) -> Interval:
    """Return an interval of one value."""
    return Interval(value, value, value)
