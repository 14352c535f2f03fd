"""The profiler's flags: those of train.py that shape a step, and its own.

Leaves out what they lead to (__main__.py).
"""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmc_jax.errors import InputError
from llmc_jax.machine.jax_setup import python_command

PROGRAM = "llmc_jax.profile"
WIDTH = 100


class Own(NamedTuple):
    """A flag that train.py does not have."""

    flag: str
    value: str  # how its value is called; empty: it takes none
    default: Any
    meaning: str


OWN = (
    Own("--steps", "N", 10, "steps to time, after two that are not counted"),
    Own("--traced", "N", 3, "steps to record for the table"),
    Own("--layers", "", False, "a line for each layer"),
    Own("--differences", "", False, "no trace: time programs that leave parts out, and subtract"),
    Own("--trace", "DIR", None, "keep the trace there, for Perfetto and TensorBoard"),
    Own("--read", "DIR", None, "only the table of a trace that was kept; takes --layers, --json and --picture"),
    Own("--json", "FILE", None, "write everything there as JSON"),
    Own("--picture", "FILE", None, "draw the timeline of one layer there, as PNG"),
    Own("--layer", "N", None, "which layer to draw; by itself the middle one"),
    Own("--calculate", "", False, "only FLOPs, bytes and memory, from the shape: needs no device, compiles nothing"),
    Own("--device", "NAME", None, "with --calculate: the GPU whose peaks set the floors, such as 'NVIDIA H200'"),
    Own("--vs", "NAME=VALUE", [], "run another version in turns with this one, given any number of times: a flag of "
        "train.py (kernels=xla, dtype=bf16), threads=1, or commit=HEAD~1"),
    Own("--threads", "LIST", None, "run with so many threads each, in turns, such as 1,2,4 (CPU)"),
    Own("--rounds", "N", 5, "with --vs and --threads: turns"),
)  # fmt: skip


def help_text() -> str:
    """What --help prints."""
    lines = [f"usage: {python_command()} -m {PROGRAM} [flags of train.py] [flags below]", ""]
    lines += textwrap.wrap(
        "Where a training step's time, memory and operations go. Takes train.py's flags for the model, the batch, the "
        "optimizer, precision and kernels (--preset -e -b -t -d -r --dtype --kernels --attention and so on; without "
        "--preset and -e: d12), "
        "and trains on random tokens. docs/profiling.md explains the table.", WIDTH)  # fmt: skip
    lines.append("")
    for own in OWN:
        default = f" [default {own.default}]" if own.value == "N" and own.default is not None else ""
        indent = " " * 24
        text = textwrap.wrap(own.meaning + default, WIDTH, initial_indent=indent, subsequent_indent=indent)
        left = f"  {own.flag} {own.value}".rstrip()
        lines += [left + text[0][len(left) :], *text[1:]]
    lines += ["", "Examples:"]
    for words, meaning in (
        ("-e d12 -b 4 -t 64", "the table of GPT-2 124M's step"),
        ("-e d12 -b 4 -t 64 --layers --picture layer.png --trace traces", "by layer, with a picture and the trace"),
        ("-e d12 -b 4 -t 64 --vs dtype=bf16 --vs recompute=0", "against two other versions"),
        ("-e d12 -b 64 --dtype bf16 --calculate --device 'NVIDIA H200'", "what a GPU would need"),
    ):
        lines += [f"  {python_command()} -m {PROGRAM} {words}", f"      {meaning}"]
    return "\n".join(lines)


def split(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of the profiler's own flags, and the words that are left for train.py's.

    Raises InputError for values that its own flags cannot have.
    """
    known = {own.flag: own for own in OWN}
    values: dict[str, Any] = {
        own.flag: list(own.default) if isinstance(own.default, list) else own.default for own in OWN
    }
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        own = known.get(flag)
        if own is None:
            rest.append(word)
            continue
        if not own.value:
            if equals:
                raise InputError(f"{word}: {flag} takes no value; write {flag} alone")
            values[flag] = True
            continue
        if not equals:
            if not words:
                raise InputError(f"{flag}: its value must follow; write {flag} {own.value}")
            value = words.pop(0)
        if own.value == "N":
            value = _number(flag, value)  # type: ignore[assignment]
        if isinstance(own.default, list):
            values[flag].append(value)
        else:
            values[flag] = value
    return values, rest


def _number(flag: str, text: str) -> int:
    least = 0 if flag == "--layer" else 1
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise InputError(f"{flag} {text}: must be a whole number, at least {least}")
    return int(text)
