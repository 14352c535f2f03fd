"""GPT-2 with relu in the place of GELU.

    forward     out = max(x, 0)
    backward    dx = dout where x > 0, and 0 elsewhere

A channel of the MLP that is below 0 for every token is dead: the row of fcw that makes it gets no gradient, nor does
the column of fcprojw that reads it. GELU has a slope there.
"""

import jax
import jax.numpy as jnp

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.ops.linear import bias_backward


def relu_forward(x: jax.Array) -> jax.Array:
    """Return relu of x, any shape."""
    return jnp.maximum(x, 0)


def relu_backward(dout: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return dx (..., C), and its sum over all rows: the gradient of the bias that was added last to x."""
    dx = jnp.where(x > 0, dout, 0)
    return dx, bias_backward(dx)


OWN = PROGRAM._replace(operations=lambda op: op._replace(gelu_forward=relu_forward, gelu_backward=relu_backward))
FAMILY = GPT2._replace(name="relu", program=lambda: OWN)
