"""Outliers among losses and gradient norms: how far the newest value lies from the last 128, in standard deviations.

With the window x_1 ... x_n, n = 128, the newest value x among them:

    mean = sum(x_i) / n
    std  = sqrt(sum((x_i - mean)^2) / n)            of the population: divided by n, not by n - 1
    z    = (x - mean) / std, and 0 where std is 0

Computed from d_i = (x - x_i) / s, where s is a power of two near the largest |x - x_i|, as z = mean(d) / std(d). In
this form float32 suffices: neighbours are subtracted exactly, equal values give exactly 0, and no square overflows,
however large the norm. llm.c adds to and takes from running sums, which only double precision bears, and which one NaN
spoils for ever. No |z| exceeds sqrt(n - 1) = 11.27, since x is one of the n.

Leaves out what follows from an outlier (step.py).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WINDOW = 128  # llm.c's
BYTES = 4 * (2 * WINDOW + 1)  # of `Outliers` of float32


class Outliers(NamedTuple):
    """The last losses and gradient norms, on the device."""

    values: jax.Array  # (2, WINDOW) at least float32: losses, norms; a ring, the newest at (count - 1) % WINDOW
    count: jax.Array  # type: ignore[assignment]  # () int32, pairs taken in so far


def init_outliers(dtype: Any = jnp.float32) -> Outliers:
    """Return an empty window, which holds values in dtype, or in float32 where that is wider."""
    return Outliers(jnp.zeros((2, WINDOW), jnp.promote_types(dtype, jnp.float32)), jnp.zeros((), jnp.int32))


def update_outliers(state: Outliers, loss: jax.Array, norm: jax.Array) -> tuple[Outliers, jax.Array, jax.Array]:
    """Take in a loss and a gradient norm, scalars; return the new state and their z-scores, scalars of its dtype.

    Both z-scores are NaN until WINDOW pairs came before. A pair with a value that is not finite stays out of the
    window, and its z-scores are NaN. Values of one sign, as losses and norms are, may be as large as the dtype holds.
    Source: llm.c llmc/outlier_detector.h, which lets everything in.
    """
    pair = jnp.stack([loss, norm]).astype(state.values.dtype)[:, None]  # (2, 1)
    taken = jnp.isfinite(pair).all()
    here = jnp.arange(WINDOW, dtype=jnp.int32) == state.count % WINDOW
    values = jnp.where(here & taken, pair, state.values)
    z = jnp.where(taken & (state.count >= WINDOW), _z_scores(values, pair), jnp.nan)
    return Outliers(values, state.count + taken.astype(jnp.int32)), z[0], z[1]


def _z_scores(values: jax.Array, newest: jax.Array) -> jax.Array:
    """z (2,) of newest (2, 1), each among its row of values (2, WINDOW)."""
    apart = newest - values
    _, exponent = jnp.frexp(jnp.max(jnp.abs(apart), axis=1, keepdims=True))
    apart = jnp.ldexp(apart, -exponent)  # below 1; a division by 2^127 would become a product with a denormal 0
    mean = jnp.mean(apart, axis=1, keepdims=True)
    std = jnp.sqrt(jnp.mean((apart - mean) ** 2, axis=1))
    return jnp.where(std > 0, mean[:, 0] / std, 0)


def is_outlier(z: Any, limit: Any) -> Any:
    """Return whether a z-score exceeds limit, boolean; never where z is NaN or limit is 0, which stands for none."""
    return (limit != 0) & (z > limit)


def skip_message(z_loss: float, z_norm: float, skip_loss_z: float, skip_norm_z: float) -> str:
    """llm.c's line for a step whose update was skipped because of an outlier, the loss first; empty where none was.

    z_loss, z_norm: as the device gave them in float32, in which they were compared.
    """
    for name, z, limit in (("loss", z_loss, skip_loss_z), ("grad", z_norm, skip_norm_z)):
        if is_outlier(np.float32(z), np.float32(limit)):
            return f"skipping update due to {name} z-score of {z:f}"
    return ""
