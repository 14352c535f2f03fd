"""One command for all programs: `llmc-jax convert …`, `python -m llmc_jax data …`. Without a subcommand: train.

Leaves out what each does. Imports none of them but the one that runs, so that `--help` comes at once.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from llmc_jax.cli.kit import exit_status
from llmc_jax.config.options import show_value
from llmc_jax.errors import InputError
from llmc_jax.machine.jax_setup import one_command

TRAIN = "train"
# Of llmc_jax/cli/NAME.py `program` runs, which also sets up its process, or else `main`: (words) -> exit status.
COMMANDS = {
    TRAIN: "train a GPT-2; the same as without a subcommand",
    "generate": "ask a trained model: continue a prompt",
    "evaluate": "loss, perplexity and bits per byte of texts; HellaSwag, MMLU, ARC, LAMBADA",
    "convert": "look into a checkpoint of any format, and convert between them",
    "plan": "does it fit, and how fast is it: on GPUs that need not be here",
    "profile": "where a step's time, memory and operations go",
    "compare": "logs, checkpoints, debug states and programs beside llm.c's, or each other",
    "watch": "a live view of a run on the terminal, or a table of the runs in a folder",
    "report": "one page about a run, or several over each other: curves, samples, events",
    "data": "make token files from text, and look into them",
    "checkpoint": "which checkpoints a run has, and whether each is whole",
    "kernels": "what is known of the kernels on this machine's GPUs",
}

ELSEWHERE = {"chat": "generate --interactive", "sample": "generate", "resume": "-y 1 -o RUN", "help": "--help"}


def program() -> NoReturn:
    """Run the command `llmc-jax`. May start the process again (machine/jax_setup.py)."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first word names, training where none does. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        return _run(TRAIN, words, list(COMMANDS.items()))
    name, *rest = words
    return _run(name, rest) if name in COMMANDS else exit_status(one_command() or "llmc-jax", lambda: _refuse(name))


def _run(name: str, *arguments: Sequence) -> int:
    module = import_module(f"llmc_jax.cli.{name}")
    status: int = getattr(module, "program", module.main)(*arguments)
    return status


def _refuse(name: str) -> NoReturn:
    import difflib  # here, because only mistakes need it

    near = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, COMMANDS, n=1)
    advice = f"did you mean {near[0]}?" if near else "--help lists all flags of training"
    raise InputError(f"{show_value(name)}: there is no such subcommand; known are {', '.join(COMMANDS)}; {advice}")
