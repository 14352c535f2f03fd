"""A model's view of a text, shown: a table of its tokens, and plain data.

Surprise is -log2 of the probability that the model gave to a token, in bits. Leaves out computing it (look.py).
"""

import math
from collections.abc import Sequence
from typing import Any

from llmc_jax.base.text import table
from llmc_jax.data.tokenizers import Tokenizer
from llmc_jax.generate.look import Seen
from llmc_jax.generate.text import piece


def surprise_bits(seen: Seen) -> float:
    """Return the surprise of a token in bits."""
    return -seen.logprob / math.log(2) + 0.0  # not -0.0


def label(tokenizer: Tokenizer | None, token: int) -> str:
    """Return what stands for a token in a table: its bytes to be seen, in quotes, or its id without a tokenizer."""
    return str(token) if tokenizer is None else f'"{piece(tokenizer, token)}"'


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
    """Return the same as `probability_table` as plain data for JSON, as the page's server has it."""
    return [
        {
            "position": position,
            "piece": piece(tokenizer, each.token),
            **each._asdict(),
            "candidates": [[token, piece(tokenizer, token), logprob] for token, logprob in each.candidates],
        }
        for position, each in enumerate(seen)
    ]


def _percent(logprob: float) -> str:
    percent = 100 * math.exp(logprob)
    return "<0.01%" if percent < 0.01 else f"{percent:.2f}%"
