"""Numbers in words and units, and an estimate as three of them. Leaves out tables (text.py)."""

import math
from collections.abc import Iterable
from typing import NamedTuple

SCALES = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"), (0.0, ""))


def number(value: float | None, digits: int = 4) -> str:
    """Return a value with a fixed number of decimals; empty for None, a word for what is not finite."""
    return "" if value is None else f"{value:,.{digits}f}"


def small(value: float) -> str:
    """Return a difference or an error: 3 significant digits, 0 for exactly nothing."""
    return "0" if value == 0 else f"{value:.3g}"


def count(value: float) -> str:
    """Return a large number in a unit, with three digits or four: 858.9 thousand, 1.02 billion."""
    size, name = next((scale for scale in SCALES if float(f"{value:.4g}") >= scale[0]), (0.0, ""))
    return f"{value / size:.4g} {name}" if name else f"{value:g}"


def flop_rate(flops: float) -> str:
    """Return FLOP/s in a unit: 12.3 GFLOP/s, 98.76 TFLOP/s."""
    return f"{flops / 1e12:.2f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.1f} GFLOP/s"


def duration(seconds: float) -> str:
    """Return seconds in the two largest units that they have: 41 s, 2 min 5 s, 3 h 20 min, 2 d 4 h."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    for size, name, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= size:
            rest = total % size // part
            return f"{total // size} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{total} s"


def plural(number: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
