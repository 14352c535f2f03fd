"""A token of generated text: what it costs with a cache of keys and values, and that it is the whole forward's."""

import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.steps import random_values
from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.generate.engine import repeated
from llmc_jax.generate.sampling import Sampling, draw, numbers_of, steps_of
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.gpt2.decode import cache_bytes, decode, prefill
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.program import separated
from llmc_jax.training.state import DTYPES
from llmc_jax.trials.children import Figures

TOLERANCE = 1e-5  # in float32, relative to the largest logit


def measure(what: str, model: str, B: int, dtype: str, *, T: int = 1024, tokens: int = 128) -> Figures:
    """what: 'times' of B texts that reach position T, or 'numerics' of one text."""
    config = parse_descriptor(model)
    precision = "highest" if what == "numerics" else None  # else a float32 product is made in TF32
    with jax.default_matmul_precision(precision):
        run = numerics if what == "numerics" else times
        return run(config, weights_of(config, dtype), B, T, min(tokens, T // 2))


def weights_of(config: ModelConfig, dtype: str) -> Params:
    """Random weights as generate/model.py has them: of a tensor with a layer axis an array for each layer."""
    weights: Params = separated(random_values(config).astype(DTYPES[dtype]), config)
    return weights


def programs(config: ModelConfig, T: int) -> tuple[Any, Any]:
    """Prefill and decode, compiled when they are first called."""
    begin = jax.jit(partial(prefill, size=T, config=config, execution=PLAIN))
    step = jax.jit(partial(decode, config=config), donate_argnames="cache")
    return begin, step


def numerics(config: ModelConfig, weights: Params, B: int, T: int, tokens: int) -> Figures:
    """The largest difference between decoded logits and those of a prefill of the same text."""
    begin, step = programs(config, T)
    text = np.random.default_rng(1).integers(0, config.vocab_size, (1, T)).astype(np.int32)
    logits, cache = begin(weights, text, np.int32(T - tokens))
    for position in range(T - tokens, T):
        logits, cache = step(weights, text[:, position], np.int32(position), cache=cache)
    expected = np.asarray(begin(weights, text, np.int32(T))[0])
    error = float(np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max())
    wrong = f"WRONG: {error:.1e}, above {TOLERANCE:.0e}"
    return {"error": error, "verdict": "right" if error <= TOLERANCE else wrong}


def times(config: ModelConfig, weights: Params, B: int, T: int, tokens: int) -> Figures:
    """Milliseconds of a position, tokens per second of all texts, GB/s of what must be read."""
    begin, step = programs(config, T)
    numbers, steps = numbers_of(Sampling(top_k=50)), steps_of(Sampling(top_k=50), 0)
    text = np.random.default_rng(1).integers(0, config.vocab_size, (1, T)).astype(np.int32)
    logits, cache = begin(weights, text, np.int32(T - tokens))
    logits, cache = jnp.tile(logits, (B, 1)), repeated(cache, B)
    samples, seconds, start = np.arange(B, dtype=np.int32), [], time.perf_counter()
    drawn = draw(logits, samples, np.int32(0), numbers, steps)
    for position in range(T - tokens, T):
        logits, cache = step(weights, drawn.tokens, np.int32(position), cache=cache)
        after = draw(logits, samples, np.int32(position), numbers, steps)
        jax.device_get(drawn.tokens)  # as generate/engine.py: read when the next one is under way
        drawn, now = after, time.perf_counter()
        seconds.append(now - start)
        start = now
    median = statistics.median(seconds[2:])
    element = weights.wte.dtype.itemsize
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) - weights.wpe.nbytes
    read += cache_bytes(config, B, T - tokens // 2, element)
    return {"ms": 1e3 * median, "tok/s": B / median, "GB/s": read / median / 1e9}
