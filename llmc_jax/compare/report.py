"""What all comparisons share in saying their result: how numbers stand in tables.

Leaves out what the result is, and where its JSON goes (compare/command.py).
"""

from collections.abc import Callable

Show = Callable[[str], None]  # prints a line or a table, unless standard output is for JSON


def number(value: float | None, digits: int = 4) -> str:
    """Return a value with a fixed number of decimals; empty for None, a word for what is not finite."""
    return "" if value is None else f"{value:.{digits}f}"


def small(value: float) -> str:
    """Return a difference or an error: 3 significant digits, 0 for exactly nothing."""
    return "0" if value == 0 else f"{value:.3g}"
