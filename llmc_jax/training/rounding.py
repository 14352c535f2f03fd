"""Rounding to 16 bits at random: right in expectation, and the same wherever it is computed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.models.tensors import FLAT_MULTIPLE


class Rows(NamedTuple):
    """Where the elements of a part of the flat buffer stand in it: in rows of it, one after the other."""

    numbers: jax.Array  # (r,) int32, of the row that each is
    length: int  # elements of a row


def squirrel_noise5(position: jax.Array, seed: jax.Array) -> jax.Array:
    """Return a hash of positions and a seed, both uint32, to 32 bits that look random: the same everywhere.

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


def round_stochastically(values: jax.Array, seed: jax.Array, rows: Rows | None = None) -> jax.Array:
    """Round a flat buffer (flat_size,), or some rows of it, from float32 to bfloat16: up or down at random.

    Right in expectation.
    Of two neighbours the nearer is the likelier: with low = the 16 bits that bfloat16 drops, the magnitude goes up
    with probability low / 2^16. So what bfloat16 holds exactly stays, and an update too small to change a parameter by
    rounding to nearest still does so now and then. NaN stays NaN. Source: llm.c llmc/cuda_utils.cuh,
    `stochastic_rounding`, there with another position.
    """
    values = values.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    noise = squirrel_noise5(_noise_positions(values.size) if rows is None else _noise_positions_of(rows), seed)
    up = (bits & 0xFFFF) > (noise & 0xFFFF)
    rounded = ((bits >> 16) + up.astype(jnp.uint32)).astype(jnp.uint16)  # a carry goes into the exponent, as it should
    return jnp.where(jnp.isnan(values), jnp.bfloat16(jnp.nan), jax.lax.bitcast_convert_type(rounded, jnp.bfloat16))


def rounded(
    values: jax.Array, dtype: Any, rounding: str, seed: jax.Array | None, rows: Rows | None = None
) -> jax.Array:
    """Return values in dtype, rounded as `check_rounding` allows; with a seed () uint32 stochastically."""
    if rounding == "nearest" or seed is None:
        return values.astype(dtype)
    return round_stochastically(values, seed, rows)


def rounding_seed(seed: jax.Array, step: jax.Array) -> jax.Array:
    """Return the seed of one step's stochastic rounding, uint32: a function of the run's seed and the step alone."""
    return squirrel_noise5(step.astype(jnp.uint32), jnp.asarray(seed, jnp.uint32))


def check_rounding(params: jax.Array, copy: jax.Array | None, rounding: str, seed: jax.Array | None) -> None:
    """Raise ValueError for params, a copy, a rounding and a seed that do not go together."""
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
    """Return what to hash for each element of a flat buffer (size,), uint32: its position, while 32 bits count them.

    Beyond, each further 2^32 elements are the low 32 bits and a shift: llm.c's way to hash two numbers.
    """
    if size <= 2**32:
        return jax.lax.iota(jnp.uint32, size)
    row = jax.lax.broadcasted_iota(jnp.uint32, (size // FLAT_MULTIPLE, FLAT_MULTIPLE), 0).reshape(size)
    column = jax.lax.broadcasted_iota(jnp.uint32, (size // FLAT_MULTIPLE, FLAT_MULTIPLE), 1).reshape(size)
    beyond = row // jnp.uint32(2**32 // FLAT_MULTIPLE)
    return row * jnp.uint32(FLAT_MULTIPLE) + column + beyond * jnp.uint32(198_491_317)


def _noise_positions_of(rows: Rows) -> jax.Array:
    """Return what `_noise_positions` has at the elements of some rows, of at most 2^16 each: uint32."""
    number, length = rows.numbers.astype(jnp.uint32)[:, None], jnp.uint32(rows.length)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows.numbers.size, rows.length), 1)
    low = number * length + column  # modulo 2^32
    # How often it exceeded 2^32: the product's upper half, of 16-bit halves, and the carry of the addition.
    upper = ((number >> 16) * length + (((number & 0xFFFF) * length) >> 16)) >> 16
    beyond = upper + (low < column).astype(jnp.uint32)
    return (low + beyond * jnp.uint32(198_491_317)).reshape(-1)
