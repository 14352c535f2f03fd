"""Decoding for a model that has no decoder of its own: the whole text is computed again for each token.

Its cache is the text so far. T positions take T times the work that a cache of keys and values would.
"""

from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelShape
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.program import Decoder, head_of, hidden
from llmc_jax.ops.linear import linear_rows_forward


def empty(shape: ModelShape, texts: int, size: int, dtype: Any) -> jax.Array:
    """Return the ids of so many texts of up to `size` positions, (texts, size): zeros."""
    return jnp.zeros((texts, size), jnp.int32)


def prefill(
    params: Any, tokens: jax.Array, length: jax.Array, size: int, shape: ModelShape, execution: Execution
) -> tuple[jax.Array, jax.Array]:
    """Return the logits (B, V) of the token after each text, and the texts: of tokens (B, P) the first `length`."""
    text = jnp.pad(tokens, ((0, 0), (0, size - tokens.shape[1])))
    return _after(params, tokens, length - 1, shape, execution), text


def decode(
    params: Any, tokens: jax.Array, position: jax.Array, text: jax.Array, shape: ModelShape
) -> tuple[jax.Array, jax.Array]:
    """Return the logits (B, V) of the token after `tokens` (B,), which stand at `position`, and the new texts."""
    text = jax.lax.dynamic_update_slice_in_dim(text, tokens[:, None], position, axis=1)
    return _after(params, text, position, shape, PLAIN), text


def _after(params: Any, text: jax.Array, position: jax.Array, shape: ModelShape, execution: Execution) -> jax.Array:
    rows = hidden(params, text, shape, execution)
    row = jax.lax.dynamic_index_in_dim(rows, position, axis=1, keepdims=False)  # (B, C)
    logits = linear_rows_forward(row, head_of(params, shape), None)[:, : shape.vocab_size]
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


DECODER = Decoder(empty, prefill, decode, lambda shape, texts, size, element: 4 * texts * size)
