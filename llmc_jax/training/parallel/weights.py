"""The weights that a model computes with, gathered from the parts that the devices have of them.

A step begins with it, unit by unit (models/units.py): wte and ends first, which the embedding waits for, then a layer
after the other, in the order in which the forward comes to them. So a layer's weights are sent while those above it are
computed with. The barrier keeps that order: XLA starts all that is ready, and started wte's gather as the last one.
"""

from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import num_layers
from llmc_jax.models.units import flat_of, row_size, units
from llmc_jax.training.parallel.collectives import gather, pinned
from llmc_jax.training.parallel.stage import EVERYWHERE, SPLIT


def gathered(part: jax.Array, config: ModelShape, devices: int) -> list[jax.Array]:
    """Return the units, each (its rows or more, C) in the order of `units`, of the parts (r C,) that the devices have.

    Inside `jax.shard_map`.
    """
    *ends, _ = accumulate(unit.share(devices) for unit in units(config))
    rows = jnp.split(part.reshape(-1, row_size(config)), ends)
    first = len(rows) - num_layers(config)
    with jax.named_scope("gather"):
        found, layers = pinned(([gather(each) for each in rows[:first]], rows[first:]))
        return [*found, *(gather(each) for each in layers)]


@partial(jax.jit, static_argnums=(1, 2))
def whole(buffer: jax.Array, config: ModelShape, mesh: Mesh) -> jax.Array:
    """Return a split buffer whole on every device of the mesh, in llm.c's order: (flat_size,)."""

    def on_device(part: jax.Array) -> jax.Array:
        return flat_of(gathered(part, config, mesh.size), config)

    return jax.shard_map(on_device, mesh=mesh, in_specs=SPLIT, out_specs=EVERYWHERE, check_vma=False)(buffer)
