"""Generation compiled for GPUs that are not there: the cache is changed in place, and no weight is copied."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from benchmarks import aot
from benchmarks.hlo import copied_arrays
from llmc_jax.config.model import parse_descriptor
from llmc_jax.machine import deviceless
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.gpt2.decode import cache_bytes, decode, empty_cache, prefill
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.layout import flat_size, separate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]
CONFIG = parse_descriptor("L3-NH12-C768")
SIZE = 1024


def weights() -> Params:
    """The shapes of a model's weights, a tensor with a layer axis as one array for each layer."""
    flat = jax.ShapeDtypeStruct((flat_size(CONFIG),), jnp.bfloat16)
    found: Params = jax.eval_shape(partial(separate, config=CONFIG), flat)
    return found


@pytest.mark.parametrize("texts", [1, 8])
@pytest.mark.parametrize("gpu", ["h200", "a100", "rtx4090", "b200"])
def test_a_token_changes_the_cache_in_place(gpu: str, texts: int) -> None:
    cache = jax.eval_shape(partial(empty_cache, CONFIG, texts, SIZE, jnp.bfloat16))
    tokens, position = jax.ShapeDtypeStruct((texts,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    function = jax.jit(decode, static_argnums=4, donate_argnums=3)
    program = deviceless.compile_for(function, (weights(), tokens, position, cache, CONFIG), gpu)
    assert program.memory.aliased == cache_bytes(CONFIG, texts, SIZE, 2)
    assert copied_arrays(program.hlo, 100_000) == []
    assert program.memory.temporaries < 1_000_000  # a few rows


def test_a_prompt_needs_no_logits_but_the_last_ones() -> None:
    tokens, length = jax.ShapeDtypeStruct((1, SIZE), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    function = jax.jit(prefill, static_argnums=(3, 4, 5))
    program = deviceless.compile_for(function, (weights(), tokens, length, SIZE, CONFIG, PLAIN), "h200")
    all_logits = SIZE * CONFIG.padded_vocab_size * 2
    assert program.memory.temporaries < all_logits  # 103 MB; attention's T x T matrix is the largest
    assert program.memory.outputs >= cache_bytes(CONFIG, 1, SIZE, 2)
