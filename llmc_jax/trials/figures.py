"""What a measurement gives, and what it tells meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

Figures = dict[str, float | int | str]
SAME, OTHER, FREE = "the same", "OTHER", "not promised"  # the figure `bits` of numerics


tell: Callable[[bool], object] = bool  # a measuring process's parent whether it runs (worker.py); elsewhere nobody


@contextmanager
def running() -> Iterator[None]:
    """Run within the block what is compiled already: what does not come back from there hangs."""
    tell(True)
    yield
    tell(False)


class Tried(NamedTuple):
    """A whole step."""

    problem: str  # what is wrong with it; empty: nothing
    seconds: float = 0.0  # 0: not known


class NotMeasured(Exception):
    """This cannot be measured here; the message says why. No error."""
