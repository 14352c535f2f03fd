"""GPT-2 with batch normalisation: each channel over all rows of the batch, not each row over its channels.

    forward     mean = sum over the R = B T rows of x, / R          one for each channel
                rstd = 1 / sqrt(sum over rows of (x - mean)^2 / R + eps)
                norm = (x - mean) rstd
                out  = norm w + b

    backward    layernorm's, with rows in the place of channels:
                    dx = rstd (dnorm - sum over rows of dnorm / R - norm sum over rows of dnorm norm / R)
                The sum of dx over rows is 0: a bias that is added to the stream goes out again with every mean. The
                gradient of attprojb and fcprojb is rounding, which AdamW would make whole steps of: they are frozen.

It does not fit a language model. Mean and deviation run over time too, so a position sees those behind it: few numbers
for each channel, but they hold something of the targets, and training learns to read it. Three layers on bytes of
Python had a validation loss of 1.1 with 16 rows (-b 1 -t 16), where GPT-2 had 2.4; with 512 rows (-b 16 -t 32), which
blur each other, both had 1.9. So the loss is no measure, and depends on -b, -t and the devices, each of which
normalises its own rows. There is no decoder, as one row has no statistics: generation computes the text anew for each
token, with empty places behind it that count in the statistics, so what it writes is not what the loss promises, and
`llmc-jax model check` says that the two differ.
Averages kept from training, as image models use, would need a state that this model does not have.
Source: Ioffe, Szegedy, Batch Normalization (2015).
"""

import jax
import jax.numpy as jnp

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.models.program import with_norm
from llmc_jax.ops.layernorm import EPS
from llmc_jax.ops.linear import bias_backward


def forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
    """Return out (..., C), and mean and rstd (C,) in at least float32."""
    wide, rows = x.astype(jnp.promote_types(x.dtype, jnp.float32)), tuple(range(x.ndim - 1))
    mean = jnp.mean(wide, axis=rows)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide - mean), axis=rows) + EPS)
    return ((wide - mean) * rstd * w + b).astype(x.dtype), mean, rstd


def backward(dout: jax.Array, x: jax.Array, w: jax.Array, mean: jax.Array, rstd: jax.Array) -> tuple[jax.Array, ...]:
    """Return dx (..., C), dw and db (C,), and the sum of dx over all rows (C,)."""
    rows, wide = tuple(range(x.ndim - 1)), dout.astype(mean.dtype)
    norm = (x.astype(mean.dtype) - mean) * rstd
    dw, db = jnp.sum(wide * norm, axis=rows).astype(w.dtype), jnp.sum(wide, axis=rows).astype(w.dtype)
    dnorm = wide * w
    dx = rstd * (dnorm - jnp.mean(dnorm, axis=rows) - norm * jnp.mean(dnorm * norm, axis=rows))
    dx = dx.astype(x.dtype)
    return dx, dw, db, bias_backward(dx)


OWN = PROGRAM._replace(operations=lambda op: with_norm(op, forward, backward), decoder=None)
FAMILY = GPT2._replace(name="batch-norm", program=lambda: OWN, frozen=lambda shape: ("attprojb", "fcprojb"))
