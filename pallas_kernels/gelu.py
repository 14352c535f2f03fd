"""GELU on the GPU, in the tanh approximation that GPT-2 was trained with: one element at a time, 16-byte accesses.

    out = x/2 (1 + tanh u) = x s,    u = sqrt(2/pi) (x + 0.044715 x^3),    s = 1 / (1 + exp(-2 u))

s instead of tanh: (1 + tanh u)/2 is the logistic function of 2 u, which costs one exponential and one division where a
tanh costs a polynomial besides, and keeps its digits for x far below zero, where 1 + tanh u cancels. In the backward
(1 - tanh^2 u)/2 becomes 2 s (1 - s). The exponential is the hardware's ex2.approx, to 2 units in the last place of
fp32; what that does to the result is measured in tests/pallas_kernels/test_gelu.py. The hardware's tanh.approx is
off by up to 5e-4, more than bf16 rounds where GELU is small.

Leaves out float64, and the bias and the product before it, which XLA fuses. Source: llmc_jax/ops/gelu.py.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import THREADS, f32, load, round_up, store, widest
from pallas_kernels.tuning import Sizes, sizes

CUBIC = 0.044715
SLOPE = 2.0 * math.sqrt(2.0 / math.pi)  # of 2 u at zero
SLOPE2 = SLOPE * math.log2(math.e)  # for exponents in base 2, which is what the hardware computes


@partial(jax.jit, static_argnames=("target", "interpret"))
def gelu_forward(x: jax.Array, *, target: str = "sm_90", interpret: bool = False) -> jax.Array:
    """Compute GELU of x, any shape, bf16, fp16 or fp32; computed in fp32 and returned in x's dtype.

    Compulsory bytes for n elements: 2 n itemsize. On an H200 (4.8 TB/s) d12's 65,536 rows of 3072 bf16 take no less
    than 168 us. Alignment: n to a multiple of 1024, else it is padded, by copies.
    """
    n = x.size
    n_up = round_up(n, 8 * THREADS)
    block = sizes(target).gelu_block
    while n_up % block:
        block //= 2
    layout = mosaic.flat_layout(block, widest(x.dtype))

    def body(x_ref: Any, out_ref: Any) -> None:
        here = lax.axis_index("block")  # a row of (blocks, block): no index counts elements, which may be over 2^31
        store(out_ref.at[here], forward(load(x_ref.at[here], layout, f32), exact=x.dtype == f32).astype(x.dtype))

    out = mosaic.kernel(
        body,
        name="gelu_forward",
        out_type=mosaic.shape_of((n_up // block, block), x.dtype),
        grid=(n_up // block,),
        grid_names=("block",),
        approx_math=True,
        auto_barriers=False,  # a thread reads inputs and writes the output, and nobody reads that
        interpret=interpret,
    )(jnp.pad(x.reshape(n), (0, n_up - n)).reshape(-1, block))
    return out.reshape(n_up)[:n].reshape(x.shape)


@partial(jax.jit, static_argnames=("target", "interpret"))
def gelu_backward(
    dout: jax.Array, x: jax.Array, *, target: str = "sm_90", interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of GELU at x (..., C): dx (..., C) and its sum over all rows, dbias (C,), in x's dtype.

    dout has x's shape. The sum is of dx in fp32, before it is rounded.
    Compulsory bytes for n elements: 3 n itemsize, and C of them. On an H200 d12's 65,536 rows of 3072 bf16 take no less
    than 252 us. Beyond them, each block's sums are written and read once: 8 C shares, see `shares_of`.
    Alignment: C to a multiple of 256 (fp32: 128), n / C to one of 8 (fp32: 16); else they are padded, by copies.
    """
    C = x.shape[-1]
    n = x.size // C
    size = sizes(target)
    plan = plan_strips(C, widest(x.dtype), size.gelu_block)
    tiles = round_up(n, plan.rows) // plan.rows
    shares = shares_of(size, plan, tiles)
    up = tiles * plan.rows, plan.columns
    dx, of_shares = mosaic.kernel(
        partial(_backward_strips, plan=plan, tiles=tiles),
        name="gelu_backward",
        out_type=[mosaic.shape_of(up, x.dtype), mosaic.shape_of((shares, plan.columns), f32)],
        grid=(shares, plan.columns // plan.strip),
        grid_names=("share", "strip"),
        scratch=mosaic.sums_scratch(plan.at_once, plan.parts),
        approx_math=True,
        auto_barriers=False,  # where a thread reads what another wrote, `store_sums` has barriers
        interpret=interpret,
    )(*[jnp.pad(array.reshape(n, C), [(0, to - given) for to, given in zip(up, (n, C), strict=True)])
        for array in (dout, x)])  # fmt: skip
    dbias = jnp.sum(of_shares[:, :C], axis=0).astype(x.dtype)  # rows of padding have dout 0 and add nothing
    return dx[:n, :C].reshape(x.shape), dbias


class Strips(NamedTuple):
    """How the backward divides an array: a block goes down the rows of one strip of columns, and keeps its sums."""

    columns: int  # of the array, after padding
    strip: int  # columns of a block
    at_once: int  # rows of which each warpgroup holds one access
    rows: int  # that are on their way together
    parts: list[mosaic.Part]  # of the strip: one


def plan_strips(columns: int, vector: int, block: int) -> Strips:
    """Return the widest strips that divide the columns, so that accesses are long runs; block: elements at a time."""
    columns = round_up(columns, mosaic.LANES * vector)
    team = next(team for team in (4, 2, 1) if columns % (mosaic.LANES * vector * team) == 0)  # warps that share a row
    strip, at_once = mosaic.LANES * vector * team, mosaic.WARPS // team
    turns = max(1, block // (strip * at_once))
    return Strips(columns, strip, at_once, at_once * turns, mosaic.row_parts(strip, team, vector))


def shares_of(size: Sizes, plan: Strips, tiles: int) -> int:
    """Return the blocks that share a strip's rows: those that the GPU runs at once, if there are so many rows."""
    return max(1, min(size.sms * size.gelu_blocks * plan.strip // plan.columns, tiles))


def _backward_strips(
    dout_ref: Any, x_ref: Any, dx_ref: Any, sums_ref: Any, *scratch: Any, plan: Strips, tiles: int
) -> None:
    """Do one strip's rows of one share, `plan.rows` at a time, with the sums of the rows so far in registers."""
    share, shares = lax.axis_index("share"), lax.axis_size("share")
    columns = pl.ds(lax.axis_index("strip") * plan.strip, plan.strip)
    layout = plan.parts[0].layout

    def tile(k: Any, sums: jax.Array) -> jax.Array:
        start = (share + k * shares) * plan.rows
        places = [(pl.ds(start + row, plan.at_once), columns) for row in range(0, plan.rows, plan.at_once)]
        loaded = [[load(ref.at[place], layout) for ref in (dout_ref, x_ref)] for place in places]
        for place, pair in zip(places, loaded, strict=True):
            dx = backward(*(values.astype(f32) for values in pair), exact=dx_ref.dtype == f32)  # (at_once, strip)
            store(dx_ref.at[place], dx.astype(dx_ref.dtype))
            sums = sums + dx
        return sums

    nothing = mosaic.zeros((plan.at_once, plan.strip), layout)
    sums = lax.fori_loop(0, pl.cdiv(tiles - share, shares), tile, nothing)
    mosaic.store_sums(sums_ref.at[pl.ds(share, 1), columns], plan.parts, [sums], scratch)


def forward(x: jax.Array, *, exact: bool = False) -> jax.Array:
    """Return GELU of float32 registers. exact: as float32 has it; else for a result that is rounded to 16 bits."""
    return x * _logistic(x, x * x, exact)


def backward(dout: jax.Array, x: jax.Array, *, exact: bool = False) -> jax.Array:
    """Return the gradient of GELU at x, both float32 registers, in few instructions. exact: as in `forward`."""
    square = x * x
    s = _logistic(x, square, exact)
    du = SLOPE + (3.0 * SLOPE * CUBIC) * square  # of 2 u
    xs = x * s
    return dout * (s + (xs - xs * s) * du)


def _logistic(x: jax.Array, square: jax.Array, exact: bool) -> jax.Array:
    """Return 1 / (1 + exp(-2 u)): 0 where exp overflows.

    Unless exact, as the square of rsqrt, which the hardware has to within 2^-22.9, and of 1 exactly: a division costs
    five instructions, and the epilogue of a product (matmul.py) has time for twenty.
    """
    total = 1.0 + jnp.exp2(x * (-SLOPE2 - (SLOPE2 * CUBIC) * square))
    if exact:
        return 1.0 / total
    root = lax.rsqrt(total)
    return root * root
