"""AdamW, one pass over the flat buffers.

With gradient g, rate lr, update number t = 1, 2, …:

    m = beta1 m + (1 - beta1) g                 running mean of the gradient
    v = beta2 v + (1 - beta2) g^2               running mean of its square
    mhat = m / (1 - beta1^t)                    both start at zero and are too small at first:
    vhat = v / (1 - beta2^t)                    the expectation of m is (1 - beta1^t) times the gradient's
    p = p - lr (mhat / (sqrt(vhat) + eps) + decay p)

The decay pulls at the parameter itself, outside the adaptive scaling ("decoupled").
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.train import TrainConfig
from llmc_jax.training.optimizer import Optimizer, global_norm, in_ranges
from llmc_jax.training.rounding import Rows, check_rounding, rounded


class AdamWNumbers(NamedTuple):
    """AdamW's numbers. Traced, so that another value needs no new compilation."""

    beta1: Any
    beta2: Any
    eps: Any
    weight_decay: Any


def adamw_update(
    params: jax.Array,
    m: jax.Array,
    v: jax.Array,
    gradient: jax.Array,
    *,
    scale: jax.Array,
    learning_rate: jax.Array,
    update: jax.Array,
    apply: jax.Array,
    numbers: AdamWNumbers,
    decay: tuple[tuple[int, int], ...],
    copy: jax.Array | None = None,
    rounding: str = "nearest",
    seed: jax.Array | None = None,
    rows: Rows | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Update flat params, m and v (flat_size,) by scale * gradient: the new three and the copy.

    rows: where the buffers are a part of the flat ones, which rows of it; decay and stochastic rounding go by those.

    params: float32 master weights, or bfloat16/float16 without any (llm.c's -w 0); the arithmetic is in at least
    float32 and rounded once. gradient: any of those dtypes. update: t, counted from 1. apply: boolean scalar; where
    False everything stays what it was. decay: the ranges that weight decay applies to; none of them: no decay.
    copy: the master weights in the dtype that the model computes in, (flat_size,), written anew; None: there is none.
    rounding: 'nearest' or 'stochastic' (`round_stochastically` with seed () uint32, another one at each update), of
    what is rounded down from float32: the copy, or bfloat16 params. Raises ValueError for another rounding, for a
    stochastic one without a seed or with nothing in bfloat16 to round, and for a copy of params that are no masters.
    Source: Loshchilov, Hutter, Decoupled Weight Decay Regularization (2019); llm.c llmc/adamw.cuh.
    """
    wide = jnp.promote_types(params.dtype, jnp.float32)
    check_rounding(params, copy, rounding, seed)
    beta1, beta2 = numbers.beta1, numbers.beta2
    g = gradient.astype(wide) * scale
    m = jnp.where(apply, beta1 * m + (1.0 - beta1) * g, m)
    v = jnp.where(apply, beta2 * v + (1.0 - beta2) * g * g, v)
    # The barrier makes the parameters' update read the new m and v. Without it XLA may compute them a second time from
    # the old ones, which it then has to keep: two copies of the buffers.
    m, v = jax.lax.optimization_barrier((m, v))
    mhat = m / (1.0 - beta1**update)
    vhat = v / (1.0 - beta2**update)
    change = mhat / (jnp.sqrt(vhat) + numbers.eps)
    before = params.astype(wide)
    if decay:
        change = change + jnp.where(in_ranges(params.size, decay, rows), numbers.weight_decay * before, 0.0)
    after = before - learning_rate * change
    if params.dtype != wide:
        return jnp.where(apply, rounded(after, params.dtype, rounding, seed, rows), params), m, v, None
    params = jnp.where(apply, after, params)
    if copy is not None:
        params = jax.lax.optimization_barrier(params)  # as above: the copy is made of the new ones
        copy = jnp.where(apply, rounded(params, copy.dtype, rounding, seed, rows), copy)
    return params, m, v, copy


def numbers_of(config: TrainConfig) -> AdamWNumbers:
    """Return what a run sets."""
    return AdamWNumbers(float(config.beta1), float(config.beta2), float(config.eps), float(config.weight_decay))


ADAMW = Optimizer("adamw", ("m", "v"), adamw_update, global_norm, numbers_of)
