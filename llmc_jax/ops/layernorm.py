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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of layernorm: dx (..., C), dw (C,), db (C,).

    dout and x (..., C), w (C,), mean and rstd (...) as the forward returned them.
    Source: the derivation above; llm.c train_gpt2.c, `layernorm_backward`.
    """
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
    return dx.astype(x.dtype), dw.astype(w.dtype), db.astype(w.dtype)
