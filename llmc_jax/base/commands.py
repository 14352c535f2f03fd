"""The programs by name: which module each is, and how it is typed in a terminal.

Leaves out running them (main.py). Imports none of them, so that every message can name any.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]  # where the package lies, which need not be installed
COMMAND = "llmc-jax"
TRAIN = "train"
HELP = ("-h", "--help")


class Command(NamedTuple):
    """A subcommand: the module whose `program` runs, which also sets up its process, or else `main`; what it is for.

    script: the file beside the package that runs it too. restarts_unless: where it computes on this machine, it wants
    large memory pages, for which its process starts again, but with one of these words, which only show something.
    """

    module: str
    meaning: str
    script: str = ""
    restarts_unless: tuple[str, ...] = ()


COMMANDS = {
    TRAIN: Command(
        "run.command", "train a GPT-2; the same as without a subcommand", "train.py",
        restarts_unless=("--help", "--help-markdown", "--version"),
    ),
    "generate": Command("generate.command", "continue a prompt with a trained model", restarts_unless=HELP),
    "evaluate": Command(
        "evaluate.command", "loss, perplexity and bits per byte of texts; HellaSwag, MMLU, ARC, LAMBADA",
        restarts_unless=HELP,
    ),
    "convert": Command(
        "checkpoint.convert", "inspect a checkpoint of any format, and convert between formats", "convert_checkpoint.py"
    ),
    "plan": Command("plan.command", "does a run fit, and how fast is it, on GPUs you need not have"),
    "profile": Command(
        "profile.command", "where a step's time and memory go, by operation", restarts_unless=("--help",)
    ),
    "compare": Command("compare.command", "logs, checkpoints, debug states and programs against llm.c's or others"),
    "watch": Command("watch.command", "a live view of a run in the terminal, or a table of the runs in a folder"),
    "report": Command("report.command", "one page about a run, or about several: curves, samples, events"),
    "data": Command("data.command", "make token files from text, and inspect them"),
    "checkpoint": Command("checkpoint.command", "which checkpoints a run has, and whether each is intact"),
    "model": Command("models.command", "check a model of your own, a Python file: its gradients, its decoder"),
    "kernels": Command("trials.command", "what was measured of the kernels on this machine's GPUs"),
}  # fmt: skip


def program_name(name: str) -> str:
    """Return what a command calls itself: `llmc-jax data`; `train.py` where `llmc-jax` is not what was typed."""
    place = Path(sys.argv[0])
    by_command = place.stem == COMMAND or place.parts[-2:] == ("llmc_jax", "__main__.py")
    return f"{COMMAND} {name}" if by_command or not COMMANDS[name].script else COMMANDS[name].script


def typed(name: str) -> str:
    """Return how a command is typed here: `llmc-jax data`, or `python train.py` where such a script was typed."""
    own = program_name(name)
    if own.startswith(COMMAND):
        return in_environment(own)
    if under_uv() and Path(sys.argv[0]).name == own and Path(sys.prefix) != ROOT / ".venv":
        return f"uv run {own}"  # in the environment that uv keeps for this script
    return f"{in_environment('python')} {own}"


def in_environment(program: str) -> str:
    """Return how one types a program of this Python's environment, which need not be activated."""
    if under_uv():
        return f"uv run {program}"
    own = Path(".venv")
    inactive = "VIRTUAL_ENV" not in os.environ and own.is_dir() and own.resolve() == Path(sys.prefix).resolve()
    return f".venv/bin/{program}" if inactive else program


def under_uv() -> bool:
    """Return whether `uv run` started this program."""
    return "UV_RUN_RECURSION_DEPTH" in os.environ
