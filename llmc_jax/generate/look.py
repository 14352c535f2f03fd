"""A model's view of a given text: the probability, rank and entropy of each token.

The whole text goes through the model at once, without a cache; a text that is longer than the model's T positions in
windows that overlap by half. Leaves out the computing (scorer.py) and the weights of attention (heads.py).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.text import table
from llmc_jax.data.tokenizers import Tokenizer
from llmc_jax.generate.engine import check_ids, kept_after_drop
from llmc_jax.generate.model import Model
from llmc_jax.generate.scorer import Row, ScoreOptions, cut, score, scorer_of
from llmc_jax.generate.text import piece

LOGIT_BYTES = 16 << 20  # at a time: few rows beside those asked for, and of many a CPU's top_k takes ten times as long


class Seen(NamedTuple):
    """What the model thought of one token of a text, given those before it. All of the model itself: temperature 1."""

    token: int
    logprob: float  # natural logarithm
    rank: int  # 0: the likeliest; of equal ones the smaller id comes first
    entropy: float  # of the model's distribution at this place, in nats
    candidates: tuple[tuple[int, float], ...]  # (id, logprob) of the likeliest tokens, best first


def look(model: Model, ids: Sequence[int], candidates: int = 5, before: int | None = None) -> list[Seen]:
    """Return what the model thinks of each token given those before it; the first one given the token `before`.

    before: None: the end-of-text token.
    Of a text longer than the model's T positions, the oldest half is dropped whenever T are full, as it is when text is
    generated: every token but the first T has at least T/2 before it. candidates: how many of the likeliest tokens to
    tell at each place.
    Raises InputError for an id that the model does not have.
    """
    V, T = model.config.vocab_size, model.config.max_seq_len
    asked = ScoreOptions(rank=True, candidates=max(0, min(candidates, V)), logit_bytes=LOGIT_BYTES)
    first = check_ids(model.config, [model.end_of_text if before is None else before])
    text = np.concatenate([first, check_ids(model.config, ids)])
    rows = [Row(text[start:end], new) for start, new, end in cut(len(text), T, T + 1 - kept_after_drop(model.config))]
    seen: list[Seen] = []
    for found in score(scorer_of(model, tokens_per_batch=1), rows, asked):  # a row at a time, so in order
        targets = rows[found.row].ids[rows[found.row].first :]
        columns: Any = targets, -np.maximum(found.losses, 0), found.rank, found.entropy, found.ids, found.logprobs
        for token, logprob, rank, entropy, best, theirs in zip(*(each.tolist() for each in columns), strict=True):
            seen.append(Seen(token, logprob, rank, entropy, tuple(zip(best, theirs, strict=True))))
    return seen


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
            f"{0.0 - each.logprob / math.log(2):.2f}", f"{each.entropy / math.log(2):.2f}",
            *(f"{label(tokenizer, token)} {_percent(logprob)}" for token, logprob in each.candidates),
        ]
        for position, each in enumerate(seen)
    ]  # fmt: skip
    ranks = [f"rank {rank}" for rank in range(max((len(each.candidates) for each in seen), default=0))]
    headings = ("position", "token", "probability", "rank", "bits", "entropy", *ranks)
    return table(headings, rows, left=("token",), optional=ranks[::-1], width=width)


def _percent(logprob: float) -> str:
    percent = 100 * math.exp(logprob)
    return "<0.01%" if percent < 0.01 else f"{percent:.2f}%"
