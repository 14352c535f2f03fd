"""One command for all programs: `llmc-jax convert …`. Without a subcommand: train.

Leaves out what each does. Imports none of them but the one that runs, so that `--help` comes at once.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from llmc_jax.base.commands import COMMAND, COMMANDS, TRAIN
from llmc_jax.base.errors import raise_problems
from llmc_jax.base.kit import exit_status
from llmc_jax.base.options import show_value


def program(*words: str) -> NoReturn:
    """Run the command `llmc-jax` with these words before those of the command line. May start the process again.

    That is done before anything is imported that takes time (machine/jax_setup.py).
    """
    sys.exit(main([*words, *sys.argv[1:]]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first word names, training where none does. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        return _run(TRAIN, words, [(name, about.meaning) for name, about in COMMANDS.items()])
    name, *rest = words
    if name in COMMANDS:
        return _run(name, rest)
    unknown = f"{show_value(name)}: unknown subcommand; known are {', '.join(COMMANDS)}"
    return exit_status(COMMAND, lambda: raise_problems([unknown]))


def _run(name: str, *arguments: Sequence) -> int:
    about = COMMANDS[name]
    if about.restarts_unless and not set(about.restarts_unless) & set(arguments[0]):
        import_module("llmc_jax.machine.jax_setup").restart_with_huge_pages()
    module = import_module(f"llmc_jax.{about.module}")
    status: int = getattr(module, "program", module.main)(*arguments)
    return status
