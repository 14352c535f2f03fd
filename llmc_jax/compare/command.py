"""The command line of the comparisons: `llmc-jax compare`. Leaves out the comparisons."""

import argparse
from functools import partial
from types import ModuleType

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import ExitCode
from llmc_jax.base.options import SCREEN
from llmc_jax.base.parsers import DIFFERS, JSON_FILE, Parser, commands_line, write_json
from llmc_jax.base.streams import print_error
from llmc_jax.compare import checkpoints, debug_state, logs
from llmc_jax.machine.jax_setup import settle

# Each has DESCRIPTION, OPTIONS, and run(args, show), which tells whether the two sides agree, and the result for JSON.
# It imports JAX, if at all, when it runs.
COMMANDS: dict[str, tuple[ModuleType, str]] = {
    "logs": (logs, "losses of several runs, by step"),
    "checkpoints": (checkpoints, "two checkpoints of any format, tensor by tensor"),
    "debug-state": (debug_state, "a debug state of llm.c and our forward and backward"),
}


def make_parser() -> Parser:
    """Return the parser of its commands."""
    parser = Parser(
        prog=typed("compare"),
        shown=(("logs runs/a runs/b", "losses by step"), ("checkpoints model.bin runs/a", "tensor by tensor")),
        description="Compare runs and files with llm.c's, or with each other.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, words) in COMMANDS.items():
        command = commands.add_parser(
            name, help=words, description=module.DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add([*module.OPTIONS, JSON_FILE])
        command.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run one comparison, say its result, and return the exit status. Raises InputError."""
    on_screen = args.json == SCREEN
    if args.command == "debug-state":  # which computes
        for note in settle():
            print_error(f"note: {note}")
    module, _ = COMMANDS[args.command]
    agrees, result = module.run(args, (lambda _: None) if on_screen else partial(print, flush=True))
    if args.json is not None:
        write_json(result, args.json)
    return ExitCode.DONE if agrees else DIFFERS


main = commands_line("compare", make_parser)
