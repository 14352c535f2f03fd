"""Where the arrays of a run lie: brought to its devices, and back to the host.

A run on one device leaves this to JAX. On several, the devices are a mesh of one axis: each has its part of the batch
and of what is split, and everything else whole. Leaves out what is split (stage.py).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import flat_size
from llmc_jax.models.gpt2.units import joined_on_host, split_on_host, split_size
from llmc_jax.training.parallel.stage import AXIS, EVERYWHERE, SPLIT, Parallel, state_specs
from llmc_jax.training.state import TrainState


class Placement(NamedTuple):
    """The devices of a run, and how its arrays lie on them."""

    model: ModelConfig
    parallel: Parallel
    mesh: Mesh | None  # None: one device, JAX's first

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which the run's programs are made."""
        return nullcontext() if self.mesh is None else jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def tokens(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Return what an update's inputs and targets (A, B, T) are to the compiler."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._sharding(SPLIT))

    def batch(self, tokens: np.ndarray) -> Any:
        """Return an update's inputs or targets (A, B, T), each device's micro-batches on that device."""
        if self.mesh is None:
            return tokens
        return jax.device_put(tokens[order_of_batches(len(tokens), self.parallel)], self._sharding(SPLIT))

    def rows(self, tokens: np.ndarray) -> Any:
        """Return batches (n, B, T), one on each device."""
        return jax.device_put(tokens, self._sharding(SPLIT))

    def everywhere(self, values: Any) -> Any:
        """Return a tree of arrays or numbers, on every device."""
        return jax.device_put(values, self._sharding(EVERYWHERE))

    def state(self, like: TrainState, flat: Callable[[str], np.ndarray | None]) -> TrainState:
        """Return a state on the devices. flat: returns a flat buffer (flat_size,) on the host, in llm.c's order.

        like: where the rest comes from, and the names and dtypes of the buffers. One after the other is asked for. On
        several devices None stands for zeros.
        """
        if self.mesh is None:
            return like.with_flat({name: jnp.array(flat(name)) for name in like.flat})
        specs = state_specs(like, self.parallel)
        found = {name: self._put(flat(name), like.flat[name].dtype, spec) for name, spec in specs.flat.items()}
        rest = like.with_flat(dict.fromkeys(found))  # type: ignore[arg-type]
        return TrainState(*self.everywhere(rest)).with_flat(found)

    def _put(self, flat: np.ndarray | None, dtype: Any, spec: Any) -> jax.Array:
        n, sharding = self.parallel.devices, self._sharding(spec)
        if flat is None:
            size = split_size(self.model, n) if spec == SPLIT else flat_size(self.model)
            return jnp.zeros(size, dtype, device=sharding)
        values = split_on_host(flat, self.model, n) if spec == SPLIT else flat
        return jax.block_until_ready(jax.device_put(values, sharding))  # else several are on their way at once

    def host(self, buffer: jax.Array) -> np.ndarray:
        """Return a flat buffer (flat_size,) in llm.c's order on the host. Of one CPU device a view."""
        if buffer.sharding.is_fully_replicated:
            return np.asarray(buffer)
        parts = sorted(buffer.addressable_shards, key=lambda part: part.index[0].start)
        return joined_on_host([np.asarray(part.data) for part in parts], self.model)

    def first(self, array: jax.Array) -> jax.Array:
        """Return an array that every device has, as that of the first one: for programs of one device."""
        return array if self.mesh is None else array.addressable_data(0)


def placement(model: ModelConfig, parallel: Parallel, devices: Sequence[Any]) -> Placement:
    """Return the placement of a run on devices, as many as it takes."""
    assert len(devices) == parallel.devices, (devices, parallel)
    return Placement(model, parallel, Mesh(np.array(devices), (AXIS,)) if parallel.devices > 1 else None)


def order_of_batches(micro_batches: int, parallel: Parallel) -> np.ndarray:
    """Return the order in which an update's micro-batches lie, device after device: (A,) int."""
    n = parallel.devices
    if parallel.interleaved:
        return np.arange(micro_batches).reshape(-1, n).T.reshape(-1)
    return np.arange(micro_batches)
