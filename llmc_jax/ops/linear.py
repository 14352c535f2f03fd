"""A fully connected layer: a matrix product and, unless it is the output head, a bias.

forward     out[n,o] = sum_i x[n,i] w[o,i] + b[o]           out = x w^T + b

backward    x[n,i] reaches every out[n,o], with weight w[o,i]:
                dx[n,i] = sum_o dout[n,o] w[o,i]            dx = dout w
            w[o,i] reaches out[n,o] of every row n, with weight x[n,i]:
                dw[o,i] = sum_n dout[n,o] x[n,i]            dw = dout^T x
            b[o] is added to every row:
                db[o] = sum_n dout[n,o]
"""

from typing import Any

import jax
import jax.numpy as jnp


def linear_forward(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    """x (..., I) times w (O, I) transposed, plus b (O,) if given; returns (..., O) in x's dtype.

    Products are accumulated in at least float32 and rounded once to x's dtype, before the bias is added: asking for
    16-bit results in float32 would let a GPU's matrix library write twice the bytes.
    Source: llm.c train_gpt2.c, `matmul_forward`.
    """
    out = jnp.einsum("...i,oi->...o", x, w, preferred_element_type=x.dtype)  # (..., O)
    return out if b is None else out + b


def linear_rows_forward(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
    """`linear_forward` of few rows x (B, I), such as one token of each of B texts; returns (B, O) in x's dtype.

    All of w (O, I) is read for a few products with each element, so how fast it is read decides. On a CPU XLA reads it
    faster as the left factor, and 16-bit weights fast only for two rows or more, so there one row is computed twice
    (benchmarks/results/generate.md).
    """

    def product(x: jax.Array) -> jax.Array:
        return jnp.einsum("oi,bi->ob", w, x, preferred_element_type=x.dtype).T  # (B, O)

    if x.shape[0] == 1 and x.dtype.itemsize < 4:
        out = jax.lax.platform_dependent(x, cpu=lambda x: product(jnp.concatenate([x, x]))[:1], default=product)
    else:
        out = product(x)
    return out if b is None else out + b


def linear_backward(
    dout: jax.Array, x: jax.Array, w: jax.Array, *, dw_dtype: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the product: dx (..., I) and dw (O, I), from dout (..., O), x (..., I) and w (O, I).

    dw has dw_dtype, w's own by default: where more is added to it, rounding waits. Source: llm.c train_gpt2.c,
    `matmul_backward`.
    """
    dx = jnp.einsum("...o,oi->...i", dout, w, preferred_element_type=x.dtype)  # (..., I)
    rows_out = dout.reshape(-1, dout.shape[-1])  # (n, O)
    rows_in = x.reshape(-1, x.shape[-1])  # (n, I)
    dw = jnp.einsum("no,ni->oi", rows_out, rows_in, preferred_element_type=dw_dtype or w.dtype)  # (O, I)
    return dx, dw


def bias_backward(dout: jax.Array) -> jax.Array:
    """Gradient of a bias (O,): the sum of dout (..., O) over all rows, in at least float32."""
    wide = jnp.promote_types(dout.dtype, jnp.float32)
    return jnp.sum(dout, axis=tuple(range(dout.ndim - 1)), dtype=wide).astype(dout.dtype)
