"""How it is shown what a model thinks of a text: the text coloured by surprise, a table of its tokens, plain data.

Surprise is -log2 of the probability that the model gave to a token, in bits. Leaves out computing it (look.py).
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from llmc_jax.base.streams import escaped
from llmc_jax.base.text import table
from llmc_jax.data.tokenizers import Tokenizer, printable
from llmc_jax.generate.look import Seen
from llmc_jax.generate.text import TextStream

# Up to so many bits: the colour, of those that every terminal has and its user may have chosen. None is both red and
# green; what surprises most is bold too.
LEVELS = ((1.0, ""), (3.0, "36"), (6.0, "33"), (10.0, "35"), (math.inf, "1;31"))


def surprise_bits(seen: Seen) -> float:
    """Return the surprise of a token in bits."""
    return _bits(seen.logprob)


def takes_colors(file: TextIO) -> bool:
    """Return whether colours may be written: to a terminal that knows them, unless NO_COLOR is set (no-color.org)."""
    return file.isatty() and os.environ.get("TERM", "") != "dumb" and not os.environ.get("NO_COLOR")


def visible(piece: bytes) -> str:
    """Return the bytes of a token so that all of them can be seen, in quotes; nothing in it moves a terminal's cursor.

    Bytes that make no character are escaped, as in Python.
    """
    text = piece.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return f'"{escaped(text)}"'


def label(tokenizer: Tokenizer | None, token: int) -> str:
    """Return what stands for a token in a table: its bytes to be seen, or its id where no tokenizer has it."""
    return str(token) if tokenizer is None or token >= tokenizer.vocab_size else visible(tokenizer.piece(token))


def colored_text(tokenizer: Tokenizer | None, seen: Sequence[Seen], color: bool) -> str:
    """Return the text of some tokens, as `sample_text` shows it, each token in the colour of its surprise.

    A character of several tokens has the colour of the most surprising one. color: False for a file, or a terminal
    without colours.
    """
    return "".join(_painted(text, bits) if color else text for text, bits in _pieces(tokenizer, seen))


def legend(color: bool) -> str:
    """Return a line that says which surprise has which colour; nothing without colours."""
    if not color:
        return ""
    bounds = itertools.pairwise([0.0, *(bound for bound, _ in LEVELS)])
    words = (_painted(f"{low:g}+" if high == math.inf else f"{low:g}-{high:g}", low) for low, high in bounds)
    return "surprise in bits: " + "  ".join(words)


def probability_table(tokenizer: Tokenizer | None, seen: Sequence[Seen], width: int | None = None) -> str:
    """Return a line for each token: position, token, probability, rank (0: the likeliest), surprise and entropy in
    bits, and the likeliest tokens there, each in a column. width: as for `text.table`; where it is small, the last of
    these go.
    """
    rows = [
        [
            str(position), label(tokenizer, each.token), _percent(each.logprob), str(each.rank),
            f"{surprise_bits(each):.2f}", f"{each.entropy / math.log(2):.2f}",
            *(f"{label(tokenizer, token)} {_percent(logprob)}" for token, logprob in each.candidates),
        ]
        for position, each in enumerate(seen)
    ]  # fmt: skip
    ranks = [f"rank {rank}" for rank in range(max((len(each.candidates) for each in seen), default=0))]
    headings = ("position", "token", "probability", "rank", "bits", "entropy", *ranks)
    return table(headings, rows, left=("token",), optional=ranks[::-1], width=width)


def plain_data(tokenizer: Tokenizer | None, seen: Sequence[Seen]) -> list[dict[str, Any]]:
    """Return the same as `probability_table` as plain data for JSON (`files.plain` where a number may not be finite).

    text is null without a tokenizer. logprob is a natural logarithm.
    """
    return [
        {
            "position": position,
            "token": each.token,
            "text": _text(tokenizer, each.token),
            "logprob": each.logprob,
            "rank": each.rank,
            "surprise_bits": surprise_bits(each),
            "entropy_bits": each.entropy / math.log(2),
            "candidates": [
                {"token": token, "text": _text(tokenizer, token), "logprob": logprob}
                for token, logprob in each.candidates
            ],
        }
        for position, each in enumerate(seen)
    ]


def _text(tokenizer: Tokenizer | None, token: int) -> str | None:
    known = tokenizer is not None and token < tokenizer.vocab_size
    return None if tokenizer is None or not known else tokenizer.piece(token).decode(errors="backslashreplace")


def _bits(logprob: float) -> float:
    return -logprob / math.log(2) + 0.0  # not -0.0


def _percent(logprob: float) -> str:
    percent = 100 * math.exp(logprob)
    return "<0.01%" if percent < 0.01 else f"{percent:.2f}%"


def _pieces(tokenizer: Tokenizer | None, seen: Sequence[Seen]) -> Iterator[tuple[str, float]]:
    """Yield the text in stretches of whole characters, and the greatest surprise of the tokens in each."""
    stream, bits = TextStream(tokenizer), 0.0
    for index, each in enumerate(seen, start=1):
        text = stream.add(each.token) + (stream.finish() if index == len(seen) else "")
        bits = max(surprise_bits(each), bits)
        if text:
            yield printable(text), bits
            bits = 0.0


def _painted(text: str, bits: float) -> str:
    """Return text in the colour of a surprise, line by line: a pager forgets a colour at the end of a line."""
    code = next((code for bound, code in LEVELS if bits < bound), LEVELS[-1][1])
    if not code:
        return text
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))
