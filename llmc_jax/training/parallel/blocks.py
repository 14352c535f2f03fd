"""Blocks of a flat buffer on the host, wherever it lies on the devices.

A checkpoint holds a buffer as BLOCKS blocks of equal size, in llm.c's order. A process has on its devices a part of
each unit of a split buffer, which is no whole block. So unit after unit is gathered on every device, and each process
copies from it what it needs: no device ever holds a whole buffer, and nothing comes to the host that is not wanted.
Leaves out who wants which blocks, and writing them (checkpoint/).
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import flat_size
from llmc_jax.models.tensors import BLOCKS
from llmc_jax.models.units import Unit, row_size, units
from llmc_jax.training.parallel.collectives import gather
from llmc_jax.training.parallel.stage import EVERYWHERE, SPLIT

WINDOW = 1 << 22  # elements that are copied to the host at once


def block_size(model: ModelShape) -> int:
    """Return the elements of a block."""
    return flat_size(model) // BLOCKS


def whole_blocks(buffer: jax.Array, numbers: Iterable[int]) -> dict[int, np.ndarray]:
    """Return blocks, by number, of a flat buffer (flat_size,) that every device has. Not a view of it."""
    own = buffer.addressable_data(0)
    return {number: np.asarray(_block(own, number)) for number in numbers}


def fill(found: Mapping[int, np.ndarray], buffer: jax.Array, model: ModelShape, mesh: Mesh) -> None:
    """Fill arrays from a split buffer: found[i] with the elements of the flat buffer from i on, but for its padding.

    An exchange: every process calls it, at the same place among its programs, each with what it wants, if anything.
    """
    offset, C = 0, row_size(model)
    for unit in units(model):
        share = unit.share(mesh.size)
        on_all = jax.block_until_ready(_gathered(buffer, offset, share, C, mesh))  # one unit at a time
        _copy(list(_cuts(unit, C, found)), on_all.addressable_data(0))
        offset += share


# Where something lies is counted in blocks and rows on the device: the elements before it may be more than int32 holds.


@jax.jit
def _block(buffer: jax.Array, number: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(buffer.reshape(BLOCKS, -1), number, keepdims=False)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _gathered(buffer: jax.Array, offset: Any, share: int, channels: int, mesh: Mesh) -> jax.Array:
    """Return one unit of a split buffer, whole, on every device: (n share C,). It is share rows from offset on of each
    part.
    """

    def on_device(part: jax.Array, offset: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(part.reshape(-1, channels), offset, share)
        return gather(rows).reshape(-1)

    each = jax.shard_map(on_device, mesh=mesh, in_specs=(SPLIT, EVERYWHERE), out_specs=EVERYWHERE, check_vma=False)
    return each(buffer, offset)


@partial(jax.jit, static_argnums=2)
def _window(unit: jax.Array, start: Any, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(unit, start, size)


class Cut(NamedTuple):
    """Elements of a unit that are wanted."""

    start: int  # in the unit
    into: np.ndarray


def _cuts(unit: Unit, channels: int, found: Mapping[int, np.ndarray]) -> Iterator[Cut]:
    """Yield what of a unit belongs into the arrays of `fill`."""
    for (row, rows), place in zip(unit.pieces, unit.starts, strict=True):
        first, end = row * channels, (row + rows) * channels
        for begin, array in found.items():
            low, high = max(first, begin), min(end, begin + array.size)
            if low < high:
                yield Cut(place * channels + low - first, array[low - begin : high - begin])


def _copy(cuts: list[Cut], unit: jax.Array) -> None:
    """Copy to the host what is cut from a unit on a device, by windows of one size: so they are one program."""
    size = min(WINDOW, unit.size)
    for first in range(0, unit.size, size):
        start = min(first, unit.size - size)  # the last one reaches back
        wanted = [cut for cut in cuts if cut.start < start + size and start < cut.start + cut.into.size]
        if not wanted:
            continue
        window = np.asarray(_window(unit, start, size))
        for cut in wanted:
            low, high = max(start, cut.start), min(start + size, cut.start + cut.into.size)
            cut.into[low - cut.start : high - cut.start] = window[low - start : high - start]
