"""GELU, in the tanh approximation that GPT-2 was trained with.

forward     u = s (x + 0.044715 x^3),  s = sqrt(2/pi)
            out = x/2 (1 + tanh u)

backward    product rule, with tanh' u = 1 - tanh^2 u and du/dx = s (1 + 3 * 0.044715 x^2):
                d out / dx = (1 + tanh u)/2 + x/2 (1 - tanh^2 u) du/dx
                dx = dout * d out / dx
"""

import math

import jax
import jax.numpy as jnp

from llmc_jax.ops.linear import bias_backward, linear_forward

_S = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715


def gelu_forward(x: jax.Array) -> jax.Array:
    """GELU of x, any shape, computed in at least float32 and returned in x's dtype.

    Source: Hendrycks, Gimpel, Gaussian Error Linear Units (2016); llm.c train_gpt2.c, `gelu_forward`.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    tanh = jnp.tanh(_S * (wide + _CUBIC * wide * wide * wide))
    return (0.5 * wide * (1.0 + tanh)).astype(x.dtype)


def gelu_backward(dout: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradient of GELU at x (..., C): dx (..., C) in x's dtype, and dbias (C,), its sum over all rows.

    dbias is the gradient of the bias of the linear layer that made x: here because a kernel that has dx in registers
    need not read it again. Source: the derivation above; llm.c train_gpt2.c, `gelu_backward`.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    tanh = jnp.tanh(_S * (wide + _CUBIC * wide * wide * wide))
    du = _S * (1.0 + 3.0 * _CUBIC * wide * wide)
    slope = 0.5 * (1.0 + tanh) + 0.5 * wide * (1.0 - tanh * tanh) * du
    dx = (dout * slope).astype(x.dtype)
    return dx, bias_backward(dx)


# ----- with the product before it -----------------------------------------------------------------------------------


def linear_gelu_forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return h = x w^T + b (..., O) and GELU of it, from x (..., I), w (O, I) and b (O,).

    What a kernel does in one pass (pallas_kernels/matmul.py). Source: as `linear_forward` and `gelu_forward`.
    """
    h = linear_forward(x, w, b)
    return h, gelu_forward(h)


def linear_gelu_backward(dout: jax.Array, w: jax.Array, h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of h (..., I), which goes through GELU and then w (O, I), and its sum over all rows (I,).

    dout (..., O): what reaches the result of the linear layer. Source: as `linear_backward` and `gelu_backward`.
    """
    return gelu_backward(jnp.einsum("...o,oi->...i", dout, w, preferred_element_type=h.dtype), h)
