"""Layer normalisation, alone and after the residual's addition, as Triton kernels.

Mathematics: llmc_jax/ops/layernorm.py. One program takes a row of C channels in registers. In the backward it takes
every G-th row, so that its share of the sums over rows stays in registers too, and XLA adds up the G shares: their
order is fixed, nothing is atomic. Any C; 16-byte accesses where C is a multiple of 8 (bf16).
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's parameters: those without one are pointers and numbers of the launch.

import math
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from llmc_jax.kernels.triton.call import call, check_dtype, warps_for
from llmc_jax.ops.layernorm import EPS
from pallas_kernels.tuning import sizes

PROGRAMS_PER_SM = 4  # of the backward: 16 warps at C = 768, each thread with 32 bytes on their way

# ----- kernels: x, w, ... point to arrays, `row` is the row's number --------------------------------------------------


@triton.jit
def _normalise(x, w, b, out, mean, rstd, row, C: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Write out, mean and rstd of one row, given as x (BLOCK,) fp32 with zeros from C on."""
    column = tl.arange(0, BLOCK)
    inside = column < C
    average = tl.sum(x, 0) / C
    centred = tl.where(inside, x - average, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + EPS)
    scale = tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * C + column, centred * inverse * scale + shift, mask=inside)
    tl.store(mean + row, average)
    tl.store(rstd + row, inverse)


@triton.jit
def _forward(x, w, b, out, mean, rstd, C: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # an index into more than 2^31 elements
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * C + column, mask=column < C, other=0.0).to(tl.float32)
    _normalise(values, w, b, out, mean, rstd, row, C, EPS, BLOCK)


@triton.jit
def _residual_forward(x, f, w, b, residual, out, mean, rstd, C: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    values = tl.load(x + row * C + column, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(f + row * C + column, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(residual.dtype.element_ty)
    tl.store(residual + row * C + column, rounded, mask=inside)
    _normalise(rounded.to(tl.float32), w, b, out, mean, rstd, row, C, EPS, BLOCK)


@triton.jit
def _gradient(dout, x, w, mean, rstd, row, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return dx, the row's share of dw, and dout, each (BLOCK,) fp32 with zeros from C on."""
    column = tl.arange(0, BLOCK)
    inside = column < C
    x_row = tl.load(x + row * C + column, mask=inside, other=0.0).to(tl.float32)
    dout_row = tl.load(dout + row * C + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(w + column, mask=inside, other=0.0).to(tl.float32)  # from a cache after the first row
    inverse = tl.load(rstd + row)
    norm = tl.where(inside, (x_row - tl.load(mean + row)) * inverse, 0.0)
    dnorm = dout_row * scale
    dx = (dnorm - tl.sum(dnorm, 0) / C - norm * (tl.sum(dnorm * norm, 0) / C)) * inverse
    return dx, dout_row * norm, dout_row


@triton.jit
def _backward(
    dresidual, dout, x, w, mean, rstd, dx, dw, db, dbias,
    N: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Write dx and the program's shares of the sums over rows. dresidual is read and added with RESIDUAL alone."""
    first, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < C
    dw_share = tl.zeros((BLOCK,), tl.float32)
    db_share = tl.zeros((BLOCK,), tl.float32)
    dbias_share = tl.zeros((BLOCK,), tl.float32)
    for turn in range(0, tl.cdiv(N - first, programs)):
        row = first.to(tl.int64) + turn * programs
        dx_row, dw_row, db_row = _gradient(dout, x, w, mean, rstd, row, C, BLOCK)
        if RESIDUAL:
            dx_row += tl.load(dresidual + row * C + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * C + column, dx_row, mask=inside)
        dw_share += dw_row
        db_share += db_row
        dbias_share += dx_row
    tl.store(dw + first * C + column, dw_share, mask=inside)
    tl.store(db + first * C + column, db_share, mask=inside)
    tl.store(dbias + first * C + column, dbias_share, mask=inside)


# ----- the operations -----------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("target", "interpret"))
def layernorm_forward(
    x: jax.Array, w: jax.Array, b: jax.Array, *, target: str = "sm_90", interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise x (..., C) over its last axis, scale by w (C,) and shift by b (C,), all in fp32.

    Returns out (..., C) in x's dtype, mean and rstd (...) fp32. x, w, b: bf16, fp16 or fp32.
    Bytes for N rows, at least: 2 N C size(x) + 8 N + 2 C size(w): memory bandwidth is the floor.
    """
    statistics = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype), statistics, statistics]
    out, mean, rstd = _rows(_forward, [x, w, b], outputs, target, interpret)
    return out, mean, rstd


@partial(jax.jit, static_argnames=("target", "interpret"))
def residual_layernorm_forward(
    x: jax.Array, f: jax.Array, w: jax.Array, b: jax.Array, *, target: str = "sm_90", interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute residual = x + f (..., C), rounded to x's dtype, and its layernorm.

    Returns residual and out (..., C) in x's dtype, mean and rstd (...) fp32.
    Bytes for N rows, at least: 4 N C size(x) + 8 N + 2 C size(w): memory bandwidth is the floor.
    """
    statistics = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    same = jax.ShapeDtypeStruct(x.shape, x.dtype)
    outputs = [same, same, statistics, statistics]
    residual, out, mean, rstd = _rows(_residual_forward, [x, f, w, b], outputs, target, interpret)
    return residual, out, mean, rstd


@partial(jax.jit, static_argnames=("target", "interpret"))
def layernorm_backward(
    dout: jax.Array,
    x: jax.Array,
    w: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    *,
    target: str = "sm_90",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the gradients of layernorm: dx (..., C) in x's dtype, dw and db (C,) in w's, the sum of dx over rows (C,).

    dout, x (..., C), w (C,); mean, rstd (...) fp32 as the forward returned them.
    Bytes for N rows, at least: 3 N C size(x) + 8 N + 3 C size(w). Besides, the G = min(N, 4 SMs) shares of dw, db
    and dbias are written and read: 24 G C, in bf16 at N = 8192 on 132 SMs a quarter of the rest.
    """
    return _gradients(None, dout, x, w, mean, rstd, target, interpret)


@partial(jax.jit, static_argnames=("target", "interpret"))
def residual_layernorm_backward(
    dresidual: jax.Array,
    dout: jax.Array,
    residual: jax.Array,
    w: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    *,
    target: str = "sm_90",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the gradients of residual + layernorm: dx (..., C), dw and db (C,), the sum of dx over rows (C,).

    dx, of x and of f alike, is dresidual + layernorm's dx, summed in fp32 and rounded once. dresidual: what
    reaches the residual from above.
    Bytes for N rows, at least: 4 N C size(x) + 8 N + 3 C size(w), and the shares as in `layernorm_backward`.
    """
    return _gradients(dresidual, dout, residual, w, mean, rstd, target, interpret)


def _rows(
    kernel: triton.JITFunction,
    inputs: list[jax.Array],
    outputs: list[jax.ShapeDtypeStruct],
    target: str,
    interpret: bool,
) -> list[jax.Array]:
    """Run one program per row of the first input (..., C)."""
    for name, array in zip("xfwb" if len(inputs) == 4 else "xwb", inputs, strict=True):
        check_dtype(name, array)
    *rows, C = inputs[0].shape
    block = triton.next_power_of_2(C)  # the rest is masked
    return call(
        kernel, *inputs, outputs=outputs, programs=math.prod(rows), warps=warps_for(block), target=target,
        interpret=interpret, C=C, EPS=EPS, BLOCK=block,
    )  # fmt: skip


def _gradients(
    dresidual: jax.Array | None,
    dout: jax.Array,
    x: jax.Array,
    w: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    target: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return dx (..., C), dw, db, the sum of dx (C,), by programs that take rows in turn, whose shares are added."""
    check_dtype("x", x)
    check_dtype("w", w)
    *rows, C = x.shape
    N = math.prod(rows)
    programs = min(N, PROGRAMS_PER_SM * sizes(target).sms)
    share = jax.ShapeDtypeStruct((programs, C), jnp.float32)
    block = triton.next_power_of_2(C)  # the rest is masked
    dx, dw, db, dbias = call(
        _backward, dout if dresidual is None else dresidual, dout, x, w, mean, rstd,
        outputs=[jax.ShapeDtypeStruct(x.shape, x.dtype), share, share, share], programs=programs,
        warps=warps_for(block), target=target, interpret=interpret, N=N, C=C, BLOCK=block,
        RESIDUAL=dresidual is not None,
    )  # fmt: skip
    return dx, jnp.sum(dw, 0).astype(w.dtype), jnp.sum(db, 0).astype(w.dtype), jnp.sum(dbias, 0).astype(x.dtype)
