"""The gradients of a model as its backward makes them, and one flat buffer of them."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelShape
from llmc_jax.models.execution import pinned, scope
from llmc_jax.models.layout import flat_size, num_parameters, tensor_specs
from llmc_jax.models.tensors import TensorSpec

LARGE_PIECE = 1 << 18  # elements of a gradient that is written into the flat one by a kernel of its own


class Gradients(NamedTuple):
    """The gradients of the parameters."""

    # Of each tensor without a layer axis by its name; in at least float32 where more is added to it. One that has fewer
    # rows than the tensor is of the first rows, the others' is zero: of wpe, the positions that were used.
    own: Mapping[str, jax.Array]
    blocks: tuple[Any, ...]  # L of them: a layer's gradients in the tensors' order, or what was made of them at once


def pieces_of(found: jax.Array, spec: TensorSpec) -> tuple[jax.Array, ...]:
    """Return the gradient of a tensor without a layer axis in pieces: as it was found, and zeros for missing rows."""
    if found.shape == spec.shape:
        return (found,)
    return found, jnp.zeros((spec.shape[0] - found.shape[0], *spec.shape[1:]), found.dtype)


def flatten_gradients(gradients: Gradients, config: ModelShape, dtype: Any) -> jax.Array:
    """Return the flat gradient (flat_size,), its pieces in the file's order."""
    layered = iter(zip(*gradients.blocks, strict=True))
    pieces: list[jax.Array] = []
    for spec in tensor_specs(config):
        pieces += next(layered) if spec.tensor.layered else pieces_of(gradients.own[spec.name], spec)
    padding = jnp.zeros(flat_size(config) - num_parameters(config), dtype)
    with scope("backward"), scope("gradient"):
        return put_together([*pieces, padding], dtype)


def put_together(pieces: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Return the elements of some arrays behind one another in one buffer (total,)."""
    vectors = [jnp.ravel(piece).astype(dtype) for piece in pieces]
    # A CPU's program would first fill the buffer with zeros.
    return pinned(
        jax.lax.platform_dependent(*vectors, cpu=lambda *each: jnp.concatenate(each), default=written_in_place)
    )


def written_in_place(*vectors: jax.Array) -> jax.Array:
    """Return some vectors behind one another in one: each large one is written where it lies, small ones joined first.

    One `concatenate` of all would be a kernel that asks of each element which vector it comes from: for GPT-2 124M on
    an H200 it took five times as long as its bytes.
    """
    flat, offset = jax.lax.empty((sum(each.size for each in vectors),), vectors[0].dtype), 0
    for large, run in groupby(vectors, key=lambda each: each.size >= LARGE_PIECE):
        for part in run if large else [jnp.concatenate(list(run))]:
            flat = jax.lax.dynamic_update_slice(flat, part, (offset,))
            offset += part.size
    return flat
