"""AdamW and the global norm on the GPU: each one pass over the flat buffers, everything changed where it lies.

The mathematics stands in llmc_jax/training/rules/adamw.py, whose jnp functions have the same names and results. Leaves
out the schedule, clipping and the decision whether to apply an update.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.tuning import sizes

BLOCK = 1024  # elements per program of AdamW; buffers divide by it
NORM_BLOCK = 16_384  # elements that one program of the norm sums, at most
Ranges = tuple[tuple[int, int], ...]


@partial(jax.jit, static_argnames=("decay", "rounding", "target", "interpret"))
def adamw_update(
    params: jax.Array,
    m: jax.Array,
    v: jax.Array,
    gradient: jax.Array,
    *,
    scale: Any,
    learning_rate: Any,
    update: Any,
    apply: Any,
    numbers: Any,
    decay: Ranges,
    copy: jax.Array | None = None,
    rounding: str = "nearest",
    seed: Any = None,
    rows: Any = None,
    target: str = "sm_90",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Update flat params, m and v (n,) by scale * gradient; returns the new three and the copy.

    params: fp32 master weights, or bf16/fp16 without any; m, v fp32; gradient bf16, fp16 or fp32. copy: the master
    weights in bf16 or fp16 (n,), written anew, or None. In place where the caller donates params, m, v and copy.
    scale, learning_rate, update (counted from 1), apply (bool) are scalars, numbers has beta1, beta2, eps and
    weight_decay; all may be traced. decay: ranges [start, stop) that weight decay applies to. rounding: 'nearest' or
    'stochastic' with a seed () uint32, of what is rounded to bf16; its bits are those of the jnp round_stochastically.
    apply False changes nothing, and then almost nothing is read.

    Compulsory bytes: n (2 itemsize(params) + 16 + itemsize(gradient) + itemsize(copy)), 28 n for fp32 params with a
    bf16 gradient and copy: 3.5 GB for d12's 124,518,400, so 0.73 ms on a card of 4.8 TB/s.
    Alignment: n a multiple of 1024 (the trainer's buffers are padded to one of 65,536). Raises ValueError for another,
    for roundings and copies that make no sense, and for the rows that a part of the buffers has: these are whole ones.
    """
    if rows is not None:
        raise ValueError("the kernel updates whole buffers: for some of their rows take the jnp adamw_update")
    _check_update(params, m, v, gradient, copy, rounding, seed)
    n = params.size
    blocks = n // BLOCK
    vector = sizes(target).adamw_vector
    stochastic = rounding == "stochastic"
    corrections = (1.0 / (1.0 - numbers.beta1**update), 1.0 / (1.0 - numbers.beta2**update))
    listed = (
        scale, learning_rate, *corrections, numbers.beta1, numbers.beta2, numbers.eps, numbers.weight_decay,
    )  # fmt: skip
    scalars = jnp.stack([jnp.asarray(number, jnp.float32) for number in listed])
    switches = jnp.stack([jnp.asarray(apply, jnp.uint32), jnp.asarray(seed if stochastic else 0, jnp.uint32)])
    changed = [params, m, v] + ([] if copy is None else [copy])
    call = mosaic.kernel(
        partial(_adamw_body, layout=mosaic.flat_layout(BLOCK, vector), decay=decay, stochastic=stochastic),
        name="adamw_update",
        out_type=(),
        grid=(blocks,),
        grid_names=("row",),
        auto_barriers=False,  # a thread reads and writes its own elements alone
        interpret=interpret,
    )
    # Rows of a block: 32 bits count the rows of any buffer, but not the elements of one above 2^31.
    inputs = (scalars, switches, gradient.reshape(blocks, BLOCK))
    _, after = mosaic.in_place(call, inputs, [buffer.reshape(blocks, BLOCK) for buffer in changed])
    flat = [buffer.reshape(n) for buffer in after]
    return flat[0], flat[1], flat[2], None if copy is None else flat[3]


def _adamw_body(
    scalars_ref: Any, switches_ref: Any, gradient_ref: Any, *refs: Any, layout: Any, decay: Ranges, stochastic: bool
) -> None:
    """Update one row of BLOCK elements."""
    params_ref, m_ref, v_ref = refs[:3]
    row = lax.axis_index("row")

    @pl.when(switches_ref[0] != 0)
    def _() -> None:
        scale, rate, correction1, correction2, beta1, beta2, eps, weight_decay = (scalars_ref[k] for k in range(8))
        g = mosaic.load(gradient_ref.at[row], layout, mosaic.f32) * scale
        p = mosaic.load(params_ref.at[row], layout, mosaic.f32)
        m = beta1 * mosaic.load(m_ref.at[row], layout) + (1.0 - beta1) * g
        v = beta2 * mosaic.load(v_ref.at[row], layout) + (1.0 - beta2) * g * g
        change = m * correction1 / (jnp.sqrt(v * correction2) + eps)
        if decay:
            change = change + jnp.where(_decays(row, decay, layout), weight_decay * p, 0.0)
        p = p - rate * change
        mosaic.store(m_ref.at[row], m)
        mosaic.store(v_ref.at[row], v)
        for ref in (params_ref, *refs[3:]):
            if stochastic and ref.dtype == jnp.bfloat16:
                mosaic.store(ref.at[row], _round_stochastically(p, row, switches_ref[1], layout))
            else:
                mosaic.store(ref.at[row], p.astype(ref.dtype))


def _decays(row: Any, ranges: Ranges, layout: Any) -> jax.Array:
    """Return boolean (BLOCK,): which elements of a row lie in one of the ranges."""
    column = mosaic.iota((BLOCK,), 0, layout)
    inside = None
    for start, stop in ranges:
        here = (column >= _column(start, row)) & (column < _column(stop, row))
        inside = here if inside is None else inside | here
    assert inside is not None
    return inside


def _column(position: int, row: Any) -> Any:
    """Return where a position of the buffer lies, seen from a row: its column, or beyond the row's end on that side."""
    there, column = divmod(position, BLOCK)
    return jnp.clip(there - row, -1, 1) * BLOCK + column


def _round_stochastically(values: jax.Array, row: Any, seed: Any, layout: Any) -> jax.Array:
    """Round as the function of the same name in llmc_jax/training/rounding.py, bit for bit."""
    column = mosaic.iota((BLOCK,), 0, layout).astype(jnp.uint32)
    row = row.astype(jnp.uint32)
    beyond = row // jnp.uint32(2**32 // BLOCK)  # how often 32 bits have overflowed: 0 below 2^32 elements
    noise = _squirrel_noise5(column + (row * jnp.uint32(BLOCK) + beyond * jnp.uint32(198_491_317)), seed)
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    kept = bits & jnp.uint32(0xFFFF0000)
    up = (bits & jnp.uint32(0xFFFF)) > (noise & jnp.uint32(0xFFFF))
    rounded = jnp.where(up, kept + jnp.uint32(0x10000), kept)
    finite = (bits & jnp.uint32(0x7F800000)) != jnp.uint32(0x7F800000)  # NaN keeps what makes it one
    return jnp.where(finite, lax.bitcast_convert_type(rounded, jnp.float32), values).astype(jnp.bfloat16)


def _squirrel_noise5(position: jax.Array, seed: Any) -> jax.Array:
    """Compute squirrel_noise5 of llmc_jax/training/rounding.py."""
    bits = position * jnp.uint32(0xD2A80A3F) + seed
    bits = bits ^ (bits >> jnp.uint32(9))
    bits = bits + jnp.uint32(0xA884F197)
    bits = bits ^ (bits >> jnp.uint32(11))
    bits = bits * jnp.uint32(0x6C736F4B)
    bits = bits ^ (bits >> jnp.uint32(13))
    bits = bits + jnp.uint32(0xB79F3ABB)
    bits = bits ^ (bits >> jnp.uint32(15))
    bits = bits * jnp.uint32(0x1B56C4F5)
    return bits ^ (bits >> jnp.uint32(17))


def _check_update(
    params: jax.Array, m: jax.Array, v: jax.Array, gradient: jax.Array, copy: Any, rounding: str, seed: Any
) -> None:
    buffers = [params, m, v, gradient] + ([] if copy is None else [copy])
    if any(buffer.shape != (params.size,) for buffer in buffers):
        raise ValueError(f"shapes {[buffer.shape for buffer in buffers]}: expected flat buffers of one size")
    _check_size(params.size)
    if m.dtype != jnp.float32 or v.dtype != jnp.float32:
        raise ValueError(f"m is {m.dtype}, v {v.dtype}: the kernel keeps both in float32")
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


def _check_size(n: int) -> None:
    if n == 0 or n % BLOCK:
        raise ValueError(f"a flat buffer of {n} elements; pad it with zeros to a multiple of {BLOCK}")


# ----- the norm -----------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("target", "interpret"))
def global_norm(gradient: jax.Array, *, target: str = "sm_90", interpret: bool = False) -> jax.Array:
    """Return the L2 norm of a flat gradient (n,) bf16, fp16 or fp32, a scalar fp32; the same bits every time.

    A program sums the squares of up to 16,384 neighbours, each thread its own in one order; XLA sums the programs'.
    Compulsory bytes: n itemsize. 0.25 GB for d12 in bf16, so 52 us on a card of 4.8 TB/s.
    Alignment: n a multiple of 1024. Raises ValueError for another.
    """
    del target  # the same for all
    (n,) = gradient.shape
    _check_size(n)
    per_program = math.gcd(n, NORM_BLOCK)
    programs, rounds = n // per_program, per_program // BLOCK
    layout = mosaic.flat_layout(BLOCK, mosaic.widest(gradient.dtype))

    def body(gradient_ref: Any, sums_ref: Any) -> None:
        i = lax.axis_index("program")
        pieces = [mosaic.load(gradient_ref.at[i, k], layout) for k in range(rounds)]  # all on their way at once
        total = mosaic.zeros((BLOCK,), layout)
        for piece in pieces:
            wide = piece.astype(jnp.float32)
            total = total + wide * wide
        sums_ref[i] = jnp.sum(total)

    call = mosaic.kernel(
        body,
        name="global_norm",
        out_type=mosaic.shape_of((programs,), jnp.float32),
        grid=(programs,),
        grid_names=("program",),
        auto_barriers=False,  # nothing that is written is read
        interpret=interpret,
    )
    return jnp.sqrt(jnp.sum(call(gradient.reshape(programs, rounds, BLOCK))))
