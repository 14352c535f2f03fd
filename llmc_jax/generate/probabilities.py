"""A model's view of a text, shown: a table of its tokens, and plain data.

Surprise is -log2 of the probability that the model gave to a token, in bits. Leaves out computing it (look.py).
"""

import math
from collections.abc import Sequence
from typing import Any

from llmc_jax.base.streams import escaped
from llmc_jax.base.text import table
from llmc_jax.data.tokenizers import Tokenizer
from llmc_jax.generate.look import Seen


def surprise_bits(seen: Seen) -> float:
    """Return the surprise of a token in bits."""
    return -seen.logprob / math.log(2) + 0.0  # not -0.0


def visible(piece: bytes) -> str:
    """Return the bytes of a token so that all of them can be seen, in quotes; nothing in it moves a terminal's cursor.

    Bytes that make no character are escaped, as in Python.
    """
    text = piece.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    return f'"{escaped(text)}"'


def label(tokenizer: Tokenizer | None, token: int) -> str:
    """Return what stands for a token in a table: its bytes to be seen, or its id where no tokenizer has it."""
    return str(token) if tokenizer is None or token >= tokenizer.vocab_size else visible(tokenizer.piece(token))


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


def _percent(logprob: float) -> str:
    percent = 100 * math.exp(logprob)
    return "<0.01%" if percent < 0.01 else f"{percent:.2f}%"
