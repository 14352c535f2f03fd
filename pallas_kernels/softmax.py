"""Causal softmax of attention scores on the GPU, forward and backward: a row per warp, its columns in blocks.

Row t sees columns u <= t, so only the blocks up to the one with the diagonal are read; beyond it zeros are written.
The forward is online: a running maximum and a running sum, corrected by a factor where the maximum grows, so that one
reading finds both. The second reading, for what is written, comes from the cache. docs/kernels/softmax.md has drawings.

Leaves out the products around it and float64. Source of the mathematics: llmc_jax/ops/softmax.py; of the running sum:
Milakov, Gimelshein, Online normalizer calculation for softmax (2018); llm.c dev/cuda/attention_forward.cu.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import LOG2E, along, f32, load, store
from pallas_kernels.tuning import sizes

ROWS = mosaic.WARPS  # of a tile


@partial(jax.jit, static_argnames=("scale", "target", "interpret"))
def softmax_forward(scores: jax.Array, scale: float, *, target: str = "sm_90", interpret: bool = False) -> jax.Array:
    """Compute causal softmax: exp(scale scores[t, u]) / sum of exp(scale scores[t, u']) over u' <= t; 0 for u > t.

    scores (..., T, T) bf16, fp16 or fp32, of which what lies beyond the diagonal does not count. Returns att in
    scores' shape and dtype. Compulsory bytes for h matrices: h (T (T + 1) / 2 + T^2) itemsize. On an H200 (4.8 TB/s)
    d12's 64 x 12 matrices of 1024 bf16 take no less than 504 us. Alignment: T to a multiple of 32, else padded.
    """
    return _by_tiles(partial(_forward, scale=scale), "softmax_forward", [scores], target, interpret)


@partial(jax.jit, static_argnames=("scale", "target", "interpret"))
def softmax_backward(
    datt: jax.Array, att: jax.Array, scale: float, *, target: str = "sm_90", interpret: bool = False
) -> jax.Array:
    """Return the gradient of `softmax_forward`: dscores = scale att (datt - sum over u of att datt); 0 for u > t.

    datt and att (..., T, T); what datt has beyond the diagonal does not count. Returns dscores in att's shape and
    dtype. Compulsory bytes for h matrices: h (T (T + 1) + T^2) itemsize, for d12's 672 us. Alignment as in the forward.
    """
    return _by_tiles(partial(_backward, scale=scale), "softmax_backward", [datt, att], target, interpret)


class _Tile:
    """Four rows of one matrix, a warp each, and the blocks of their columns."""

    def __init__(self, matrix: Any, first: Any, columns: int, block: int, widest: int) -> None:
        self.matrix = matrix
        self.first = first  # row
        self.block = block  # columns of a block
        self.layout = mosaic.row_layout(block, widest)  # of (ROWS, block)
        self.diagonal = first // block  # the block in which all four rows meet the diagonal: block % ROWS = 0
        self.blocks = columns // block

    def at(self, ref: Any, k: Any) -> Any:
        """Return the tile's part of the k-th block of columns."""
        return ref.at[self.matrix, pl.ds(self.first, ROWS), pl.ds(k * self.block, self.block)]

    def visible(self) -> jax.Array:
        """Return which of the diagonal's block a row sees."""
        shape = (ROWS, self.block)
        row = self.first + mosaic.iota(shape, 0, self.layout)
        return self.diagonal * self.block + mosaic.iota(shape, 1, self.layout) <= row

    def write(self, ref: Any, k: Any, values: jax.Array) -> None:
        store(self.at(ref, k), values.astype(ref.dtype))


def _by_tiles(body: Callable[..., None], name: str, inputs: list[jax.Array], target: str, interpret: bool) -> jax.Array:
    """Run body(tile, *refs) for every tile, those with the longest rows first; pad and unpad."""
    shape, dtype = inputs[-1].shape, inputs[-1].dtype
    T = shape[-1]
    if len(shape) < 2 or shape[-2] != T:
        raise ValueError(f"a softmax over {shape}: the last two axes must be T x T")
    rows, columns = mosaic.round_up(T, ROWS), mosaic.round_up(T, mosaic.LANES)
    block = sizes(target).softmax_block
    while columns % block:
        block //= 2
    matrices = math.prod(shape[:-2])
    tiles = rows // ROWS

    def kernel(*refs: Any) -> None:
        matrix, tile = jnp.divmod(lax.axis_index("tile"), tiles)
        body(_Tile(matrix, (tiles - 1 - tile) * ROWS, columns, block, mosaic.widest(dtype)), *refs)

    def padded(array: jax.Array) -> jax.Array:
        array = array.reshape(matrices, T, T)
        return array if rows == columns == T else jnp.pad(array, ((0, 0), (0, rows - T), (0, columns - T)))

    out = mosaic.kernel(
        kernel,
        name=name,
        out_type=mosaic.shape_of((matrices, rows, columns), dtype),
        grid=(matrices * tiles,),
        grid_names=("tile",),
        approx_math=True,  # ex2.approx is right to 2 units in the last place of fp32
        auto_barriers=False,  # no thread reads what another wrote
        interpret=interpret,
    )(*map(padded, inputs))
    return out[:, :T, :T].reshape(shape)


def _write_zeros_beyond(tile: _Tile, ref: Any) -> None:
    @pl.loop(tile.diagonal + 1, tile.blocks)
    def _(k: Any) -> None:
        tile.write(ref, k, mosaic.zeros((ROWS, tile.block), tile.layout))


def _forward(tile: _Tile, scores_ref: Any, att_ref: Any, *, scale: float) -> None:
    def exponents(k: Any) -> jax.Array:
        """Return the exponents in base 2, which is what the hardware computes."""
        return load(tile.at(scores_ref, k), tile.layout, f32) * (scale * LOG2E)  # (ROWS, block)

    # The diagonal's block first: each row sees an element of it, so the maximum is finite from the start.
    at_diagonal = jnp.where(tile.visible(), exponents(tile.diagonal), -jnp.inf)
    largest = at_diagonal.max(1)  # (ROWS,)
    total = jnp.exp2(at_diagonal - along(largest, at_diagonal, 0)).sum(1)  # (ROWS,)

    def add_block(k: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest, total = state
        values = exponents(k)
        larger = jnp.maximum(largest, values.max(1))
        return larger, total * jnp.exp2(largest - larger) + jnp.exp2(values - along(larger, values, 0)).sum(1)

    largest, total = lax.fori_loop(0, tile.diagonal, add_block, (largest, total))
    inverse = 1.0 / total

    def weights(exponents: jax.Array) -> jax.Array:
        return jnp.exp2(exponents - along(largest, exponents, 0)) * along(inverse, exponents, 0)

    tile.write(att_ref, tile.diagonal, weights(at_diagonal))

    @pl.loop(0, tile.diagonal)
    def _(k: Any) -> None:
        tile.write(att_ref, k, weights(exponents(k)))

    _write_zeros_beyond(tile, att_ref)


def _backward(tile: _Tile, datt_ref: Any, att_ref: Any, dscores_ref: Any, *, scale: float) -> None:
    def gradients(k: Any) -> tuple[jax.Array, jax.Array]:
        return load(tile.at(datt_ref, k), tile.layout, f32), load(tile.at(att_ref, k), tile.layout, f32)

    visible = tile.visible()
    datt, att = gradients(tile.diagonal)  # (ROWS, block)
    datt, att = jnp.where(visible, datt, 0.0), jnp.where(visible, att, 0.0)

    def add_block(k: Any, total: jax.Array) -> jax.Array:
        datt, att = gradients(k)
        return total + (att * datt).sum(1)

    row_sum = lax.fori_loop(0, tile.diagonal, add_block, (att * datt).sum(1))  # (ROWS,)

    def dscores(datt: jax.Array, att: jax.Array) -> jax.Array:
        return scale * att * (datt - along(row_sum, datt, 0))

    tile.write(dscores_ref, tile.diagonal, dscores(datt, att))

    @pl.loop(0, tile.diagonal)
    def _(k: Any) -> None:
        tile.write(dscores_ref, k, dscores(*gradients(k)))

    _write_zeros_beyond(tile, dscores_ref)
