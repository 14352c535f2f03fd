"""How every comparison says its result: tables for the screen, JSON for programs.

Leaves out what the result is.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc_jax.errors import InputError
from llmc_jax.files import plain, write_atomic

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


def show(words: str, *, json_path: str | None) -> None:
    """Print a line or a table, unless standard output is for JSON."""
    if json_path != SCREEN:
        print(words, flush=True)


def emit(result: Mapping[str, Any], *, json_path: str | None) -> None:
    """Write the result as JSON: to standard output, to a file, or (None) nowhere. Raises InputError.

    Non-finite numbers become the strings that metrics.jsonl has for them: nan, inf, -inf.
    """
    if json_path is None:
        return
    written = json.dumps(plain(result), indent=2, allow_nan=False) + "\n"
    if json_path == SCREEN:
        sys.stdout.write(written)
    else:
        write_atomic(Path(json_path), written.encode())


def number(value: float | None, digits: int = 4) -> str:
    """Return a value with a fixed number of decimals; empty for None, a word for what is not finite."""
    return "" if value is None else f"{value:.{digits}f}"


def small(value: float) -> str:
    """Return a difference or an error: 3 significant digits, 0 for exactly nothing."""
    return "0" if value == 0 else f"{value:.3g}"
