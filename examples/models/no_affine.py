"""GPT-2 whose layernorms have no gain and no bias.

    forward     out = norm, as with w = 1 and b = 0
    backward    dnorm = dout, and dx as layernorm's
                dw = db = 0: they take no part, and are frozen

The matrix that reads a layernorm's output can take over both: (norm w + b) W^T = norm (W w)^T + b W^T. So little is
lost, and only at the end: the last layernorm's go into wte, which the embedding needs as it is.
"""

from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.models.program import with_norm
from llmc_jax.ops.table import Operations


def operations(op: Operations) -> Operations:
    """Return the operations of a run, whose layernorms are called with w = 1 and b = 0, whatever these are."""

    def forward(x: jax.Array, w: jax.Array, b: jax.Array) -> Any:
        return op.layernorm_forward(x, jnp.ones_like(w), jnp.zeros_like(b))

    def backward(dout: jax.Array, x: jax.Array, w: jax.Array, *statistics: jax.Array) -> Any:
        dx, dw, db, dbias = op.layernorm_backward(dout, x, jnp.ones_like(w), *statistics)
        return dx, jnp.zeros_like(dw), jnp.zeros_like(db), dbias

    return with_norm(op, forward, backward)


OWN = PROGRAM._replace(operations=operations)
FAMILY = GPT2._replace(
    name="no-affine", program=lambda: OWN, frozen=lambda shape: ("ln1w", "ln1b", "ln2w", "ln2b", "lnfw", "lnfb")
)
