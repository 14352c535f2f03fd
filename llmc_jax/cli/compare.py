"""The command line of the comparisons: `python -m llmc_jax.compare`. Leaves out the comparisons."""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from llmc_jax.cli.parsers import Parser, run_command
from llmc_jax.compare import checkpoints, debug_state, live, logs

PROGRAM = "python -m llmc_jax.compare"

# Each has add_arguments(parser) and run(args), and imports JAX, if at all, when it runs.
COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "logs": (logs, "losses of several runs, by step"),
    "checkpoints": (checkpoints, "two checkpoints of any format, tensor by tensor"),
    "debug-state": (debug_state, "a debug state of llm.c and our forward and backward"),
    "run": (live, "run a trainer of llm.c and ours, one after the other"),
}


class _Parser(Parser):
    """The words behind the first `--` are another program's: they come as `flags`, and are not looked at."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        place = words.index("--") if "--" in words else len(words)
        found = super().parse_args(words[:place], namespace)
        found.flags = words[place + 1 :]
        if found.flags and found.command != "run":
            self.error(f"{found.command} takes no words behind --")
        return found


def make_parser() -> Parser:
    """Return the parser of its commands."""
    parser = _Parser(
        prog=PROGRAM,
        description="Compare runs, programs and files with llm.c's, or with each other.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, words) in COMMANDS.items():
        command = commands.add_parser(name, help=words, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one comparison. Returns the exit status.

    0: compared, and nothing differs by more than it may; 4: compared, and something does; 2: bad input, with one line
    on standard error.
    """
    return run_command(PROGRAM, make_parser(), argv)
