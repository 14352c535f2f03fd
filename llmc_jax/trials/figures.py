"""What a measurement gives."""

from typing import NamedTuple

Figures = dict[str, float | int | str]
SAME, OTHER, FREE = "the same", "OTHER", "not promised"  # the figure `bits` of numerics


class Tried(NamedTuple):
    """A whole step."""

    problem: str  # what is wrong with it; empty: nothing
    seconds: float = 0.0  # 0: not known


class NotMeasured(Exception):
    """This cannot be measured here; the message says why. No error."""
