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

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import BY_NAME, tensor_specs
from llmc_jax.models.tensors import FLAT_MULTIPLE


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
        if rule == "all" or BY_NAME[spec.name].matrix:
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
    copy: jax.Array | None = None,
    rounding: str = "nearest",
    seed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """One AdamW update of flat params, m and v (flat_size,) by scale * gradient; returns the new three and the copy.

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
    _check_rounding(params, copy, rounding, seed)
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
        change = change + jnp.where(_in_ranges(params.size, decay), numbers.weight_decay * before, 0.0)
    after = before - learning_rate * change
    if params.dtype != wide:
        return jnp.where(apply, _rounded(after, params.dtype, rounding, seed), params), m, v, None
    params = jnp.where(apply, after, params)
    if copy is not None:
        params = jax.lax.optimization_barrier(params)  # as above: the copy is made of the new ones
        copy = jnp.where(apply, _rounded(params, copy.dtype, rounding, seed), copy)
    return params, m, v, copy


def squirrel_noise5(position: jax.Array, seed: jax.Array) -> jax.Array:
    """A hash of positions and a seed, both uint32, to 32 bits that look random: the same wherever it is computed.

    Source: Squirrel Eiserloh's SquirrelNoise5, as llm.c uses it (llmc/cuda_utils.cuh).
    """
    bits = position * jnp.uint32(0xD2A80A3F) + seed
    bits ^= bits >> 9
    bits += jnp.uint32(0xA884F197)
    bits ^= bits >> 11
    bits *= jnp.uint32(0x6C736F4B)
    bits ^= bits >> 13
    bits += jnp.uint32(0xB79F3ABB)
    bits ^= bits >> 15
    bits *= jnp.uint32(0x1B56C4F5)
    return bits ^ bits >> 17


def round_stochastically(values: jax.Array, seed: jax.Array) -> jax.Array:
    """A flat buffer (flat_size,) of float32 in bfloat16, each element up or down at random, right in expectation.

    Of two neighbours the nearer is the likelier: with low = the 16 bits that bfloat16 drops, the magnitude goes up
    with probability low / 2^16. So what bfloat16 holds exactly stays, and an update too small to change a parameter by
    rounding to nearest still does so now and then. NaN stays NaN. Source: llm.c llmc/cuda_utils.cuh,
    `stochastic_rounding`, there with another position.
    """
    values = values.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    noise = squirrel_noise5(_noise_positions(values.size), seed)
    up = (bits & 0xFFFF) > (noise & 0xFFFF)
    rounded = ((bits >> 16) + up.astype(jnp.uint32)).astype(jnp.uint16)  # a carry goes into the exponent, as it should
    return jnp.where(jnp.isnan(values), jnp.bfloat16(jnp.nan), jax.lax.bitcast_convert_type(rounded, jnp.bfloat16))


def _rounded(values: jax.Array, dtype: Any, rounding: str, seed: jax.Array | None) -> jax.Array:
    if rounding == "nearest" or seed is None:
        return values.astype(dtype)
    return round_stochastically(values, seed)


def _check_rounding(params: jax.Array, copy: jax.Array | None, rounding: str, seed: jax.Array | None) -> None:
    narrow = params.dtype in (jnp.bfloat16, jnp.float16)
    if narrow and copy is not None:
        raise ValueError(f"params are {params.dtype}: the model computes with them; give a copy to float32 params only")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding {rounding!r}: 'nearest' or 'stochastic'")
    if rounding == "stochastic":
        rounded = params if narrow else copy
        if rounded is None or rounded.dtype != jnp.bfloat16:
            found = "nothing is rounded" if rounded is None else f"{rounded.dtype} is rounded to"
            raise ValueError(f"stochastic rounding needs bfloat16 params or a bfloat16 copy, but {found}")
        if seed is None:
            raise ValueError("stochastic rounding needs a seed, another one at each update")


def _noise_positions(size: int) -> jax.Array:
    """What to hash for each element of a flat buffer (size,), uint32: its position, while 32 bits count them.

    Beyond, each further 2^32 elements are the low 32 bits and a shift: llm.c's way to hash two numbers.
    """
    if size <= 2**32:
        return jax.lax.iota(jnp.uint32, size)
    row = jax.lax.broadcasted_iota(jnp.uint32, (size // FLAT_MULTIPLE, FLAT_MULTIPLE), 0).reshape(size)
    column = jax.lax.broadcasted_iota(jnp.uint32, (size // FLAT_MULTIPLE, FLAT_MULTIPLE), 1).reshape(size)
    beyond = row // jnp.uint32(2**32 // FLAT_MULTIPLE)
    return row * jnp.uint32(FLAT_MULTIPLE) + column + beyond * jnp.uint32(198_491_317)


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
