"""Sampling: llm.c's function written out once more with scalars, its random stream, and what causality promises."""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.base.rng import random_f32
from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.generate.llmc import SEED, generate, sample_mult, sample_softmax
from llmc_jax.models.gpt2.model import forward
from llmc_jax.models.layout import padded, tensor_specs, views

Pick = Callable[[np.ndarray, float], int]
# The first numbers of llm.c's random_f32 from the state 1337
COINS = (0.23031723, 0.19051826, 0.31086516, 0.90265948, 0.68491787, 0.30783039)


def scalar_sample_softmax(logits: np.ndarray, coin: float) -> int:
    """llm.c's sample_softmax line by line: norm is a double, coin and cdf are floats, expf gives a float."""
    exps = [np.float32(math.exp(float(logit))) for logit in logits]
    norm = 0.0
    for value in exps:
        norm += float(value)
    scaled = np.float32(float(np.float32(coin)) * norm)
    cdf = np.float32(0.0)
    for index, value in enumerate(exps):
        cdf = np.float32(cdf + value)
        if scaled < cdf:
            return index
    return len(logits) - 1


def scalar_sample_mult(logits: np.ndarray, coin: float) -> int:
    """train_gpt2.c's softmax_forward and sample_mult line by line: all are floats."""
    exps = [np.float32(math.exp(float(logit))) for logit in logits - max(logits)]
    total = np.float32(0.0)
    for value in exps:
        total += value
    cdf = np.float32(0.0)
    for index, value in enumerate(exps):
        cdf += value / total
        if np.float32(coin) < cdf:
            return index
    return len(logits) - 1


@pytest.mark.parametrize(
    ("sample", "scalar"), [(sample_softmax, scalar_sample_softmax), (sample_mult, scalar_sample_mult)]
)
@pytest.mark.parametrize(("V", "scale"), [(2, 1.0), (257, 1.0), (257, 8.0), (5000, 3.0)])
def test_picks_what_llmc_picks(sample: Pick, scalar: Pick, V: int, scale: float) -> None:
    rng = np.random.default_rng(V)
    picks = []
    for coin in [0.0, 0.5, 1 - 2**-24, *rng.integers(0, 1 << 24, 40) / 2**24]:
        logits = (scale * rng.standard_normal(V)).astype(np.float32)
        picks.append(sample(logits, float(coin)))
        assert picks[-1] == scalar(logits, float(coin))
    assert len(set(picks)) > min(V, 20) // 2  # the coins do reach many ids


@pytest.mark.parametrize("shift", [-1000.0, -200.0, -72.0, 72.0, 88.0, 200.0, 1000.0])
def test_logits_beyond_the_range_of_exp_are_sampled_all_the_same(shift: float) -> None:
    probabilities = np.array([0.125, 0.25, 0.5, 0.125])
    logits = (np.log(probabilities) + shift).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picks = [sample_softmax(logits, coin) for coin in (0.0, 0.1, 0.2, 0.35, 0.4, 0.8, 0.9, 0.999)]
    assert picks == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_diverged_model_still_gives_an_id() -> None:
    assert sample_softmax(np.full(5, np.nan, np.float32), 0.5) in range(5)
    assert sample_mult(np.full(5, np.nan, np.float32), 0.5) in range(5)


# ---- generating


class Small(NamedTuple):
    """A random model that is far from uniform, so that a wrong position or token shows."""

    config: ModelConfig
    params: jax.Array


@pytest.fixture(scope="module")
def small() -> Small:
    config = parse_descriptor("L2-NH2-C16-V40-T24")
    rng = np.random.default_rng(7)
    specs = tensor_specs(config)
    flat = 0.4 * rng.standard_normal(specs[-1].offset + specs[-1].size).astype(np.float32)
    for spec in specs:
        if spec.name in ("ln1w", "ln2w", "lnfw"):
            flat[spec.offset :][: spec.size] = 1
    return Small(config, jnp.array(padded(flat, config)))


def ids(small: Small, num_tokens: int) -> list[int]:
    return list(generate(small.params, small.config, num_tokens, 39))


def test_every_token_comes_from_the_whole_model_on_the_tokens_before_it(small: Small) -> None:
    """As llm.c computes them: all of the text again for each token, filled up behind it."""
    whole = jax.jit(lambda tokens: forward(views(small.params, small.config), tokens, small.config)[0])
    tokens, state, coins = [39], SEED, []
    while len(tokens) < small.config.max_seq_len:
        row = tokens + [39] * (small.config.max_seq_len - len(tokens))
        logits = np.asarray(whole(jnp.array([row])))[0, len(tokens) - 1]  # (Vp,)
        coin, state = random_f32(state)
        tokens.append(scalar_sample_softmax(logits[: small.config.vocab_size], coin))
        coins.append(coin)
    assert ids(small, len(tokens)) == tokens[1:]
    assert np.array_equal(np.float32(coins[: len(COINS)]), np.float32(COINS)) and len(set(tokens)) > 3


def test_a_shorter_text_is_the_beginning_of_a_longer_one(small: Small) -> None:
    assert ids(small, 10) == ids(small, 24)[:9]
    assert ids(small, 1) == []  # the end of text alone
