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
from llmc_jax.generate import engine
from llmc_jax.generate.checked import TOLERANCES, error_of
from llmc_jax.generate.engine import repeated
from llmc_jax.generate.sampling import Draws, Sampling, numbers_of, steps_of
from llmc_jax.kernels import decode
from llmc_jax.kernels.choice import decoding_refusal
from llmc_jax.machine.gpus import this_machine
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.gpt2.decode import cache_bytes, prefill
from llmc_jax.models.gpt2.decode import decode as decode_by_xla
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.layout import num_parameters
from llmc_jax.models.packed import Packed
from llmc_jax.models.program import separated
from llmc_jax.training.state import DTYPES
from llmc_jax.trials.children import Figures

TURNS = 4  # of each way
TOLERANCE = 1e-5  # in float32, relative to the largest logit


def measure(what: str, model: str, B: int, dtype: str, *, T: int = 1024, tokens: int = 128) -> Figures:
    """what: 'times' of B texts that reach position T, 'numerics' of one text, 'kernels': ours beside XLA's."""
    config = parse_descriptor(model)
    precision = "highest" if dtype == "fp32" else None  # else a float32 product is made in TF32
    with jax.default_matmul_precision(precision):
        if what == "kernels":
            return kernels(config, B, dtype)
        run = numerics if what == "numerics" else times
        return run(config, weights_of(config, dtype), B, T, min(tokens, T // 2))


def packed(config: ModelConfig, dtype: str) -> Packed:
    """The same weights as the kernels take them; simulated where there is no GPU."""
    target = this_machine().target
    rows = random_values(config)[: num_parameters(config)].astype(DTYPES[dtype]).reshape(-1, config.channels)
    return Packed(rows, config, target or "sm_90", interpret=target is None)


def kernels(config: ModelConfig, B: int, dtype: str) -> Figures:
    """How far logits by our kernels are from XLA's, as `generate --kernels pallas` asks before it begins."""
    error, most = error_of(config, packed(config, dtype), dtype, B), TOLERANCES[dtype]
    return {"error": error, "verdict": "right" if error <= most else f"WRONG: {error:.1e}, above {most:.0e}"}


def weights_of(config: ModelConfig, dtype: str) -> Params:
    """Random weights as generate/model.py has them: of a tensor with a layer axis an array for each layer."""
    weights: Params = separated(random_values(config).astype(DTYPES[dtype]), config)
    return weights


def programs(config: ModelConfig, T: int) -> tuple[Any, Any]:
    """Prefill and decode, compiled when they are first called."""
    begin = jax.jit(partial(prefill, size=T, config=config, execution=PLAIN))
    step = jax.jit(partial(decode_by_xla, config=config), donate_argnames="cache")
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
    """Milliseconds of a position, tokens per second of all texts, GB/s of what must be read; by kernels in turns."""
    begin, _ = programs(config, T)
    element, sampling = weights.wte.dtype.itemsize, Sampling(top_k=50)
    name = next(name for name, dtype in DTYPES.items() if dtype == weights.wte.dtype)
    text = np.random.default_rng(1).integers(0, config.vocab_size, (1, T)).astype(np.int32)
    _, cache = repeated(begin(weights, text, np.int32(T - tokens)), B)
    ways = {"": (weights, cache)}
    if this_machine().target and not decoding_refusal(config):
        ways["pallas "] = packed(config, name), decode.stacked(cache)
    numbers, samples = jax.device_put((numbers_of(sampling), np.arange(B, dtype=np.int32)))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    drawn = jnp.zeros(B, jnp.int32)
    for turn in range(TURNS):
        first = T - tokens + turn * (tokens // TURNS)
        for way, (own, cache) in ways.items():
            state = engine.State(Draws(drawn, drawn, drawn, drawn), cache, jnp.int32(first), jnp.int32(first))
            found: list[float] = []
            for _ in range(tokens // TURNS):
                start, before = time.perf_counter(), state.draws.tokens
                coins = engine.Coins(samples, state.position, numbers)
                state = engine.in_one_program(
                    own, before, state.place, state.cache, coins, config, steps_of(sampling, 0)
                )
                jax.device_get(before)  # as generate/engine.py: read when the next one is under way
                found.append(time.perf_counter() - start)
            seconds[way] += found[2:]
            ways[way] = own, state.cache
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) - weights.wpe.nbytes
    read += cache_bytes(config, B, T - tokens // 2, element)
    figures: Figures = {}
    for way, all_of_them in seconds.items():
        median = statistics.median(all_of_them)
        figures |= {f"{way}ms": 1e3 * median, f"{way}tok/s": B / median, f"{way}GB/s": read / median / 1e9}
    return figures
