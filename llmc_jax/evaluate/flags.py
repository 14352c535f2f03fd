"""The flags of `llmc-jax evaluate`, and which of them need others. Leaves out what they do."""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.config.train import TrainConfig
from llmc_jax.generate.asking import add_model, asking_parser, flag

MOST_CHECKPOINTS = 26  # each has a letter
USUAL_ROWS = TrainConfig().batch_size
DEFAULTS: dict[str, Any] = {
    "data": [], "text": [], "tasks": [], "batches": None, "rows": None, "positions": None, "stride": None,
    "limit": None, "crop_context": False, "by_position": False, "picture": None, "items": None, "json": False,
    "devices": 0, "dtype": "auto", "tokenizer": "auto", "model_attention": "auto", "step": None, "v2_order": "auto",
}  # fmt: skip

DESCRIPTION = """\
What trained models are worth: loss, perplexity and bits per byte of texts, and how many questions of public tasks they
answer; each with its standard error, several models side by side. CHECKPOINT is anything that can be opened: a run's
folder, a training state, a model file of llm.c, a folder of Hugging Face's, nanoGPT's ckpt.pt; or a shape (d12) with
random weights. Standard output gets the table or the JSON; what else there is to say goes to standard error.
docs/evaluate.md explains all of it."""

EXAMPLES = (
    ("runs/plays --data val.bin", "loss, perplexity and bits per byte on the whole file"),
    ("runs/a runs/b --data val.bin --picture positions.png", "two models, and the loss by position as a picture"),
    ("gpt2_124M.bin --tasks hellaswag mmlu=data.tar", "questions that `data hellaswag` has brought, or of a file"),
)

TEXTS, TASKS = ("data", "text"), ("tasks",)
NEEDED = {
    **dict.fromkeys(("batches", "stride", "by_position", "picture"), TEXTS),
    **dict.fromkeys(("limit", "crop_context", "items"), TASKS),
}
EXCLUDED = (("batches", "stride", "the first batches are those of training, whose rows do not overlap"),)
AT_LEAST = {"batches": 1, "rows": 1, "positions": 1, "stride": 1, "limit": 1, "devices": 0}
MOST_DEVICES = 256  # a CPU pretends to have as many as are asked for, and takes minutes to make very many
TYPED = {"rows": "-b", "positions": "-t", "by_position": "--positions"}  # if not as the field is called


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. What is not given is not in its result: `parse` fills it in."""
    usage = "[-h] CHECKPOINT... [--data FILE...] [--text FILE...] [--tasks TASK...] [flags]"
    parser = asking_parser("evaluate", usage, DESCRIPTION, EXAMPLES)
    parser.add_argument("checkpoints", nargs="*", type=Path, metavar="CHECKPOINT")
    _add_subjects(parser.add_argument_group("what to evaluate on"))
    _add_texts(parser.add_argument_group("texts"))
    _add_tasks(parser.add_argument_group("tasks"))
    add_model(parser, "the models").add_argument(
        "--devices", type=int, metavar="N", help="compute on the first N (default: all GPUs, or the CPU); the figures "
        "are the same on any number",
    )  # fmt: skip
    return parser


def _add_subjects(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data", nargs="+", action="extend", type="path", metavar="FILE",
        help="token files; a quoted pattern ('val_*.bin') is one text of several files")  # fmt: skip
    add("--text", nargs="+", action="extend", type="path", metavar="FILE", help="text in UTF-8, made into tokens "
        "by each model's own tokenizer; for a model of bytes, any but UTF-16")  # fmt: skip
    add("--tasks", nargs="+", action="extend", metavar="TASK", help="hellaswag, mmlu, arc-easy, arc-challenge, "
        "lambada; with =FILE from that file, the public one or llm.c's, else from where the data command leaves it"
        )  # fmt: skip
    add("--json", action="store_true", help="print one JSON object, with all in full precision")


def _add_texts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "-t", dest="positions", type=int, metavar="T", help="positions of a row (default: the smallest T of all models)"
    )
    add("--batches", type=int, metavar="N", help="the first N batches alone, as training validates (default: all)")
    add("-b", dest="rows", type=int, metavar="B", help=f"rows of such a batch (default {USUAL_ROWS}, as in training), "
        "and rows that a device computes at a time (default: as suits it)")  # fmt: skip
    add("--stride", type=int, metavar="N", help="rows begin N tokens apart and overlap: each token is scored once, in "
        "the first row that has it (default: T)")  # fmt: skip
    add("--positions", dest="by_position", action="store_true", help="also the loss by position in the context")
    add("--picture", type="path", metavar="FILE", help="draw the loss by position: .png, .svg, .pdf")


def _add_tasks(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--limit", type=int, metavar="N", help="the first N questions of each task (default: all)")
    add("--crop-context", action="store_true", help="drop the oldest tokens of contexts that are too long for T")
    add("--items", type="path", metavar="FILE", help="write each model's answer to each question, a line of JSON each")


def parse(words: Sequence[str]) -> SimpleNamespace:
    """Return every flag, those that were not given with their defaults. Raises InputError, one line."""
    found = vars(make_parser().parse_args(words))
    if not found.get("checkpoints"):
        raise InputError("CHECKPOINT: is missing; name run folders or model files, before --data, --text and --tasks")
    if len(found["checkpoints"]) > MOST_CHECKPOINTS:
        raise InputError(f"CHECKPOINT: {len(found['checkpoints'])} were named; at most {MOST_CHECKPOINTS} fit a table")
    check_together(found.keys())
    for name, least in AT_LEAST.items():
        if found.get(name, least) < least:
            raise InputError(f"{typed_as(name)} {found[name]}: it must be at least {least}")
    if found.get("devices", 0) > MOST_DEVICES:
        raise InputError(f"--devices {found['devices']}: it must be at most {MOST_DEVICES}")
    return SimpleNamespace(**{**DEFAULTS, **found})


def typed_as(name: str) -> str:
    """Return how a flag is typed."""
    return TYPED.get(name) or flag(name)


def check_together(names: Collection[str]) -> None:
    """Raise InputError for flags, by their names, that make no sense together or without others."""
    if not {*TEXTS, *TASKS} & set(names):
        raise InputError("there is nothing to evaluate on; name it by --data, --text or --tasks")
    for name, needed in NEEDED.items():
        if name in names and not set(needed) & set(names):
            raise InputError(f"{typed_as(name)}: goes with {' or '.join(map(flag, needed))} alone")
    for name, other, why in EXCLUDED:
        if name in names and other in names:
            raise InputError(f"{typed_as(name)} and {typed_as(other)}: {why}; leave one out")
