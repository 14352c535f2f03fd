"""Token after token with a cache against the whole forward pass, at every position, for each kind of attention."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.config.model import CAUSAL, RELU, Attention, ModelConfig
from llmc_jax.generate.engine import repeated
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.gpt2.decode import Cache, cache_bytes, decode, empty_cache, prefill
from llmc_jax.models.gpt2.model import forward
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.layout import flat_size, tensor_specs, views

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = ModelConfig(max_seq_len=24, vocab_size=29, padded_vocab_size=128, num_layers=2, num_heads=4, channels=12)
B, P, T = 2, 8, 20  # texts; positions of the prefill's program; length
LENGTH = 5  # of the prompt
BEGIN = 7  # a document, where rows see no other
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def shape(attention: Attention) -> ModelConfig:
    return replace(SIZES, attention=attention)


@cache
def params(dtype: str, config: ModelConfig) -> Params:
    """A random model whose attention is far from uniform, so that a wrong position shows; padding is not zero."""
    rng = np.random.default_rng(3)
    flat = rng.standard_normal(flat_size(config)).astype(np.float32)
    for spec in tensor_specs(config):
        if spec.name in ("ln1w", "ln2w", "lnfw"):
            flat[spec.offset :][: spec.size] = 1
    return views(jnp.array(flat, DTYPES[dtype]), config)


TOKENS = np.random.default_rng(4).integers(0, SIZES.vocab_size, (B, T)).astype(np.int32)
TOKENS[0, [2, 9, 10]] = TOKENS[1, LENGTH] = BEGIN


@cache
def whole(dtype: str, config: ModelConfig) -> np.ndarray:
    """Logits (B, T, V) of the whole forward pass."""
    run = jax.jit(partial(forward, config=config))
    return np.asarray(run(params(dtype, config), TOKENS)[0], np.float32)[..., : config.vocab_size]


def filled(dtype: str, config: ModelConfig) -> tuple[Any, Cache]:
    """A prefill of the first LENGTH tokens, with others behind them that must not count."""
    run = jax.jit(partial(prefill, size=T, config=config, execution=PLAIN))
    tokens = np.full((B, P), BEGIN, np.int32)
    tokens[:, :LENGTH] = TOKENS[:, :LENGTH]
    return run(params(dtype, config), tokens, np.int32(LENGTH))


@cache
def decoder(config: ModelConfig) -> Any:
    return jax.jit(partial(decode, config=config))


def relative(found: Any, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, np.float32) - expected).max() / np.abs(expected).max())


slow = partial(pytest.param, marks=pytest.mark.slow)
ALL = Attention(window=4, documents=BEGIN, bias="alibi", softcap=2.0, kv_heads=2)


# bf16: the two round each product's result at other places; one unit in the last place is 2^-8
@pytest.mark.parametrize(
    ("dtype", "attention", "tolerance"),
    [
        pytest.param("fp32", CAUSAL, 1e-5, id="softmax"),
        pytest.param("fp32", ALL, 1e-5, id="window, documents, alibi, softcap, KV2"),
        slow("fp32", RELU, 1e-5, id="relu"),
        slow("fp32", Attention(window=4), 1e-5, id="window"),
        slow("fp32", Attention(documents=BEGIN), 1e-5, id="documents"),
        slow("fp32", Attention(bias="alibi"), 1e-5, id="alibi"),
        slow("fp32", Attention(kv_heads=2), 1e-5, id="KV2"),
        slow("bf16", CAUSAL, 6e-2, id="bf16"),
    ],
)
def test_every_position_has_the_logits_of_the_whole_forward(dtype: str, attention: Attention, tolerance: float) -> None:
    config = shape(attention)
    expected = whole(dtype, config)
    logits, cache = filled(dtype, config)
    errors = [relative(logits, expected[:, LENGTH - 1])]
    for position in range(LENGTH, T):
        logits, cache = decoder(config)(params(dtype, config), TOKENS[:, position], np.int32(position), cache)
        errors.append(relative(logits, expected[:, position]))
    assert logits.shape == (B, config.vocab_size) and logits.dtype == jnp.float32
    assert np.max(errors) <= tolerance  # NaN is none
    # and the comparison can fail: neighbouring positions are further apart than that
    assert relative(expected[:, LENGTH - 1], expected[:, LENGTH]) > 2 * tolerance


def test_one_text_from_an_empty_cache_and_for_several() -> None:
    config = shape(ALL)
    expected, cache = whole("fp32", config), empty_cache(config, 1, T, jnp.float32)
    for position in range(3):
        logits, cache = decoder(config)(params("fp32", config), TOKENS[:1, position], np.int32(position), cache)
        assert relative(logits, expected[:1, position]) <= 1e-5
    several = repeated(cache, B)
    tokens = np.array([TOKENS[0, 3], 1], np.int32)
    logits, several = decoder(config)(params("fp32", config), tokens, np.int32(3), several)
    assert relative(logits[0], expected[0, 3]) <= 1e-5
    assert relative(logits[1], expected[0, 3]) > 1e-2  # another token
    starts = several.starts.nbytes
    assert sum(array.nbytes for array in jax.tree.leaves(several)) == cache_bytes(config, B, T, 4) + starts
