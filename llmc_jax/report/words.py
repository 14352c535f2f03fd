"""Numbers as a page shows them."""

import math


def number(value: float, digits: int = 4) -> str:
    """Return a figure with so many digits behind the point."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else str(value)


def count(value: float) -> str:
    """Return a large number in a unit, with three digits or four: 858.9 thousand, 1.02 billion."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if value >= size:
            return f"{value / size:.4g} {name}"
    return f"{value:g}"


def gibibytes(value: float) -> str:
    """Return bytes as GiB."""
    return f"{value / 2**30:,.2f} GiB"


def rate(flops: float) -> str:
    """Return FLOP/s in a unit."""
    return f"{flops / 1e12:,.2f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.1f} GFLOP/s"


def duration(seconds: float) -> str:
    """Return seconds in the two largest units that they have: 41 s, 2 min 5 s, 3 h 20 min, 2 d 4 h."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    for size, name, small, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= size:
            rest = total % size // small
            return f"{total // size} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{total} s"


def plural(number: int, noun: str) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
