"""Losses of rows compiled for GPUs that are not there: no logits of a whole batch, and memory that every card has."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import aot
from llmc_jax.config.model import parse_descriptor
from llmc_jax.generate.scorer import ScoreOptions, rows_of, scores_of_batch
from llmc_jax.machine import deviceless
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.layout import flat_size

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(aot.problem()), reason=aot.problem()),
]
CONFIG = parse_descriptor("L3-NH12-C768")
TOKENS = 16384


@pytest.mark.parametrize(("gpu", "length"), [("h200", 128), ("h200", 1024), ("rtx4090", 128)])
def test_a_batch_never_has_all_its_logits(gpu: str, length: int) -> None:
    rows = rows_of(length, TOKENS)
    flat = jax.ShapeDtypeStruct((flat_size(CONFIG),), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    places = jax.ShapeDtypeStruct((2,), jnp.int32)
    program = deviceless.compile_for(
        scores_of_batch, (flat, tokens, tokens, places, CONFIG, PLAIN, ScoreOptions(rank=True)), gpu
    )
    attention = rows * CONFIG.num_heads * length * length * (2 + 4)  # T x T of every head, in bf16 and float32
    all_logits = TOKENS * CONFIG.padded_vocab_size * 2
    assert program.memory.temporaries - attention < all_logits / 6  # found: 226 MB and 1,259 MB, attention included
    assert program.memory.outputs <= 8 * TOKENS + 64  # a loss and a rank for each token
