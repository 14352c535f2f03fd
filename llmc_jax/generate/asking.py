"""What the command lines share that ask a trained model (generate, evaluate): parser, model's flags.

Leaves out the flags of each, and what is said of a model (generate.py).
"""

import argparse
from collections.abc import Sequence

from llmc_jax.base.commands import typed
from llmc_jax.base.parsers import Parser
from llmc_jax.checkpoint.llmc import V2_ORDERS


def asking_parser(name: str, usage: str, description: str, shown: Sequence[tuple[str, str]]) -> Parser:
    """Return a parser without flags. What is not given is not in its result.

    usage: what follows its name. shown: examples.
    """
    program = typed(name)
    return Parser(
        prog=program,
        usage=f"{program} {usage}",
        description=description,
        shown=shown,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100),
    )


def add_model(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Add the flags that say how a checkpoint is opened, as a group of --help; return that."""
    group = parser.add_argument_group(title)
    add = group.add_argument
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), help="compute in (default auto: bf16 on a GPU, else fp32)")
    add("--tokenizer", type="path", metavar="SPEC", help="bytes, gpt2, llama3, none or the path of a tokenizer file or "
        "a folder of Hugging Face's (default auto: a model's own, as far as it is known)")  # fmt: skip
    add("--model-attention", choices=("auto", "softmax", "relu"),
        help="what it was trained with (default auto: as its training state says, else softmax)")  # fmt: skip
    add("--step", type=int, metavar="N", help="of a folder with several training states: this one, not the newest")
    add("--v2-order", choices=V2_ORDERS, help="of llm.c's model files of version 2, as for convert_checkpoint.py")
    return group


def flag(name: str) -> str:
    """Return how a flag is typed."""
    return f"--{name.replace('_', '-')}"
