"""What a model thinks of a given text: the probability, rank and entropy of each token, and the text's perplexity.

The whole text goes through the model at once, without a cache; a text that is longer than the model's T positions in
windows that overlap by half. Leaves out the computing (scorer.py), how it is shown (probabilities.py) and the weights
of attention (heads.py).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import ModelConfig
from llmc_jax.data.tokenizers import Tokenizer
from llmc_jax.generate.engine import kept_after_drop
from llmc_jax.generate.model import Model
from llmc_jax.generate.scorer import Row, ScoreOptions, cut, score, scorer_of

LOGIT_BYTES = 16 << 20  # at a time: few rows beside those asked for, and of many a CPU's top_k takes ten times as long


class Seen(NamedTuple):
    """What the model thought of one token of a text, given those before it. All of the model itself: temperature 1."""

    token: int
    logprob: float  # natural logarithm
    rank: int  # 0: the likeliest; of equal ones the smaller id comes first
    entropy: float  # of the model's distribution at this place, in nats
    candidates: tuple[tuple[int, float], ...]  # (id, logprob) of the likeliest tokens, best first


class Perplexity(NamedTuple):
    """How well a model guesses a text."""

    tokens: int
    loss: float  # nats per token
    perplexity: float  # e to the power of the loss
    bits_per_byte: float | None  # comparable between tokenizers; None where the number of bytes is not known


def look(model: Model, ids: Sequence[int], candidates: int = 5, before: int | None = None) -> list[Seen]:
    """Return what the model thinks of each token given those before it; the first one given the token `before`.

    before: None: the end-of-text token.
    Of a text longer than the model's T positions, the oldest half is dropped whenever T are full, as it is when text is
    generated: every token but the first T has at least T/2 before it. candidates: how many of the likeliest tokens to
    tell at each place.
    Raises InputError for an id that the model does not have.
    """
    asked = ScoreOptions(
        rank=True, candidates=max(0, min(candidates, model.config.vocab_size)), logit_bytes=LOGIT_BYTES
    )
    seen: list[Seen] = []
    for targets, found in _scored(model, ids, asked, before):
        both = zip(found.ids.tolist(), found.logprobs.tolist(), strict=True)
        best = [tuple(zip(*each, strict=True)) for each in both]
        columns = targets, -np.maximum(found.losses, 0), found.rank, found.entropy
        seen += map(Seen, *(each.tolist() for each in columns), best)
    return seen


def perplexity(model: Model, ids: Sequence[int], num_bytes: int | None = None) -> Perplexity:
    """Return the mean loss of a text's tokens, each given those before it as for `look`, and what follows from it.

    num_bytes: of the text; None: those that the tokens stand for, where the model has a tokenizer.
    Raises InputError for no token, or an id that the model does not have.
    """
    if not len(ids):
        raise InputError("--perplexity: the text is empty; give one of at least one token")
    check_ids(model.config, ids)
    if num_bytes is None and model.tokenizer is not None:
        num_bytes = text_bytes(model.tokenizer, ids)
    scored = _scored(model, ids, ScoreOptions(logit_bytes=LOGIT_BYTES))
    total = math.fsum(max(loss, 0.0) for _, found in scored for loss in found.losses.tolist())
    loss = total / len(ids)
    with np.errstate(over="ignore"):
        return Perplexity(
            tokens=len(ids),
            loss=loss,
            perplexity=float(np.exp(loss)),
            bits_per_byte=total / math.log(2) / num_bytes if num_bytes else None,
        )


def text_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Return how many bytes the ids stand for; an end of text is none of the text."""
    return sum(len(tokenizer.piece(token)) for token in ids if token != tokenizer.eot)


def check_ids(config: ModelConfig, ids: Sequence[int]) -> np.ndarray:
    """Return the ids (n,) int32; raise InputError for one that the model does not have, or JAX would take another."""
    wide = np.asarray(ids, np.int64)
    foreign = np.flatnonzero((wide < 0) | (wide >= config.vocab_size))
    if foreign.size:
        at = int(foreign[0])
        raise InputError(
            f"token {at} has id {wide[at]}; the model has ids 0 to {config.vocab_size - 1}: was the text made into "
            "tokens by another tokenizer?"
        )
    return wide.astype(np.int32)


def _scored(
    model: Model, ids: Sequence[int], asked: ScoreOptions, before: int | None = None
) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield the tokens (n,) of one window after the other, and what the model thinks of them."""
    T = model.config.max_seq_len
    first = check_ids(model.config, [model.end_of_text if before is None else before])
    text = np.concatenate([first, check_ids(model.config, ids)])
    rows = [Row(text[start:end], new) for start, new, end in cut(len(text), T, T + 1 - kept_after_drop(model.config))]
    for found in score(scorer_of(model, tokens_per_batch=1), rows, asked):  # a row at a time, so in order
        row = rows[found.row]
        yield row.ids[row.first :], found
