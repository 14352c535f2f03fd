"""The flags of `llmc-jax generate`, and which of them exclude each other. Leaves out what they do."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import show_value
from llmc_jax.generate.asking import add_model, asking_parser, flag

STANDARD_INPUT = "-"
LONGEST_NUMBER = 18  # digits; Python refuses to read very many
OPTIONAL = {"probs": 5, "serve": 8000}  # flags that may stand without a number, and which it is then
DEFAULTS: dict[str, Any] = {
    "prompt": None, "prompt_file": None, "prompt_ids": None, "tokens": 200, "samples": 1, "stop": [],
    "ignore_end": False, "exact": False, "temperature": 1.0, "greedy": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
    "repetition_penalty": 1.0, "seed": 1337, "dtype": "auto", "tokenizer": "auto", "model_attention": "auto",
    "step": None, "v2_order": "auto", "json": False, "llmc": False, "probs": None, "attention": None, "layer": 0,
    "perplexity": False, "interactive": False, "no_history": False, "serve": None,
}  # fmt: skip

DESCRIPTION = """\
Ask a trained model: it goes on with a text, as the tokens come. CHECKPOINT is anything that can be opened: a run's
folder, a training state, a model file of llm.c, a folder of Hugging Face's, nanoGPT's ckpt.pt; or a shape (d12) with
random weights. Standard output gets the text alone; what else there is to say goes to standard error.
docs/generate.md explains all of it."""

EXAMPLES = (
    ('runs/plays --prompt "ROMEO:" -n 300', "300 tokens more, after the newest good state of a run"),
    ("gpt2_124M.bin --prompt-file story.txt --samples 3 --top-p 0.9", "three continuations of a text"),
    ("gpt2_124M.bin --interactive", "type, read, type again"),
)

# What excludes what, and why. Within a group each flag excludes the others.
MODES = ("probs", "attention", "perplexity", "interactive", "serve", "llmc")
PROMPTS = ("prompt", "prompt_file", "prompt_ids")
FILTERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "greedy")
REQUEST = ("tokens", "samples", "stop", "ignore_end", "exact", "seed", *FILTERS)
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "probs": (("samples", "exact"), "it shows one text"),
    "attention": ((*REQUEST, "json"), "it draws the text that is given, and nothing is generated"),
    "perplexity": (REQUEST, "it is that of the text that is given, and nothing is generated"),
    "interactive": (("samples", "exact", "json"), "it goes on with one text, on the screen"),
    "serve": ((*PROMPTS, *REQUEST, "json"), "the page asks for it"),
    "llmc": ((*PROMPTS, *FILTERS, "samples", "stop", "exact", "ignore_end"), "llm.c's sampler knows nothing of it: it "
             "begins with the end-of-text token, at temperature 1, and filters nothing"),
    "greedy": (("temperature", "top_k", "top_p", "min_p", "samples"), "the likeliest token is taken, there is no "
               "choice"),
}  # fmt: skip
GOES_WITH = {"layer": "attention", "no_history": "interactive"}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. What is not given is not in its result: `parse` fills it in."""
    usage = "[-h] CHECKPOINT [--prompt TEXT | --prompt-file FILE] [flags]"
    parser = asking_parser("generate", usage, DESCRIPTION, EXAMPLES)
    parser.add_argument("checkpoint", nargs="?", type="path", metavar="CHECKPOINT")
    _add_text(parser.add_argument_group("the text"))
    _add_sampling(parser.add_argument_group("how the next token is drawn, in this order"))
    _add_other_questions(parser.add_argument_group("other questions"))
    add_model(parser, "the model")
    return parser


def _add_text(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prompt", metavar="TEXT", help="what the model goes on with; - is standard input. Without a prompt: standard "
        "input where it is no terminal, else a new text")  # fmt: skip
    add("--prompt-file", type="path", metavar="FILE", help="the same from a file, without its final newline")
    add("--prompt-ids", metavar="IDS", help='the same as token ids: "15496 995"')
    add("-n", "--tokens", type=int, metavar="N", help="new tokens, at most (default 200; with --probs 1)")
    add("--samples", type=int, metavar="N", help="continuations, computed together (default 1)")
    add("--stop", action="append", metavar="TEXT", help="the text ends before this; may be given several times")
    add("--ignore-end", action="store_true", help="go on after the end-of-text token")
    add("--json", action="store_true", help="print one JSON object at the end: text, ids, logprobs, settings, times")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--repetition-penalty", type=float, metavar="X",
        help="divides what speaks for a token that the text has already (default 1: off)")  # fmt: skip
    add("--temperature", type=float, metavar="X", help="below 1: likely tokens get likelier (default 1; 0: --greedy)")
    add("--top-k", type=int, metavar="N", help="of the N likeliest tokens (default 0: all)")
    add("--top-p", type=float, metavar="X", help="of the fewest that have X of the probability (default 1: all)")
    add("--min-p", type=float, metavar="X", help="of those with X of the likeliest one's probability (default 0: all)")
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--seed", type=int, metavar="N", help="the same seed draws the same tokens (default 1337)")
    add("--exact", action="store_true",
        help="one sample after the other: the same bits, whatever their number")  # fmt: skip


def _add_other_questions(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--probs", nargs="?", const=OPTIONAL["probs"], metavar="N", help="what the model thinks of each token of the "
        f"text and of those that it adds (-n): its probability, and the N likeliest (default {OPTIONAL['probs']})"
        )  # fmt: skip
    add("--perplexity", action="store_true", help="loss and perplexity of the text; nothing is added")
    add("--attention", type="path", metavar="FILE", help="draw what a layer's heads look at: .png, .svg, .pdf")
    add("--layer", type=int, metavar="N", help="with --attention: from 0 (default 0)")
    add("--interactive", action="store_true", help="type and read in turns; /help there lists what else one can type")
    add("--serve", nargs="?", const=OPTIONAL["serve"], metavar="PORT", help="a page on 127.0.0.1 to ask the model with "
        f"(default port {OPTIONAL['serve']}; 0: any free one)")  # fmt: skip
    add("--no-history", action="store_true", help="with --interactive: neither read nor keep what was typed")
    add("--llmc", action="store_true", help="draw as llm.c does while it trains, by its random numbers")


def parse(words: Sequence[str]) -> SimpleNamespace:
    """Return every flag, those that were not given with their defaults; `given` are the names of the others.

    Raises InputError, one line, for what cannot be together.
    """
    found = vars(make_parser().parse_args(words))
    typed_as = {}
    if found.get("temperature") == 0 and "greedy" not in found:
        del found["temperature"]
        found["greedy"], typed_as = True, {"greedy": "--temperature 0"}
    check_together(found.keys(), typed_as)
    _take_optional(found)
    if not found.get("checkpoint"):
        raise InputError("CHECKPOINT: is missing; name a run's folder or a model's file, or a shape such as d12")
    if found.get("prompt") == "":
        raise InputError("--prompt: is empty; without --prompt the model begins a new text")
    for name in ("prompt", "prompt_file"):
        if found.get(name) == STANDARD_INPUT and "interactive" in found:
            raise InputError(f"{flag(name)} - and --interactive: standard input is what is typed")
    for name in ("tokens", "samples"):
        if found.get(name, 1) < 1:
            raise InputError(f"{flag(name)} {found[name]}: it must be at least 1")
    defaults = {**DEFAULTS, "tokens": 1} if "probs" in found else DEFAULTS
    return SimpleNamespace(**{**defaults, **found, "checkpoint": Path(found["checkpoint"]), "given": frozenset(found)})


def _take_optional(found: dict[str, Any]) -> None:
    """Read the numbers that may be left out. argparse takes the checkpoint of `--probs CHECKPOINT` for one."""
    for name, alone in OPTIONAL.items():
        value = str(found.get(name, "0"))
        if "checkpoint" not in found and not value.isdecimal():
            found |= {"checkpoint": value, name: alone}
        elif name in found:
            found[name] = optional_number(value, name)


def check_together(names: Collection[str], typed_as: Mapping[str, str]) -> None:
    """Raise InputError for flags, by their names, that make no sense together. typed_as: if not so."""
    for group, why in ((PROMPTS, "a text begins once"), (MODES, "one question at a time")):
        first, second, *_ = [*(name for name in group if name in names), "", ""]
        if second:
            raise InputError(f"{flag(first)} and {flag(second)}: {why}; leave one out")
    for name, (refused, why) in REFUSED.items():
        bad = next((other for other in refused if other in names), None)
        if name in names and bad:
            raise InputError(f"{typed_as.get(name, flag(name))} and {flag(bad)}: {why}; leave one out")
    for name, other in GOES_WITH.items():
        if name in names and other not in names:
            raise InputError(f"{flag(name)}: goes with {flag(other)} alone")


def optional_number(value: str, name: str) -> int:
    """Return the number behind a flag that may stand without one. Raises InputError."""
    if not value.isdecimal() or len(value) > LONGEST_NUMBER:
        raise InputError(f"{flag(name)} {show_value(value)}: expected a whole number, or nothing")
    return int(value)
