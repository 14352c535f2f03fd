"""From logits to the next token, on the device.

In this order, each step on what the one before has left:

    temperature   logits / temperature; 0: the largest is taken, and nothing below counts
    top-k         the k largest (Fan et al., 2018)
    top-p         the fewest of the likeliest that have p of the probability (Holtzman et al., 2020)
    draw          one of what is left, by its share: the first whose cumulative share exceeds a number in [0, 1)

The number is a function of the seed, the sample and the position in the text, and of nothing else: not of how many
samples are drawn together. Where tokens are equally likely at the edge of top-k or top-p, all of them are kept.
Leaves out llm.c's sampler (llmc.py).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.errors import InputError


class Sampling(NamedTuple):
    """How the next token is drawn. The defaults draw from the model's own distribution."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all
    seed: int = 1337


FLOAT32 = np.finfo(np.float32)
BITS = 30  # of a weight, a float32 from 0 to 1, those that may be set
RANGES = {
    "temperature": ("a number from 0 on", lambda value: 0 <= value < math.inf),
    "top_k": ("0 (all) or more", lambda value: value >= 0),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "seed": ("a whole number from 0 to 2^64 - 1", lambda value: 0 <= value < 1 << 64),
}


def check(sampling: Sampling) -> None:
    """Raise InputError for a value that cannot be, named as its flag is."""
    for name, value in sampling._asdict().items():
        words, allowed = RANGES[name]
        if not allowed(value):
            raise InputError(f"--{name.replace('_', '-')} {str(value)[:40]}: it must be {words}")


class Numbers(NamedTuple):
    """What of the sampling is traced: another value needs no new compilation."""

    temperature: Any
    top_k: Any
    top_p: Any
    key: Any  # (2,) uint32, of threefry2x32


class Steps(NamedTuple):
    """Which steps there are. Static."""

    greedy: bool
    top_k: bool
    top_p: bool
    candidates: int  # of the likeliest tokens, how many are reported
    ids: int | None = None  # only the first so many are drawn and reported: the others are padding; None: all


class Draws(NamedTuple):
    """What was drawn for B samples. Logarithms are natural, of the model's own distribution: nothing filtered."""

    tokens: jax.Array  # (B,) int32
    logprobs: jax.Array  # (B,) float32
    candidates: jax.Array  # (B, K) int32, the likeliest first
    candidate_logprobs: jax.Array  # (B, K) float32


def numbers_of(sampling: Sampling) -> Numbers:
    """Return the traced numbers, each as the nearest that float32 holds with all its digits, above 0."""
    numbers = sampling._replace(temperature=sampling.temperature or 1)._asdict()
    key = np.array([sampling.seed >> 32, sampling.seed & 0xFFFFFFFF], np.uint32)
    return Numbers(**{name: _float32(numbers[name]) for name in Numbers._fields if name != "key"}, key=key)


def _float32(value: float) -> np.float32:
    return np.float32(min(max(value, float(FLOAT32.tiny)), float(FLOAT32.max)))


def steps_of(sampling: Sampling, candidates: int, ids: int | None = None) -> Steps:
    """Return which steps a sampling takes. ids: as `Steps` has it."""
    return Steps(sampling.temperature == 0, sampling.top_k > 0, sampling.top_p < 1, candidates, ids)


@partial(jax.jit, static_argnames=("steps",))
def draw(logits: jax.Array, samples: jax.Array, position: jax.Array, numbers: Numbers, steps: Steps) -> Draws:
    """Draw the token at a position of each of B samples.

    logits (B, V) in float32; samples (B,) int32: their numbers; position: a scalar.
    """
    own = jax.nn.log_softmax(logits, axis=-1)  # (B, V)
    tokens = _drawn(logits[:, : steps.ids], samples, position, numbers, steps)  # (B,)
    rows = jnp.arange(logits.shape[0])
    best = jax.lax.top_k(own[:, : steps.ids], steps.candidates)
    return Draws(tokens, own[rows, tokens], best[1].astype(jnp.int32), best[0])


def _drawn(logits: jax.Array, samples: jax.Array, position: jax.Array, numbers: Numbers, steps: Steps) -> jax.Array:
    if steps.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    weights = filtered(logits, numbers, steps)  # (B, V)
    coins = jax.vmap(coin, in_axes=(None, 0, None))(numbers.key, samples, position)  # (B,)
    cumulative = jnp.cumsum(weights, axis=-1)  # (B, V)
    # What XLA sums side by side need not grow everywhere, so a token without weight is ruled out by itself.
    past = (cumulative > (coins * cumulative[:, -1])[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(past.any(axis=-1), jnp.argmax(past, axis=-1), last).astype(jnp.int32)


def coin(key: jax.Array, sample: jax.Array, position: jax.Array) -> jax.Array:
    """Return a number, uniform in [0, 1) with 24 bits, that belongs to a seed, a sample and a position."""
    of_seed = jax.random.wrap_key_data(key, impl="threefry2x32")
    bits = jax.random.bits(jax.random.fold_in(jax.random.fold_in(of_seed, sample), position), dtype=jnp.uint32)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def filtered(logits: jax.Array, numbers: Numbers, steps: Steps) -> jax.Array:
    """Return weights (B, V) in proportion to the probabilities, 0 where top-k or top-p leave a token out.

    The largest logit is subtracted before the temperature divides: the likeliest token has 1 at any temperature.
    """
    weights = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / numbers.temperature)
    if steps.top_k:
        weights = _at_least(weights, jnp.ones_like(weights), numbers.top_k)
    if steps.top_p:
        weights = _at_least(weights, weights, numbers.top_p * jnp.sum(weights, axis=-1, keepdims=True))
    return weights


def _at_least(weights: jax.Array, counts: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return the weights (B, V) with the smallest set to 0, such that the counts of the others still reach `wanted`.

    Where all counts together do not, all are kept. A sort of V would take longer than the search.
    """
    of_platform = {"cpu": partial(limit_of, at_once=1), "default": partial(limit_of, at_once=5)}
    return jnp.where(weights >= jax.lax.platform_dependent(weights, counts, wanted, **of_platform), weights, 0)


def limit_of(weights: jax.Array, counts: jax.Array, wanted: jax.Array, at_once: int) -> jax.Array:
    """Return the largest number (B, 1) such that the counts of the weights from it on reach `wanted`.

    The bits of a float that is not negative are ordered as it is, so the limit is found from its highest bit on, so
    many bits at once: one by 30 sums over V in a loop; five by 31 sums side by side, six times, and without a loop,
    whose turns the host of a GPU would start.
    """
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    tried, turns = jnp.arange(1, 1 << at_once, dtype=jnp.int32)[:, None], BITS // at_once

    def narrow(turn: jax.Array, limit: jax.Array) -> jax.Array:
        shift = BITS - at_once * (turn + 1)
        higher = limit[:, None] | jnp.left_shift(tried, shift)  # (B, tries, 1)
        sums = jnp.sum(jnp.where(bits[:, None] >= higher, counts[:, None], 0), axis=-1)  # (B, tries)
        reached = jnp.sum(sums >= wanted, axis=-1, keepdims=True, dtype=jnp.int32)
        return limit | jnp.left_shift(reached, shift)

    unroll = turns if at_once > 1 else 1
    found = jax.lax.fori_loop(0, turns, narrow, jnp.zeros((len(bits), 1), jnp.int32), unroll=unroll)
    return jax.lax.bitcast_convert_type(found, weights.dtype)
