"""Token after token with a cache against the whole forward pass, at every position."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.config.model import ModelConfig
from llmc_jax.generate.engine import repeated
from llmc_jax.models.execution import PLAIN, RELU
from llmc_jax.models.gpt2.decode import Cache, cache_bytes, decode, empty_cache, prefill
from llmc_jax.models.gpt2.model import forward
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.layout import flat_size, tensor_specs, views

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(max_seq_len=24, vocab_size=29, padded_vocab_size=128, num_layers=2, num_heads=3, channels=12)
B, P, T = 2, 8, 20  # texts; positions of the prefill's program; length
LENGTH = 5  # of the prompt
EXECUTIONS = {"softmax": PLAIN, "relu": RELU}
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@cache
def params(dtype: str) -> Params:
    """A random model whose attention is far from uniform, so that a wrong position shows; padding is not zero."""
    rng = np.random.default_rng(3)
    flat = rng.standard_normal(flat_size(CONFIG)).astype(np.float32)
    for spec in tensor_specs(CONFIG):
        if spec.name in ("ln1w", "ln2w", "lnfw"):
            flat[spec.offset :][: spec.size] = 1
    return views(jnp.array(flat, DTYPES[dtype]), CONFIG)


TOKENS = np.random.default_rng(4).integers(0, CONFIG.vocab_size, (B, T)).astype(np.int32)


@cache
def whole(dtype: str, attention: str) -> np.ndarray:
    """Logits (B, T, V) of the whole forward pass."""
    run = jax.jit(partial(forward, config=CONFIG, execution=EXECUTIONS[attention]))
    return np.asarray(run(params(dtype), TOKENS)[0], np.float32)[..., : CONFIG.vocab_size]


def filled(dtype: str, attention: str) -> tuple[Any, Cache]:
    """A prefill of the first LENGTH tokens, with others behind them that must not count."""
    run = jax.jit(partial(prefill, size=T, config=CONFIG, execution=EXECUTIONS[attention]))
    tokens = np.full((B, P), 7, np.int32)
    tokens[:, :LENGTH] = TOKENS[:, :LENGTH]
    return run(params(dtype), tokens, np.int32(LENGTH))


@cache
def decoder(attention: str) -> Any:
    return jax.jit(partial(decode, config=CONFIG, attention=attention))


def relative(found: Any, expected: np.ndarray) -> float:
    return float(np.abs(np.asarray(found, np.float32) - expected).max() / np.abs(expected).max())


slow = partial(pytest.param, marks=pytest.mark.slow)


# bf16: the two round each product's result at other places; one unit in the last place is 2^-8
@pytest.mark.parametrize(
    ("dtype", "attention", "tolerance"),
    [("fp32", "softmax", 1e-5), slow("fp32", "relu", 1e-5), slow("bf16", "softmax", 6e-2)],
)
def test_every_position_has_the_logits_of_the_whole_forward(dtype: str, attention: str, tolerance: float) -> None:
    expected = whole(dtype, attention)
    logits, cache = filled(dtype, attention)
    errors = [relative(logits, expected[:, LENGTH - 1])]
    for position in range(LENGTH, T):
        logits, cache = decoder(attention)(params(dtype), TOKENS[:, position], np.int32(position), cache)
        errors.append(relative(logits, expected[:, position]))
    assert logits.shape == (B, CONFIG.vocab_size) and logits.dtype == jnp.float32
    assert max(errors) <= tolerance
    # and the comparison can fail: neighbouring positions are further apart than that
    assert relative(expected[:, LENGTH - 1], expected[:, LENGTH]) > 2 * tolerance


def test_one_text_from_an_empty_cache_and_for_several() -> None:
    expected, cache = whole("fp32", "softmax"), empty_cache(CONFIG, 1, T, jnp.float32)
    for position in range(3):
        logits, cache = decoder("softmax")(params("fp32"), TOKENS[:1, position], np.int32(position), cache)
        assert relative(logits, expected[:1, position]) <= 1e-5
    several = repeated(cache, B)
    tokens = np.array([TOKENS[0, 3], 1], np.int32)
    logits, several = decoder("softmax")(params("fp32"), tokens, np.int32(3), several)
    assert relative(logits[0], expected[0, 3]) <= 1e-5
    assert relative(logits[1], expected[0, 3]) > 1e-2  # another token
    assert sum(array.nbytes for array in jax.tree.leaves(several)) == cache_bytes(CONFIG, B, T, 4)
