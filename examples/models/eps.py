"""GPT-2 whose layernorms have another epsilon.

    forward     rstd = 1 / sqrt(var + eps), the rest as layernorm's
    backward    layernorm's own: it takes rstd as the forward found it, and eps stands nowhere else

Epsilon decides nothing as long as it is far below the variance of what is normalised. At the start that is the
embedding's, 2 * 0.02^2 = 8e-4, against GPT-2's 1e-5. What comes out has the deviation sqrt(8e-4 / (8e-4 + eps)): 0.99
with 1e-5, 0.27 with 1e-2, 0.09 with 1e-1. With 1e-12 only a row that is nearly constant notices: its rstd, by which its
gradient is multiplied, may be 1e6.
"""

import jax
import jax.numpy as jnp

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.models.program import with_norm

EPS = 1e-2


def forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
    """Return out (..., C), and mean and rstd (...) in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, axis=-1)  # (...)
    centred = wide - mean[..., None]  # (..., C)
    rstd = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1) + EPS)  # (...)
    return (centred * rstd[..., None] * w + b).astype(x.dtype), mean, rstd


OWN = PROGRAM._replace(operations=lambda op: with_norm(op, forward, op.layernorm_backward))
FAMILY = GPT2._replace(name="eps", program=lambda: OWN)
