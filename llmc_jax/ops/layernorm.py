"""Layer normalisation over the channels.

forward     mean = sum(x) / C
            var  = sum((x - mean)^2) / C
            rstd = 1 / sqrt(var + eps)
            norm = (x - mean) * rstd
            out  = norm * w + b

backward    out is linear in w and b:
                db = sum over rows of dout
                dw = sum over rows of dout * norm
            and the gradient that reaches norm is
                dnorm = dout * w
            x enters norm three times: directly, through mean and through rstd.
                d norm_i / d x_j = rstd * (delta_ij - 1/C - norm_i * norm_j / C)
            (from d mean / d x_j = 1/C, and d rstd / d x_j = -rstd^3 (x_j - mean) / C = -rstd^2 norm_j / C;
             what x_j does to var through mean vanishes because sum(x - mean) = 0.)
            Multiplied by dnorm_i and summed over i:
                dx_j = rstd * ( dnorm_j                       the direct path
                                - sum_i dnorm_i / C           through mean
                                - norm_j * sum_i dnorm_i norm_i / C )   through rstd
"""

import jax
import jax.numpy as jnp

from llmc_jax.ops.linear import bias_backward
from llmc_jax.ops.residual import residual_backward, residual_forward

EPS = 1e-5  # llm.c's and PyTorch's


def layernorm_forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalises x (..., C) over its last axis, scales by w (C,) and shifts by b (C,).

    Returns out (..., C) in x's dtype, and mean and rstd (...) in at least float32, which the backward needs.
    Source: Ba, Kiros, Hinton, Layer Normalization (2016); llm.c train_gpt2.c, `layernorm_forward`.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, axis=-1)  # (...)
    centred = wide - mean[..., None]  # (..., C)
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1) + EPS)  # (...)
    out = centred * rstd[..., None] * w + b  # (..., C)
    return out.astype(x.dtype), mean, rstd


def layernorm_backward(
    dout: jax.Array, x: jax.Array, w: jax.Array, mean: jax.Array, rstd: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of layernorm: dx (..., C), dw (C,), db (C,), and dbias (C,), the sum of dx over all rows.

    dout and x (..., C), w (C,), mean and rstd (...) as the forward returned them. dbias is the gradient of the bias of
    the linear layer whose result was added to x: here because a kernel that has dx in registers need not read it again.
    Source: the derivation above; llm.c train_gpt2.c, `layernorm_backward`.
    """
    dx, dw, db = _backward(dout, x, w, mean, rstd)
    dx = dx.astype(x.dtype)
    return dx, dw, db, bias_backward(dx)


def _backward(
    dout: jax.Array, x: jax.Array, w: jax.Array, mean: jax.Array, rstd: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dx, not rounded yet, dw and db."""
    wide = mean.dtype
    rows = tuple(range(x.ndim - 1))
    norm = (x.astype(wide) - mean[..., None]) * rstd[..., None]  # (..., C)
    dout = dout.astype(wide)
    db = jnp.sum(dout, axis=rows)  # (C,)
    dw = jnp.sum(dout * norm, axis=rows)  # (C,)
    dnorm = dout * w  # (..., C)
    dnorm_mean = jnp.mean(dnorm, axis=-1, keepdims=True)  # (..., 1)
    dnorm_norm_mean = jnp.mean(dnorm * norm, axis=-1, keepdims=True)  # (..., 1)
    dx = dnorm - dnorm_mean - norm * dnorm_norm_mean  # (..., C)
    dx = dx * rstd[..., None]
    return dx, dw.astype(w.dtype), db.astype(w.dtype)


def residual_layernorm_forward(
    x: jax.Array, f: jax.Array, w: jax.Array, b: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Adds f to the stream x, both (..., C), and normalises the sum: residual, out (..., C), mean and rstd (...).

    The sum is rounded to x's dtype before it is normalised, so that `layernorm_forward(residual, w, b)` gives the same.
    One function because a kernel does both in one reading. Source: llm.c llmc/layernorm.cuh, `fused_residual_forward5`.
    """
    # The barrier makes the sum take its dtype's rounding: XLA would otherwise normalise the sum before rounding.
    residual = jax.lax.optimization_barrier(residual_forward(x, f))  # (..., C)
    return residual, *layernorm_forward(residual, w, b)


def residual_layernorm_backward(
    dresidual: jax.Array, dout: jax.Array, residual: jax.Array, w: jax.Array, mean: jax.Array, rstd: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of `residual_layernorm_forward`: dx (..., C), which is df too, dw (C,), db (C,), dbias (C,).

    dresidual (..., C) reaches the sum from further down the stream, dout (..., C) its layernorm; the two meet in at
    least float32 and are rounded once. dbias is the sum of dx over all rows: the gradient of the bias of the linear
    layer that made f.
    """
    through_norm, dw, db = _backward(dout, residual, w, mean, rstd)
    dx, _ = residual_backward(dresidual + through_norm)
    dx = dx.astype(residual.dtype)
    return dx, dw, db, bias_backward(dx)
