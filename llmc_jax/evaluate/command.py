"""Say what trained models are worth: llmc-jax evaluate --help. Leaves out how (job.py).

What was named is checked before any weights are read, but for the ids in token files.
"""

import argparse
from collections.abc import Sequence

from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.kit import command_line
from llmc_jax.base.options import own
from llmc_jax.base.parsers import Parser
from llmc_jax.generate.command import say
from llmc_jax.generate.flags import MODEL, asking_parser
from llmc_jax.machine.jax_setup import configure, settle

MOST_CHECKPOINTS = 26  # each has a letter
MOST_DEVICES = 256  # a CPU pretends to have as many as are asked for, and takes minutes to make very many

DESCRIPTION = """\
How good trained models are: loss, perplexity and bits per byte of texts, and how many questions of public tasks they
answer; each with its standard error, several models side by side. CHECKPOINT is anything that can be opened: a run's
folder, a training state, a model file of llm.c, a folder of Hugging Face's, nanoGPT's ckpt.pt; gpt2, gpt2-xl or
hf:OWNER/NAME, which is downloaded; or a shape (d12) with random weights. Standard output gets the table or the JSON;
what else there is to say goes to standard error. docs/evaluate.md explains all of it."""

EXAMPLES = (
    ("runs/plays --data val.bin", "loss, perplexity and bits per byte on the whole file"),
    ("runs/a runs/b --data val.bin", "two models side by side"),
    ("gpt2_124M.bin --tasks hellaswag mmlu=mmlu.parquet", "questions that `data hellaswag` has brought, or of a file"),
)

CHECKPOINTS = (own("checkpoints", "[CHECKPOINT...]", [], ""),)
SUBJECTS = (
    own("--data", "FILE...", [], "token files; a quoted pattern ('val_*.bin') is one text of several files"),
    own("--text", "FILE...", [], "text in UTF-8, made into tokens by each model's own tokenizer; for a model of bytes, "
        "any but UTF-16"),
    own("--tasks", "TASK...", [], "hellaswag, mmlu, arc-easy, arc-challenge, lambada; with =FILE from that file, the "
        "public one or llm.c's, else from where the data command leaves it"),
    own("--limit", "N", None, "the first N rows of each text and questions of each task (default: all)"),
    own("--json", "", False, "print one JSON object, with all in full precision"),
)  # fmt: skip
ROWS = (
    own("-t", "T", None, "positions of a row (default: the smallest T of all models)", name="positions"),
    own("-b", "B", None, "rows that a device computes at a time (default: as suits it)", name="rows"),
)  # fmt: skip
MODELS = (
    *(about for about in MODEL if about.name != "model_file"),
    own("--model", "FILE.py...", [], "the files of models of your own, which the checkpoints were trained by",
        name="model_files"),
    own("--devices", "N", 0, "compute on the first N (default: all GPUs, or the CPU); the figures are the same on any "
        "number", 0, most=MOST_DEVICES),
)  # fmt: skip
GROUPS = {
    "": CHECKPOINTS, "what to evaluate on": SUBJECTS, "how it is computed": ROWS, "the models": MODELS,
}  # fmt: skip
OPTIONS = tuple(about for group in GROUPS.values() for about in group)


def make_parser() -> Parser:
    """Return the parser."""
    usage = "[-h] CHECKPOINT... [--data FILE...] [--text FILE...] [--tasks TASK...] [flags]"
    return asking_parser("evaluate", usage, DESCRIPTION, EXAMPLES, GROUPS)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return every flag, those that were not given with their defaults. Raises InputError."""
    found = make_parser().parse_args(words)
    if not found.checkpoints:
        raise InputError("CHECKPOINT: is missing; name run folders or model files, before --data, --text and --tasks")
    if len(found.checkpoints) > MOST_CHECKPOINTS:
        raise InputError(f"CHECKPOINT: {len(found.checkpoints)} were named; at most {MOST_CHECKPOINTS} fit a table")
    if not {"data", "text", "tasks"} & found.given:
        raise InputError("there is nothing to evaluate on; name it by --data, --text or --tasks")
    return found


@command_line("evaluate")
def main(words: Sequence[str]) -> int:
    """Run `llmc-jax evaluate`."""
    flags = parse(words)
    for note in settle() + configure(tf32=flags.dtype != "fp32", devices=flags.devices):
        say("note", note)
    from llmc_jax.evaluate import job  # here, because --help does without JAX
    from llmc_jax.models import family

    for file in flags.model_files:
        family.load(file)

    job.run(flags)
    return ExitCode.DONE
