"""Sampling as llm.c does it: its random stream, from the end-of-text token, temperature 1, nothing filtered.

llm.c computes the whole text again for each token, and here keys and values are kept. The logits differ by roundings,
so a token differs where a draw falls between two such. Where a sample begins in the stream is for the caller to say
(run/due.py).

Leaves out prompts and other ways to draw (engine.py).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.base.rng import random_f32
from llmc_jax.config.model import ModelShape
from llmc_jax.machine import compiling
from llmc_jax.models.program import decoder_of, head_of, separated

SEED = 1337  # the state that llm.c's stream begins with
LARGE = 70.0  # exp(70) times any vocabulary is still a float32, and exp(-70) still one with all its digits


def sample_softmax(logits: np.ndarray, coin: float) -> int:
    """Return the id that a coin in [0, 1) picks from softmax(logits), (V,) float32: the first whose cdf exceeds it.

    Source: llm.c llmc/sampler.h, `sample_softmax`, in its own arithmetic: the sum in float64, the running sum that the
    coin is compared with in float32. llm.c takes exp of the logits as they are, which leaves the range of float32
    where they are large; there, and nowhere else, the largest is subtracted first, so that the picks agree.
    """
    largest = np.max(logits)
    weights = np.exp(logits - largest if abs(largest) > LARGE else logits, dtype=np.float32)  # (V,)
    threshold = np.float32(coin * float(np.cumsum(weights, dtype=np.float64)[-1]))
    cdf = np.cumsum(weights, dtype=np.float32)  # (V,) not yet divided by the sum, which the threshold contains
    return min(int(np.searchsorted(cdf, threshold, side="right")), logits.size - 1)


def sample_mult(logits: np.ndarray, coin: float) -> int:
    """Return the id that a coin in [0, 1) picks from softmax(logits), (V,) float32: the first whose cdf exceeds it.

    Source: llm.c train_gpt2.c, `softmax_forward` and `sample_mult`: every sum in float32, from the first id on. At
    V=50257 one coin in nine gets another id than from `sample_softmax`.
    """
    weights = np.exp(logits - np.max(logits), dtype=np.float64).astype(np.float32)  # (V,) as exact as C's expf
    cdf = np.cumsum(weights / np.cumsum(weights)[-1])  # (V,)
    return min(int(np.searchsorted(cdf, np.float32(coin), side="right")), logits.size - 1)


@partial(jax.jit, static_argnames="config", donate_argnames=("cache",))
def decoded_logits(
    params: Any, token: jax.Array, position: jax.Array, cache: Any, config: ModelShape
) -> tuple[jax.Array, Any]:
    """Return the logits (V,) in float32 of the token after `token` (1,) at a position, and the cache with it."""
    logits, cache = decoder_of(config).decode(params, token, position, cache, config)
    return logits[0].astype(jnp.float32), cache


def generate(
    weights: Any,
    config: ModelShape,
    num_tokens: int,
    end_of_text: int,
    options: compiling.Settings = (),
    state: int = SEED,
    pick: Callable[[np.ndarray, float], int] = sample_softmax,
    ids: int | None = None,
) -> Iterator[int]:
    """Yield num_tokens - 1 ids, each drawn after the ones before it, the first after end_of_text.

    weights: in the compute dtype, as `separated` gives them, or (flat_size,): then memory is needed for them once more,
    less than the activations of a step. num_tokens: at most maxT; options: of XLA, which
    the programs are compiled with; state: of the random stream, one draw of which each id takes; pick: llm.c's
    `sample_softmax` or `sample_mult`; ids: only the first so many are drawn (None: all V).
    Source: llm.c train_gpt2.cu, `main`, "generating".
    """
    assert num_tokens <= config.max_seq_len
    flat = isinstance(weights, jax.Array)
    params = compiling.call(separated, (weights,), (config,), options) if flat else weights
    cache, token = decoder_of(config).empty(config, 1, num_tokens, head_of(params, config).dtype), end_of_text
    for position in range(num_tokens - 1):
        arrays = params, np.array([token], np.int32), np.int32(position), cache
        logits, cache = compiling.call(decoded_logits, arrays, (config,), options)
        coin, state = random_f32(state)
        token = pick(np.asarray(logits)[:ids], coin)
        yield token
