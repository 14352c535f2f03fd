"""GPT-2 without layernorm: each one is the identity.

    forward     out = x
    backward    dx = dout

Gain and bias take no part: their gradient is 0, and they are frozen. Without normalisation the scores of attention grow
with the square of the stream, and the stream with every layer that writes to it: compare the largest learning rate that
does not diverge with GPT-2's.
"""

from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.models.program import with_norm
from llmc_jax.ops.linear import bias_backward


def forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[Any, ...]:
    """Return x (..., C) itself, and no statistics."""
    return x, (), ()


def backward(dout: jax.Array, x: jax.Array, w: jax.Array, *statistics: Any) -> tuple[jax.Array, ...]:
    """Return dx, dw, db, and the sum of dx over all rows."""
    return dout, jnp.zeros_like(w), jnp.zeros_like(w), bias_backward(dout)


OWN = PROGRAM._replace(operations=lambda op: with_norm(op, forward, backward))
FAMILY = GPT2._replace(
    name="no-norm", program=lambda: OWN, frozen=lambda shape: ("ln1w", "ln1b", "ln2w", "ln2b", "lnfw", "lnfb")
)
