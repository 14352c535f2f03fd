"""The command line of the comparisons: `python -m llmc_jax.compare`. Leaves out the comparisons."""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from llmc_jax.compare import checkpoints, debug_state, live, logs
from llmc_jax.config import ExitCode
from llmc_jax.errors import InputError
from llmc_jax.stopping import open_missing_streams, print_error

PROGRAM = "python -m llmc_jax.compare"

# Each has add_arguments(parser) and run(args), and imports JAX, if at all, when it runs.
COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "logs": (logs, "losses of several runs, by step"),
    "checkpoints": (checkpoints, "two checkpoints of any format, tensor by tensor"),
    "debug-state": (debug_state, "a debug state of llm.c and our forward and backward"),
    "run": (live, "run a trainer of llm.c and ours, one after the other"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Compare runs, programs and files with llm.c's, or with each other.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, words) in COMMANDS.items():
        command = commands.add_parser(
            name, help=words, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
    return parser


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first `--` and those behind it, which are another program's."""
    place = words.index("--") if "--" in words else len(words)
    return list(words[:place]), list(words[place + 1 :])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one comparison. Returns the exit status.

    0: compared, and nothing differs by more than it may; 4: compared, and something does; 2: bad input, with one line
    on standard error.
    """
    open_missing_streams()
    words, flags = _split(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(words)
    args.flags = flags
    if flags and args.command != "run":
        parser.error(f"{args.command} takes no words behind --")
    try:
        return COMMANDS[args.command][0].run(args)
    except InputError as error:
        print_error(f"{PROGRAM} {args.command}: {error}")
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print_error(f"{PROGRAM} {args.command}: stopped")
        return ExitCode.STOPPED


if __name__ == "__main__":
    sys.exit(main())
