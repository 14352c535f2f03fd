"""GPT-2 with the square of relu in the place of GELU.

    forward     r = max(x, 0)
                out = r^2
    backward    dx = 2 r dout

Unlike relu's, the slope begins at 0 without a jump. Large values grow by squaring, so watch the norms of the gradient.
Source: So et al., Primer (2021).
"""

import jax
import jax.numpy as jnp

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.ops.linear import bias_backward


def forward(x: jax.Array) -> jax.Array:
    """Return the square of relu of x, any shape."""
    return jnp.square(jnp.maximum(x, 0))


def backward(dout: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return dx (..., C), and its sum over all rows: the gradient of the bias that was added last to x."""
    dx = 2 * jnp.maximum(x, 0) * dout
    return dx, bias_backward(dx)


OWN = PROGRAM._replace(operations=lambda op: op._replace(gelu_forward=forward, gelu_backward=backward))
FAMILY = GPT2._replace(name="relu-squared", program=lambda: OWN)
