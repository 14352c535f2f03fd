"""What the command lines with commands share: argparse, without abbreviated flags, and the run of a command.

train.py, the profiler and the kernels read their words by hand (config/flags.py), since there the flags are llm.c's.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from llmc_jax.cli.kit import exit_status


class Parser(argparse.ArgumentParser):
    """An argparse parser, and its commands', that takes no beginnings of flags for flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})


def run_command(program: str, parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command that the words name, which has set itself as the default of `run`; return the exit status."""

    def run() -> int | None:
        options = parser.parse_args(argv)
        status: int | None = options.run(options)
        return status

    return exit_status(program, run)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json, which prints the result as JSON."""
    parser.add_argument("--json", action="store_true", help="print JSON")
