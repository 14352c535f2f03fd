"""Layer normalisation on the GPU, alone and together with the addition to the residual stream before it.

A team of one, two or four warps holds a row in registers: x is read once, its mean and its variance are taken from
registers, out is written once. Rows too long for that are read in blocks, several times, of which the first comes from
memory and the others from a cache. The gradients of w and b are sums over all rows, and so is that of the bias of the
linear layer before: the backward's grid is as large as the GPU, each block goes over its share of the rows with its own
sums, and these few rows of sums are added afterwards: no atomics, the same bits each time. docs/kernels/layernorm.md
has drawings.

Leaves out dropout, float64, and rows longer than `longest_row`.

Source of the mathematics: llmc_jax/ops/layernorm.py; of the row per warp: llm.c llmc/layernorm.cuh.
"""

from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import Part, along, f32, load, round_up, store, widest
from pallas_kernels.tuning import Sizes, sizes

EPS = 1e-5  # llm.c's and PyTorch's
BLOCKS = (4096, 2048, 1024)  # columns that a streamed row is read by: the largest that divides it
AHEAD = 800  # columns that a warp may hold in 16 bits beside those it computes with: with more, registers spill


# ----- the operations -----------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("target", "interpret"))
def layernorm_forward(
    x: jax.Array, w: jax.Array, b: jax.Array, *, target: str = "sm_90", interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise x (..., C) over its last axis, scale by w (C,) and shift by b (C,).

    x bf16, fp16 or fp32; w, b of any float dtype. Returns out (..., C) in x's dtype, mean and rstd (...) in fp32.
    Compulsory bytes for n rows: 2 n C itemsize + 8 n + both of w and b. On an H200 (4.8 TB/s) d12's 65,536 rows of
    768 bf16 take no less than 42 us. Alignment: C to a multiple of 32, n to one of 4; else they are padded, by copies.
    """
    _, out, mean, rstd = _forward(x, None, w, b, target, interpret)
    return out, mean, rstd


@partial(jax.jit, static_argnames=("target", "interpret"))
def residual_layernorm_forward(
    x: jax.Array, f: jax.Array, w: jax.Array, b: jax.Array, *, target: str = "sm_90", interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Add f to the stream x, both (..., C), and normalise the sum: residual, out (..., C), mean and rstd (...).

    f in x's dtype; the sum is rounded to it before it is normalised. Otherwise as `layernorm_forward`.
    Compulsory bytes for n rows: 4 n C itemsize + 8 n + both of w and b; apart, the two operations move 5 n C itemsize.
    On an H200 d12's 65,536 rows of 768 bf16 take no less than 84 us.
    """
    if f.dtype != x.dtype:
        raise ValueError(f"f is {f.dtype} and x is {x.dtype}: both must have the stream's dtype")
    return _forward(x, f, w, b, target, interpret)


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
    """Return layernorm's gradients: dx (..., C) in x's dtype, and three sums over all rows in fp32: dw, db, dbias (C,).

    dout and x (..., C) bf16, fp16 or fp32, w (C,), mean and rstd (...) fp32 as the forward returned them. dbias is the
    sum of dx before it is rounded, or after where rows are streamed. Whoever puts the sums into the gradient rounds
    them, without a kernel for it.
    Compulsory bytes for n rows: 3 n C itemsize + 8 n + four of w. On an H200 d12's 65,536 rows of 768 bf16 take no
    less than 63 us. Beyond them, each block's three sums are written and read once: 24 C blocks, see `blocks`.
    Alignment: C to a multiple of 32, n to one of 4; else they are padded, by copies.
    """
    return _backward(None, dout, x, w, mean, rstd, target, interpret)


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
    """Return `residual_layernorm_forward`'s gradients: dx (..., C), also df, and in fp32 dw, db, dbias (C,).

    dresidual (..., C) reaches the sum from further down the stream, dout (..., C) its layernorm; the two meet in fp32
    and are rounded once. Compulsory bytes for n rows: 4 n C itemsize + 8 n + four of w; apart, the layernorm's
    gradient and the addition move 6 n C itemsize. On an H200 d12's 65,536 rows of 768 bf16 take no less than 84 us.
    """
    return _backward(dresidual, dout, residual, w, mean, rstd, target, interpret)


# ----- plans --------------------------------------------------------------------------------------------------------


class RowLayout(NamedTuple):
    """How rows are held."""

    team: int  # warps that hold a row in registers together; 0: rows are streamed in blocks
    rows: int  # that a warpgroup holds at a time
    columns: int  # of a row, after padding
    block: int  # columns of one of a streamed row's blocks


def plan_rows(columns: int, limits: tuple[int, int, int]) -> RowLayout:
    """Return the smallest team that holds a row of so many columns. limits: the longest rows of 1, 2 and 4 warps."""
    for team, longest in zip((1, 2, 4), limits, strict=True):
        if columns <= longest:
            return RowLayout(team, mosaic.WARPS // team, round_up(columns, mosaic.LANES * team), 0)
    columns = round_up(columns, BLOCKS[-1])
    return RowLayout(0, 1, columns, next(block for block in BLOCKS if columns % block == 0))


def blocks(size: Sizes, plan: RowLayout, rows: int) -> int:
    """Return the blocks that share the backward's rows: those that the GPU runs at once, if there are so many rows."""
    return max(1, min(size.sms * size.layernorm_blocks, rows // plan.rows))


def longest_row(target: str) -> int:
    """Return the columns that the backward can do: a streamed row's sums for dw and db lie in shared memory."""
    reserved = 3072  # what Mosaic's sums across warps take, and a kilobyte that the hardware keeps
    return (sizes(target).smem - reserved) // 8 // BLOCKS[-1] * BLOCKS[-1]


def _row_sums(parts: list[jax.Array]) -> jax.Array:
    """Return sums over whole rows, (rows,), of their parts (rows, part)."""
    return reduce(add, [values.sum(1) for values in parts])


def _padded(array: jax.Array, *shape: int) -> jax.Array:
    """Put zeros behind the rows and columns; return the array itself where it has that shape."""
    widths = [(0, to - size) for size, to in zip(array.shape, shape, strict=True)]
    return jnp.pad(array, widths) if any(after for _, after in widths) else array


# ----- forward ------------------------------------------------------------------------------------------------------


def _forward(
    x: jax.Array, f: jax.Array | None, w: jax.Array, b: jax.Array, target: str, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return residual, out, mean, rstd. Without f, residual is x."""
    rows_shape, C = x.shape[:-1], x.shape[-1]
    n = x.size // C
    plan = plan_rows(C, sizes(target).layernorm_forward)
    n_up = round_up(n, plan.rows)
    body = _forward_streamed if plan.team == 0 else _forward_held
    streams = [_padded(array.reshape(n, C), n_up, plan.columns) for array in (x, f) if array is not None]
    like_x, per_row = mosaic.shape_of((n_up, plan.columns), x.dtype), mosaic.shape_of((n_up,), f32)
    name = "layernorm_forward" if f is None else "residual_layernorm_forward"
    outputs = mosaic.kernel(
        mosaic.without(partial(body, C=C, plan=plan), () if f is not None else (1, 4)),
        name=name,
        out_type=[like_x] * len(streams) + [per_row] * 2,
        grid=(n_up // plan.rows,),
        grid_names=("tile",),
        auto_barriers=False,  # no thread reads what another wrote
        interpret=interpret,
    )(*streams, _padded(w, plan.columns), _padded(b, plan.columns))
    *wide, mean, rstd = outputs
    residual, out = wide if f is not None else (x, wide[0])
    if f is not None:
        residual = residual[:n, :C].reshape(x.shape)
    return residual, out[:n, :C].reshape(x.shape), mean[:n].reshape(rows_shape), rstd[:n].reshape(rows_shape)


def _forward_held(
    x_ref: Any, f_ref: Any, w_ref: Any, b_ref: Any, residual_ref: Any, out_ref: Any, mean_ref: Any, rstd_ref: Any,
    *, C: int, plan: RowLayout,
) -> None:  # fmt: skip
    """Do `plan.rows` rows at a time, each in the registers of its team. f_ref and residual_ref may be absent."""
    parts = mosaic.row_parts(plan.columns, plan.team, widest(x_ref.dtype))
    rows = pl.ds(lax.axis_index("tile") * plan.rows, plan.rows)

    x = [load(x_ref.at[rows, part.columns], part.layout) for part in parts]  # (rows, part) each
    if f_ref is not None:
        f = [load(f_ref.at[rows, part.columns], part.layout) for part in parts]
        x = [(x.astype(f32) + f.astype(f32)).astype(x.dtype) for x, f in zip(x, f, strict=True)]
        for part, values in zip(parts, x, strict=True):
            store(residual_ref.at[rows, part.columns], values)
    wide = [values.astype(f32) for values in x]
    mean = _row_sums(wide) / C  # (rows,)  padding is zero
    centred = [
        _without_padding(values - along(mean, values, 0), part, C) for values, part in zip(wide, parts, strict=True)
    ]
    rstd = lax.rsqrt(_row_sums([values * values for values in centred]) / C + EPS)  # (rows,)
    for part, values in zip(parts, centred, strict=True):
        w = load(w_ref.at[part.columns], part.layout.reduce(0), f32)  # (part,)
        b = load(b_ref.at[part.columns], part.layout.reduce(0), f32)
        out = values * along(rstd, values, 0) * along(w, values, 1) + along(b, values, 1)
        store(out_ref.at[rows, part.columns], out.astype(out_ref.dtype))
    store(mean_ref.at[rows], mean)
    store(rstd_ref.at[rows], rstd)


def _without_padding(values: jax.Array, part: Part, C: int) -> jax.Array:
    """Put zero into the columns from C on, which have no deviation from the mean."""
    if part.columns.stop <= C:
        return values
    column = part.columns.start + mosaic.iota(values.shape, 1, part.layout)
    return jnp.where(column < C, values, 0.0)


def _forward_streamed(
    x_ref: Any, f_ref: Any, w_ref: Any, b_ref: Any, residual_ref: Any, out_ref: Any, mean_ref: Any, rstd_ref: Any,
    *, C: int, plan: RowLayout,
) -> None:  # fmt: skip
    """Do one row, in blocks of columns: once for the mean, once for the variance, once for out."""
    row = lax.axis_index("tile")
    layout = mosaic.flat_layout(plan.block, widest(x_ref.dtype))
    again = x_ref if residual_ref is None else residual_ref  # each thread wrote there what it reads

    def columns(k: Any) -> Any:
        return pl.ds(k * plan.block, plan.block)

    def add_up(k: Any, total: jax.Array) -> jax.Array:
        x = load(x_ref.at[row, columns(k)], layout)
        if f_ref is not None:
            x = (x.astype(f32) + load(f_ref.at[row, columns(k)], layout, f32)).astype(x.dtype)
            store(residual_ref.at[row, columns(k)], x)
        return total + jnp.sum(x.astype(f32))

    def centred(k: Any) -> jax.Array:
        values = load(again.at[row, columns(k)], layout, f32) - mean  # (block,)
        if plan.columns == C:
            return values
        return jnp.where(k * plan.block + mosaic.iota((plan.block,), 0, layout) < C, values, 0.0)

    def add_up_squares(k: Any, total: jax.Array) -> jax.Array:
        values = centred(k)
        return total + jnp.sum(values * values)

    count = plan.columns // plan.block
    mean = lax.fori_loop(0, count, add_up, jnp.float32(0)) / C
    rstd = lax.rsqrt(lax.fori_loop(0, count, add_up_squares, jnp.float32(0)) / C + EPS)

    @pl.loop(0, count)
    def _(k: Any) -> None:
        w, b = (load(ref.at[columns(k)], layout, f32) for ref in (w_ref, b_ref))
        store(out_ref.at[row, columns(k)], (centred(k) * rstd * w + b).astype(out_ref.dtype))

    mean_ref[row] = mean
    rstd_ref[row] = rstd


# ----- backward -----------------------------------------------------------------------------------------------------


def _backward(
    dresidual: jax.Array | None,
    dout: jax.Array,
    x: jax.Array,
    w: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    target: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return dx, dw, db, dbias; dresidual is added to dx if it is given."""
    C = x.shape[-1]
    n = x.size // C
    size = sizes(target)
    plan = plan_rows(C, size.layernorm_backward)
    if plan.team == 0 and longest_row(target) < C:
        raise ValueError(f"rows of {C} elements are too long for {target}, which takes up to {longest_row(target)}")
    n_up = round_up(n, plan.rows)
    grid = blocks(size, plan, n_up)
    body: Any = _backward_held if plan.team else _backward_streamed
    if plan.team == 0:
        sums = 2
        scratch = [mosaic.shared((plan.columns // plan.block, plan.block))] * sums
    else:
        parts = mosaic.row_parts(plan.columns, plan.team, widest(x.dtype))
        sums, scratch = 3, mosaic.sums_scratch(plan.rows, parts)
    wide = [array for array in (dresidual, dout, x) if array is not None]
    name = "layernorm_backward" if dresidual is None else "residual_layernorm_backward"
    dx, *of_blocks = mosaic.kernel(
        mosaic.without(partial(body, C=C, plan=plan, tiles=n_up // plan.rows), (0,) if dresidual is None else ()),
        name=name,
        out_type=[
            mosaic.shape_of((n_up, plan.columns), x.dtype),
            *[mosaic.shape_of((grid, plan.columns), f32)] * sums,
        ],
        grid=(grid,),
        grid_names=("block",),
        scratch=scratch,
        auto_barriers=False,  # where a thread reads what another wrote, `meet` stands between
        interpret=interpret,
    )(
        *[_padded(array.reshape(n, C), n_up, plan.columns) for array in wide],
        _padded(w, plan.columns),
        _padded(mean.reshape(n), n_up),
        _padded(rstd.reshape(n), n_up),  # a row of padding has rstd 0 and adds nothing
    )
    of_blocks = [each[:, :C] for each in of_blocks]  # (grid, C) each
    # One reduction of several arrays: XLA makes one kernel of it. Rounding the sums here would be one more for each.
    dw, db, *dbias = lax.reduce(of_blocks, [jnp.float32(0)] * sums, lambda a, b: list(map(add, a, b)), (0,))  # (C,)
    dx = dx[:n, :C]
    return dx.reshape(x.shape), dw, db, dbias[0] if dbias else jnp.sum(dx, axis=0, dtype=f32)


def _backward_held(
    dresidual_ref: Any, dout_ref: Any, x_ref: Any, w_ref: Any, mean_ref: Any, rstd_ref: Any, dx_ref: Any,
    *rest: Any, C: int, plan: RowLayout, tiles: int,
) -> None:  # fmt: skip
    """Do `plan.rows` rows at a time in registers, beside them dw's, db's and dbias's sums of the rows so far.

    Where registers allow it, the next rows are loaded before these are computed, so that memory is not idle meanwhile.
    """
    sums_refs, scratch = rest[:3], rest[3:]
    parts = mosaic.row_parts(plan.columns, plan.team, widest(x_ref.dtype))
    per_row = parts[0].layout.reduce(1)
    ahead = x_ref.dtype.itemsize == 2 and plan.columns <= plan.team * AHEAD
    block, grid = lax.axis_index("block"), lax.axis_size("block")
    count = pl.cdiv(tiles - block, grid)  # at least one: there are no more blocks than tiles
    w = [load(w_ref.at[part.columns], part.layout.reduce(0)) for part in parts]  # (part,) each
    nothing = tuple(mosaic.zeros((plan.rows, part.size), part.layout) for part in parts)

    def rows_of(k: Any) -> Any:
        return pl.ds((block + k * grid) * plan.rows, plan.rows)

    def loaded(k: Any) -> Any:
        """Return the parts (rows, part) of what is as wide as x: of its k-th rows, or of the last there are."""
        rows = rows_of(jnp.minimum(k, count - 1))
        wide = [ref for ref in (x_ref, dout_ref, dresidual_ref) if ref is not None]
        return tuple(tuple(load(ref.at[rows, part.columns], part.layout) for part in parts) for ref in wide)

    def tile(k: Any, carried: Any) -> Any:
        sums, held = carried
        here, following = (held, loaded(k + 1)) if ahead else (loaded(k), ())
        x, dout, *dresidual = [[each.astype(f32) for each in of_parts] for of_parts in here]
        mean, rstd = load(mean_ref.at[rows_of(k)], per_row), load(rstd_ref.at[rows_of(k)], per_row)  # (rows,)
        norm = [(x - along(mean, x, 0)) * along(rstd, x, 0) for x in x]
        dnorm = [dout * along(w.astype(f32), dout, 1) for dout, w in zip(dout, w, strict=True)]
        dnorm_mean = _row_sums(dnorm) / C  # (rows,)  padding: w = 0
        dnorm_norm_mean = _row_sums([dn * norm for dn, norm in zip(dnorm, norm, strict=True)]) / C
        dx = [
            (dn - along(dnorm_mean, dn, 0) - norm * along(dnorm_norm_mean, dn, 0)) * along(rstd, dn, 0)
            for dn, norm in zip(dnorm, norm, strict=True)
        ]
        for of_stream in dresidual:
            dx = list(map(add, dx, of_stream))
        for part, values in zip(parts, dx, strict=True):
            store(dx_ref.at[rows_of(k), part.columns], values.astype(dx_ref.dtype))
        terms = [dout * norm for dout, norm in zip(dout, norm, strict=True)], dout, dx
        return tuple(tuple(map(add, *pair)) for pair in zip(sums, terms, strict=True)), following

    # sums of dout norm, of dout, of dx
    sums, _ = lax.fori_loop(0, count, tile, ((nothing,) * 3, loaded(0) if ahead else ()))
    for ref, of_parts in zip(sums_refs, sums, strict=True):
        mosaic.store_sums(ref.at[pl.ds(block, 1)], parts, of_parts, scratch)


def _backward_streamed(
    dresidual_ref: Any, dout_ref: Any, x_ref: Any, w_ref: Any, mean_ref: Any, rstd_ref: Any, dx_ref: Any,
    dw_ref: Any, db_ref: Any, dw_sum: Any, db_sum: Any, *, C: int, plan: RowLayout, tiles: int,
) -> None:  # fmt: skip
    """Do one row at a time in blocks of columns, twice; the sums for dw and db lie in shared memory.

    Beside them a third for dbias would not leave room for rows as long as `longest_row`: XLA adds up dx.
    """
    layout = mosaic.flat_layout(plan.block, widest(x_ref.dtype))
    block, grid = lax.axis_index("block"), lax.axis_size("block")
    count = plan.columns // plan.block

    def columns(k: Any) -> Any:
        return pl.ds(k * plan.block, plan.block)

    @pl.loop(0, count)
    def _(k: Any) -> None:
        for sums in (dw_sum, db_sum):  # each thread reads and writes its own columns of them: no barriers
            store(sums.at[k], mosaic.zeros((plan.block,), layout))

    @pl.loop(0, pl.cdiv(tiles - block, grid))
    def _(tile: Any) -> None:
        row = block + tile * grid
        mean, rstd = mean_ref[row], rstd_ref[row]

        def gradients(k: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
            norm = (load(x_ref.at[row, columns(k)], layout, f32) - mean) * rstd  # (block,)
            dout = load(dout_ref.at[row, columns(k)], layout, f32)
            return norm, dout, dout * load(w_ref.at[columns(k)], layout, f32)

        def add_up(k: Any, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            norm, _, dnorm = gradients(k)
            return totals[0] + jnp.sum(dnorm), totals[1] + jnp.sum(dnorm * norm)

        totals = lax.fori_loop(0, count, add_up, (jnp.float32(0), jnp.float32(0)))
        dnorm_mean, dnorm_norm_mean = totals[0] / C, totals[1] / C

        @pl.loop(0, count)
        def _(k: Any) -> None:
            norm, dout, dnorm = gradients(k)
            dx = (dnorm - dnorm_mean - norm * dnorm_norm_mean) * rstd
            if dresidual_ref is not None:
                dx = dx + load(dresidual_ref.at[row, columns(k)], layout, f32)
            store(dx_ref.at[row, columns(k)], dx.astype(dx_ref.dtype))
            store(dw_sum.at[k], load(dw_sum.at[k], layout) + dout * norm)
            store(db_sum.at[k], load(db_sum.at[k], layout) + dout)

    @pl.loop(0, count)
    def _(k: Any) -> None:
        for ref, sums in ((dw_ref, dw_sum), (db_ref, db_sum)):
            store(ref.at[block, columns(k)], load(sums.at[k], layout))
