"""The residual connection: what a block computes is added to what it read.

    forward     out = x + f
    backward    dx = dout,  df = dout       an addition hands its gradient to both sides unchanged

The gradient of the residual stream is therefore a sum: what comes straight down, plus what comes back through the
block. `gpt2.backward` writes that sum out.
"""

import jax


def residual_forward(x: jax.Array, f: jax.Array) -> jax.Array:
    """Return the sum of the stream x and a block's output f, both (B, T, C)."""
    return x + f


def residual_backward(dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of both inputs: dout itself, twice."""
    return dout, dout
