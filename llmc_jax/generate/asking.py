"""What the command lines share that ask a trained model (generate, evaluate): parser, model's flags.

Leaves out the flags of each, and what is said of a model (generate.py).
"""

import argparse
from collections.abc import Sequence

from llmc_jax.base.commands import typed
from llmc_jax.base.options import own
from llmc_jax.base.parsers import Parser
from llmc_jax.checkpoint.llmc import V2_ORDERS

# How a checkpoint is opened.
MODEL = (
    own("--dtype", "auto|fp32|bf16|fp16", "auto", "compute in (default auto: bf16 on a GPU, else fp32)"),
    own("--tokenizer", "SPEC", "auto", "bytes, gpt2, llama3, none or the path of a tokenizer file or a folder of "
        "Hugging Face's (default auto: a model's own, as far as it is known)"),
    own("--model-attention", "auto|softmax|relu", "auto",
        "what it was trained with (default auto: as its training state says, else softmax)"),
    own("--step", "N", None, "of a folder with several training states: this one, not the newest", 0),
    own("--v2-order", "|".join(V2_ORDERS), "auto",
        "of llm.c's model files of version 2, as for convert_checkpoint.py"),
)  # fmt: skip


def asking_parser(name: str, usage: str, description: str, shown: Sequence[tuple[str, str]]) -> Parser:
    """Return a parser without flags. usage: what follows its name. shown: examples."""
    program = typed(name)
    return Parser(
        prog=program,
        usage=f"{program} {usage}",
        description=description,
        shown=shown,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100),
    )
