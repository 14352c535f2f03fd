"""What a model thinks of a given text: the probability, rank and entropy of each token, and the text's perplexity.

The whole text goes through the model at once, without a cache; a text that is longer than the model's T positions in
windows that overlap by half. Logits exist for a few rows at a time. Leaves out how it is shown (probabilities.py) and
the weights of attention (heads.py).
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import ModelConfig
from llmc_jax.data.tokenizers import Tokenizer
from llmc_jax.generate.engine import first_seen, prompt_size
from llmc_jax.generate.model import Model
from llmc_jax.models.gpt2.model import Execution, forward_stream
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.ops.classifier import classifier_forward
from llmc_jax.ops.linear import linear_forward

LOGIT_BYTES = 32 << 20  # of float32 logits that exist at a time


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


class Window(NamedTuple):
    """A stretch of positions that the model reads at once; what it says is taken from `first` on."""

    start: int
    first: int
    end: int


class Rows(NamedTuple):
    """What is kept of the logits of n positions; None: was not asked for."""

    logprob: Any  # (n,) float32 of the target
    rank: Any = None  # (n,) int32 of the target
    entropy: Any = None  # (n,) float32
    ids: Any = None  # (n, candidates) int32
    logprobs: Any = None  # (n, candidates) float32


def look(model: Model, ids: Sequence[int], candidates: int = 5, before: int | None = None) -> list[Seen]:
    """Return what the model thinks of each token given those before it; the first one given the token `before`.

    before: None: the end-of-text token.
    Of a text longer than the model's T positions, the oldest half is dropped whenever T are full, as it is when text is
    generated: every token but the first T has at least T/2 before it. candidates: how many of the likeliest tokens to
    tell at each place.
    Raises InputError for an id that the model does not have.
    """
    candidates = max(0, min(candidates, model.config.vocab_size))
    seen: list[Seen] = []
    for targets, rows in _rows(model, ids, candidates, before):
        ids_of, logprobs_of = rows.ids.tolist(), rows.logprobs.tolist()
        best = [tuple(zip(*each, strict=True)) for each in zip(ids_of, logprobs_of, strict=True)]
        columns = targets.tolist(), rows.logprob.tolist(), rows.rank.tolist(), rows.entropy.tolist(), best
        seen += map(Seen, *columns)
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
    total = -math.fsum(value for _, rows in _rows(model, ids, None) for value in rows.logprob.tolist())
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


def windows(length: int, config: ModelConfig) -> Iterator[Window]:
    """Yield windows over `length` positions that a model reads one after the other: those of `engine.generate`."""
    start = done = 0
    while done < length:
        end = min(start + config.max_seq_len, length)
        yield Window(start, done, end)
        start, done = first_seen(end + 1, config), end


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


def _rows(
    model: Model, ids: Sequence[int], candidates: int | None, before: int | None = None
) -> Iterator[tuple[np.ndarray, Rows]]:
    """Yield the tokens (n,) of one window after the other, and what is kept of their logits, on the host."""
    targets = check_ids(model.config, ids)
    first = check_ids(model.config, [model.end_of_text if before is None else before])
    inputs = np.concatenate([first, targets[:-1]])
    for window in windows(len(targets), model.config):
        length = window.end - window.start
        padding = (0, prompt_size(model.config, length) - length)  # behind the text: no position sees what follows it
        arrays = (np.pad(each[window.start : window.end], padding) for each in (inputs, targets))
        new = slice(window.first - window.start, length)
        rows = rows_of_text(
            model.weights, *arrays, new.start, new.stop, config=model.config, execution=model.execution,
            candidates=candidates,
        )  # fmt: skip
        yield targets[window.first : window.end], Rows(*(x if x is None else np.asarray(x)[new] for x in rows))


@partial(jax.jit, static_argnames=("config", "execution", "candidates"))
def rows_of_text(
    weights: Params,
    tokens: jax.Array,
    targets: jax.Array,
    first: jax.Array,
    end: jax.Array,
    *,
    config: ModelConfig,
    execution: Execution,
    candidates: int | None,
) -> Rows:
    """Compute what is kept of the logits of tokens (n,), from row `first` to row `end`; other rows mean nothing.

    targets (n,) int32: the tokens that follow. candidates: how many; None: nothing but the logprob.
    The loop over chunks of rows begins and ends where the rows do, so padding costs no logits.
    """
    lnf, _ = forward_stream(weights, tokens[None], config, execution)
    lnf = lnf[0]  # (n, C)
    n = lnf.shape[0]
    size = min(n, max(1, LOGIT_BYTES // (4 * config.padded_vocab_size)))

    def of_chunk(start: jax.Array) -> Rows:
        part, aims = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (lnf, targets))
        logits = linear_forward(part, weights.wte, None)  # (size, Vp) rounded to the model's dtype, as in training
        return rows_of_logits(logits, aims, config.vocab_size, candidates)

    def step(chunk: jax.Array, rows: Rows) -> Rows:
        start = first + chunk * size  # near the end JAX takes n - size: the last chunk computes some rows again
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, 0), rows, of_chunk(start))

    empty = jax.tree.map(lambda x: jnp.zeros((n, *x.shape[1:]), x.dtype), jax.eval_shape(of_chunk, first))
    return jax.lax.fori_loop(0, -(-(end - first) // size), step, empty)


def rows_of_logits(logits: jax.Array, targets: jax.Array, vocab_size: int, candidates: int | None) -> Rows:
    """Return what is kept of logits (n, Vp), in at least float32; columns from vocab_size on take no part."""
    losses, logsumexp = classifier_forward(logits, targets, vocab_size)
    logprob = -jnp.maximum(losses, 0)  # rounding may make a certainty a little more than that
    if candidates is None:
        return Rows(logprob)
    wide = logits.astype(losses.dtype)  # (n, Vp)
    column = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 1)
    real, aim = column < vocab_size, targets[:, None]
    own = jnp.take_along_axis(wide, aim, axis=1)  # (n, 1)
    before = real & ((wide > own) | ((wide == own) & (column < aim)))
    surprise = jnp.where(real, logsumexp[:, None] - wide, 0)  # (n, Vp)
    entropy = jnp.sum(jnp.where(real, jnp.exp(-surprise) * surprise, 0), axis=1)
    best, ids = jax.lax.top_k(jnp.where(real, wide, -jnp.inf), candidates)  # of equal ones the first
    logprobs = jnp.minimum(best - logsumexp[:, None], 0)
    return Rows(logprob, jnp.sum(before, axis=1, dtype=jnp.int32), entropy, ids.astype(jnp.int32), logprobs)
