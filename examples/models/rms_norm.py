"""GPT-2 with RMSNorm in the place of layernorm: nothing is subtracted, nothing is added.

    forward     rstd = 1 / sqrt(sum(x^2) / C + eps)
                norm = x rstd
                out  = norm w

    backward    dw = sum over rows of dout norm
                dnorm = dout w
                x enters norm twice: directly, and through rstd, with d rstd / d x_j = -rstd^3 x_j / C, so
                    d norm_i / d x_j = rstd (delta_ij - norm_i norm_j / C)
                Multiplied by dnorm_i and summed over i:
                    dx_j = rstd (dnorm_j - norm_j sum_i dnorm_i norm_i / C)

Against layernorm's dx the term of the mean is missing, and nothing else. The biases get no gradient and are frozen.
Source: Zhang, Sennrich, Root Mean Square Layer Normalization (2019).
"""

from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.models.program import with_norm
from llmc_jax.ops.layernorm import EPS
from llmc_jax.ops.linear import bias_backward


def forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[Any, ...]:
    """Return out (..., C), no mean, and rstd (..., 1) in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return (wide * rstd * w).astype(x.dtype), (), rstd


def backward(dout: jax.Array, x: jax.Array, w: jax.Array, mean: tuple[()], rstd: jax.Array) -> tuple[jax.Array, ...]:
    """Return dx (..., C), dw (C,), db (C,) zeros, and the sum of dx over all rows (C,)."""
    norm, wide = x.astype(rstd.dtype) * rstd, dout.astype(rstd.dtype)
    dw = jnp.sum(wide * norm, axis=tuple(range(x.ndim - 1))).astype(w.dtype)
    dnorm = wide * w
    dx = rstd * (dnorm - norm * jnp.mean(dnorm * norm, axis=-1, keepdims=True))
    dx = dx.astype(x.dtype)
    return dx, dw, jnp.zeros_like(w), bias_backward(dx)


OWN = PROGRAM._replace(operations=lambda op: with_norm(op, forward, backward))
FAMILY = GPT2._replace(name="rms-norm", program=lambda: OWN, frozen=lambda shape: ("ln1b", "ln2b", "lnfb"))
