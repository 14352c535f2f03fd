"""What all comparisons share in saying their result: how numbers stand in tables, and which files may be written.

Leaves out what the result is, and where its JSON goes (cli/compare.py).
"""

from collections.abc import Callable
from pathlib import Path

from llmc_jax.errors import InputError

Show = Callable[[str], None]  # prints a line or a table, unless standard output is for JSON


def check_file(flag: str, path: str | Path, ending: str, hint: str = "") -> None:
    """Refuse what is hardly meant as a file of results, before any work. Raises InputError.

    In `--json a.log b.log` argparse takes a.log for the file: that must not be overwritten.
    """
    if not str(path).endswith(ending):
        raise InputError(f"{flag} {path}: the name of a file of results must end in {ending}{hint}")
    if not Path(path).resolve().parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {Path(path).parent} to write it into")


def number(value: float | None, digits: int = 4) -> str:
    """Return a value with a fixed number of decimals; empty for None, a word for what is not finite."""
    return "" if value is None else f"{value:.{digits}f}"


def small(value: float) -> str:
    """Return a difference or an error: 3 significant digits, 0 for exactly nothing."""
    return "0" if value == 0 else f"{value:.3g}"
