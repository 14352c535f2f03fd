"""AdamW and the global gradient norm, each one pass over the flat buffers.

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

from llmc_jax.config import ModelConfig
from llmc_jax.params import FLAT_MULTIPLE, MATRICES, tensor_specs


class AdamWNumbers(NamedTuple):
    """AdamW's numbers. Traced, so that another value needs no new compilation."""

    beta1: Any
    beta2: Any
    eps: Any
    weight_decay: Any


def global_norm(gradient: jax.Array) -> jax.Array:
    """The L2 norm of a flat gradient (flat_size,), a scalar in at least float32.

    Summed row by row, then over the rows: one running float32 sum over 10^8 squares would lose digits.
    """
    rows = gradient.reshape(-1, FLAT_MULTIPLE // 16).astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(jnp.sum(rows * rows, axis=1)))


def clip_scale(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """What to multiply the gradient by so that its norm is at most `limit`; limit <= 0: no clipping."""
    return jnp.where((limit > 0) & (norm > limit), limit / norm, 1.0).astype(norm.dtype)


def decay_ranges(config: ModelConfig, rule: str) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) of the flat buffer that weight decay applies to, neighbours joined.

    rule: 'matrices' as train_gpt2.cu (wte, wpe and the weight matrices), or 'all' as train_gpt2.c.
    """
    ranges: list[tuple[int, int]] = []
    for spec in tensor_specs(config):
        if rule == "all" or spec.name in MATRICES:
            start = spec.offset
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, spec.offset + spec.size))
    return tuple(ranges)


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One AdamW update of flat params, m and v (flat_size,) by scale * gradient; returns the new three.

    update: t, counted from 1. apply: boolean scalar; where False all three stay what they were. decay: the ranges that
    weight decay applies to; none of them: no decay.
    Source: Loshchilov, Hutter, Decoupled Weight Decay Regularization (2019); llm.c llmc/adamw.cuh.
    """
    beta1, beta2 = numbers.beta1, numbers.beta2
    g = gradient * scale
    m = jnp.where(apply, beta1 * m + (1.0 - beta1) * g, m)
    v = jnp.where(apply, beta2 * v + (1.0 - beta2) * g * g, v)
    # The barrier makes the parameters' update read the new m and v. Without it XLA may compute them a second time from
    # the old ones, which it then has to keep: two copies of the buffers.
    m, v = jax.lax.optimization_barrier((m, v))
    mhat = m / (1.0 - beta1**update)
    vhat = v / (1.0 - beta2**update)
    change = mhat / (jnp.sqrt(vhat) + numbers.eps)
    if decay:
        change = change + jnp.where(_in_ranges(params.size, decay), numbers.weight_decay * params, 0.0)
    return jnp.where(apply, params - learning_rate * change, params), m, v


def _in_ranges(size: int, ranges: tuple[tuple[int, int], ...]) -> jax.Array:
    """Boolean (size,): which positions of a flat buffer lie in one of the ranges."""
    inside = jnp.zeros(size, bool)
    if size <= 2**32:
        position = jax.lax.iota(jnp.uint32, size)
        for start, stop in ranges:  # unsigned, positions before the range wrap round to large numbers: one comparison
            inside |= position - jnp.uint32(start) < jnp.uint32(stop - start)
        return inside
    # More elements than 32 bits count: compare (row, column). Right for any size, but twice as slow on a CPU.
    row = jax.lax.broadcasted_iota(jnp.int32, (size // FLAT_MULTIPLE, FLAT_MULTIPLE), 0).reshape(size)
    column = jax.lax.broadcasted_iota(jnp.int32, (size // FLAT_MULTIPLE, FLAT_MULTIPLE), 1).reshape(size)

    def at_or_after(position: int) -> jax.Array:
        r, c = divmod(position, FLAT_MULTIPLE)
        return (row > r) | ((row == r) & (column >= c))

    for start, stop in ranges:
        inside |= at_or_after(start) & ~at_or_after(stop)
    return inside
