"""How every comparison says its result: tables for the screen, JSON for programs.

Leaves out what the result is.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmc_jax.errors import InputError
from llmc_jax.runlog import write_atomic

SCREEN = "-"  # --json without a file: the JSON takes the tables' place on standard output


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """`--json [FILE]`, as `args.json`: None, SCREEN or a path. A comparison calls `check_json(args.json)` first."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=SCREEN,
        metavar="FILE",
        help="write the result as JSON to FILE (*.json); without FILE to the screen, in place of the tables",
    )


def check_json(json_path: str | None) -> None:
    """Refuse what is hardly meant as a file of results, before any work.

    In `--json a.log b.log` argparse takes a.log for FILE: that must not overwrite it. Raises InputError.
    """
    if json_path not in (None, SCREEN) and not str(json_path).endswith(".json"):
        raise InputError(
            f"--json {json_path}: the name of a file of results must end in .json; for the screen put --json last"
        )


def show(text: str, *, json_path: str | None) -> None:
    """Print a line or a table, unless standard output is for JSON."""
    if json_path != SCREEN:
        print(text)


def emit(result: Mapping[str, Any], *, json_path: str | None) -> None:
    """Write the result as JSON: to standard output, to a file, or (None) nowhere. Raises InputError.

    Non-finite numbers become the strings that metrics.jsonl has for them: nan, inf, -inf.
    """
    if json_path is None:
        return
    text = json.dumps(plain(result), indent=2, allow_nan=False) + "\n"
    if json_path == SCREEN:
        sys.stdout.write(text)
    else:
        write_atomic(Path(json_path), text.encode())


def plain(value: Any) -> Any:
    """A value as JSON can hold it: NumPy's scalars and arrays as Python's, non-finite numbers as strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # an array, or a scalar of NumPy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Iterable[str] = ()) -> str:
    """Lines of text with the cells in columns, under their headings and a rule.

    left: the headings of columns that hold words; the others are pushed to the right, as numbers are. Short rows are
    filled up, an empty one is a blank line, and a column without any content is left out.
    """
    filled = [list(row) + [""] * (len(headings) - len(row)) for row in rows]
    words = frozenset(left)
    used = [index for index in range(len(headings)) if any(row[index] for row in filled)]
    widths = {index: max(len(headings[index]), *(len(row[index]) for row in filled)) for index in used}

    def text(cells: Sequence[str]) -> str:
        parts = (f"{cells[index]:{'<' if headings[index] in words else '>'}{widths[index]}}" for index in used)
        return "  ".join(parts).rstrip()

    head = text(headings)
    return "\n".join([head, "-" * len(head), *map(text, filled)]).rstrip()


def wrapped(sentence: str) -> str:
    """A sentence as lines of a screen's width, indented from the second on."""
    return textwrap.fill(sentence, 116, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def number(value: float | None, digits: int = 4) -> str:
    """A value with a fixed number of decimals; empty for None, a word for what is not finite."""
    return "" if value is None else f"{value:.{digits}f}"


def small(value: float | None) -> str:
    """A difference or an error: 3 significant digits, 0 for exactly nothing, empty for None."""
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.3g}"
