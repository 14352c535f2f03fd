"""The flags of `llmc-jax generate`, and what evaluate shares with it: the model's. Leaves out what they do."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.options import Option, own
from llmc_jax.base.parsers import Parser

PORT = 8000

DESCRIPTION = """\
Ask a trained model: it continues a text, token by token. CHECKPOINT is anything that can be opened: a run's
folder, a training state, a model file of llm.c, a folder of Hugging Face's, nanoGPT's ckpt.pt; gpt2, gpt2-xl or
hf:OWNER/NAME, which is downloaded; or a shape (d12) with random weights. Standard output gets the text alone; what
else there is to say goes to standard error. docs/generate.md explains all of it."""

EXAMPLES = (
    ('runs/plays --prompt "ROMEO:" -n 300', "300 tokens more, after the newest good state of a run"),
    ("gpt2_124M.bin --prompt-file story.txt --samples 3 --top-p 0.9", "three continuations of a text"),
    ("gpt2_124M.bin --interactive", "type, read, type again"),
)

# What excludes what. A text begins once, one question is asked at a time, and where nothing is drawn, nothing of how.
MODES = "probs attention interactive serve"
PROMPTS = "prompt prompt_file"
DRAWN = "tokens samples stop ignore_end seed temperature top_k top_p"

CHECKPOINT = (own("checkpoint", "[CHECKPOINT]", "", "", type=str),)
TEXT = (
    own("--prompt", "TEXT", None, "the text to continue. Without a prompt: standard input where it is no terminal, "
        "else a new text. For a model without a tokenizer it is token ids: '15496 995'", excludes=PROMPTS),
    own("--prompt-file", "FILE", None, "the same from a file, without its final newline", excludes=PROMPTS),
    own("-n --tokens", "N", 200, "new tokens, at most (default 200; with --probs 1)"),
    own("--samples", "N", 1, "continuations, computed together (default 1)"),
    own("--stop", "TEXT", [], "the text ends before this; may be given several times"),
    own("--ignore-end", "", False, "continue past the end-of-text token"),
    own("--json", "", False, "print one JSON object at the end: text, ids, logprobs, settings, times"),
)  # fmt: skip
SAMPLING = (
    own("--temperature", "X", 1.0, "below 1: likely tokens get likelier (default 1; 0: always the likeliest)"),
    own("--top-k", "N", 0, "of the N likeliest tokens (default 0: all)", 0),
    own("--top-p", "X", 1.0, "of the fewest that have X of the probability (default 1: all)"),
    own("--seed", "N", 1337, "the same seed draws the same tokens (default 1337)", 0, most=2**64 - 1),
)  # fmt: skip
QUESTIONS = (
    own("--probs", "[N]", None, "what the model thinks of each token of the text and of those that it adds (-n): its "
        "probability, and the N likeliest (default 5)", 0, alone=5, excludes=f"{MODES} samples"),
    own("--attention", "FILE", None, "draw what a layer's heads attend to: .png, .svg, .pdf",
        excludes=f"{MODES} {DRAWN} json kernels", writes=".png .svg .pdf"),
    own("--layer", "N", 0, "with --attention: from 0 (default 0)", 0, needs="attention"),
    own("--interactive", "", False, "type and read in turns", excludes=f"{MODES} samples json"),
    own("--serve", "[PORT]", None, f"a page on 127.0.0.1 to ask the model with (default port {PORT}; 0: any free one)",
        0, alone=PORT, most=(1 << 16) - 1, excludes=f"{MODES} {PROMPTS} {DRAWN} json"),
)  # fmt: skip
# How a checkpoint is opened.
MODEL = (
    own("--model", "FILE.py", "", "the file of a model of your own (docs/models.md)", name="model_file"),
    own("--dtype", "auto|fp32|bf16|fp16", "auto", "compute in (default auto: bf16 on a GPU, else fp32)"),
    own("--tokenizer", "SPEC", "auto", "bytes, gpt2, none or the path of a tokenizer file or a folder of "
        "Hugging Face's (default auto: a model's own, as far as it is known)"),
    own("--step", "N", None, "of a folder with several training states: this one, not the newest", 0),
)  # fmt: skip
KERNELS = (
    own("--kernels", "xla|pallas", "xla", "what makes new tokens: XLA's operations, or handwritten kernels, which are "
        "compared with them first (default xla; pallas: NVIDIA GPUs from Ampere on, GPT-2 as it is, to 64 samples)"),
)  # fmt: skip
GROUPS = {
    "": CHECKPOINT, "the text": TEXT, "how the next token is drawn, in this order": SAMPLING,
    "other questions": QUESTIONS, "the model": (*MODEL, *KERNELS),
}  # fmt: skip
OPTIONS = tuple(about for group in GROUPS.values() for about in group)


def asking_parser(
    name: str, usage: str, description: str, shown: Sequence[tuple[str, str]], groups: Mapping[str, Sequence[Option]]
) -> Parser:
    """Return the parser of a command that asks a trained model.

    usage: what follows its name. shown: examples. groups: flags by the title that stands over them.
    """
    program = typed(name)
    parser = Parser(
        prog=program,
        usage=f"{program} {usage}",
        description=description,
        shown=shown,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100),
    )
    for title, options in groups.items():
        parser.add(options, title)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return every flag, those that were not given with their defaults; `given` are the names of the others.

    Raises InputError for what cannot be together.
    """
    usage = "[-h] CHECKPOINT [--prompt TEXT | --prompt-file FILE] [flags]"
    found = asking_parser("generate", usage, DESCRIPTION, EXAMPLES, GROUPS).parse_args(words)
    if not found.checkpoint:
        raise InputError("CHECKPOINT: is missing; name a run's folder or a model's file, or a shape such as d12")
    found.checkpoint = Path(found.checkpoint)
    if found.probs is not None and "tokens" not in found.given:
        found.tokens = 1
    return found
