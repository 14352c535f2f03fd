"""Where the arrays of a run lie: brought to its devices, and back to the host.

A run on one device leaves this to JAX. On several, the devices are a mesh of one axis: each has its part of the batch
and of what is split, and everything else whole. They may belong to several processes, which all make the same calls in
the same order: each brings to its own devices what lies there, and reads back from them. Leaves out what is split
(stage.py).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import flat_size
from llmc_jax.models.units import joined_on_host, split_on_host, split_size
from llmc_jax.training.parallel.blocks import block_size, fill, whole_blocks
from llmc_jax.training.parallel.collectives import largest
from llmc_jax.training.parallel.stage import AXIS, EVERYWHERE, SPLIT, Parallel, state_specs
from llmc_jax.training.parallel.weights import whole
from llmc_jax.training.state import TrainState


class Placement(NamedTuple):
    """The devices of a run, and how its arrays lie on them."""

    model: ModelShape
    parallel: Parallel
    mesh: Mesh | None  # None: one device, JAX's first
    process: int = 0  # this one's number among all, from 0
    processes: int = 1

    @property
    def own_devices(self) -> range:
        """Return the numbers of this process's devices, which are also those of its batches (n, B, T)."""
        local = self.parallel.devices // self.processes
        return range(self.process * local, (self.process + 1) * local)

    def own(self, micro_batches: int) -> np.ndarray:
        """Return the numbers of this process's micro-batches among those of an update, as they lie on its devices."""
        own, each = self.own_devices, micro_batches // self.parallel.devices
        return np.asarray(order_of_batches(micro_batches, self.parallel)[own.start * each : own.stop * each])

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which the run's programs are made."""
        return nullcontext() if self.mesh is None else jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def tokens(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Return what an update's inputs and targets (A, B, T) are to the compiler."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._sharding(SPLIT))

    def described(self, step_arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what a step takes as it is to the compiler. step_arguments: shapes of state, inputs, targets, numbers.

        Of several devices the shapes are over all of them.
        """
        if self.mesh is None:
            return step_arguments
        specs = (state_specs(step_arguments[0], self.parallel), SPLIT, SPLIT, EVERYWHERE)

        def on(spec: PartitionSpec, part: Any) -> Any:
            lies = self._sharding(spec)
            return jax.tree.map(lambda leaf: leaf.update(sharding=lies), part)

        return tuple(
            jax.tree.map(on, spec, part, is_leaf=lambda each: isinstance(each, PartitionSpec))
            for spec, part in zip(specs, step_arguments, strict=True)
        )

    def batch(self, tokens: np.ndarray) -> Any:
        """Return an update's inputs or targets (A, B, T), each device's micro-batches on that device.

        tokens: of those that are this process's `own`, in their order.
        """
        return tokens if self.mesh is None else self._put(tokens, SPLIT)

    def rows(self, tokens: np.ndarray) -> Any:
        """Return batches (n, B, T), one on each device. tokens: of those that are this process's `own_devices`."""
        return self._put(tokens, SPLIT)

    def _put(self, values: np.ndarray, spec: PartitionSpec) -> jax.Array:
        """Return an array on the devices. values: of a split one this process's part, of another one all of it."""
        assert self.mesh is not None
        length = len(values) * (self.processes if spec == SPLIT else 1)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_process_local_data(sharding, values, (length, *values.shape[1:]))

    def everywhere(self, values: Any) -> Any:
        """Return a tree of arrays or numbers, on every device. Each process must have the same."""
        if self.processes == 1:
            return jax.device_put(values, self._sharding(EVERYWHERE))
        # a program, for `device_put` would compare them between the processes
        return jax.jit(_same, out_shardings=self._sharding(EVERYWHERE))(values)

    def state(self, like: TrainState, flat: Callable[[str], np.ndarray | None]) -> TrainState:
        """Return a state on the devices. flat: returns a flat buffer (flat_size,) on the host, in llm.c's order.

        like: where the rest comes from, and the names and dtypes of the buffers. One after the other is asked for. On
        several devices None stands for zeros.
        """
        if self.mesh is None:
            return like.with_flat({name: jnp.array(flat(name)) for name in like.flat})
        specs = state_specs(like, self.parallel)
        found = {name: self._put_flat(flat(name), like.flat[name].dtype, spec) for name, spec in specs.flat.items()}
        rest = like.with_flat(dict.fromkeys(found))  # type: ignore[arg-type]
        return TrainState(*self.everywhere(rest)).with_flat(found)

    def _put_flat(self, flat: np.ndarray | None, dtype: Any, spec: Any) -> jax.Array:
        n = self.parallel.devices
        if flat is None:
            size = split_size(self.model, n) if spec == SPLIT else flat_size(self.model)
            return jnp.zeros(size, dtype, device=self._sharding(spec))
        values = split_on_host(flat, self.model, n, self.own_devices) if spec == SPLIT else flat
        return jax.block_until_ready(self._put(values, spec))  # else several are on their way at once

    def host(self, buffer: jax.Array) -> np.ndarray:
        """Return a flat buffer (flat_size,) of one process's devices on the host. Of one CPU device a view."""
        if buffer.sharding.is_fully_replicated:
            return np.asarray(buffer)
        parts = sorted(buffer.addressable_shards, key=lambda part: part.index[0].start)
        return joined_on_host([np.asarray(part.data) for part in parts], self.model)

    def whole(self, buffer: jax.Array) -> np.ndarray | None:
        """Return a flat buffer (flat_size,) in llm.c's order on the host of process 0, in the others None.

        An exchange between several processes, if it is split: each makes it at the same place among its programs.
        """
        if self.processes == 1 or (self.process == 0 and buffer.sharding.is_fully_replicated):
            return self.host(buffer)
        if buffer.sharding.is_fully_replicated:
            return None
        assert self.mesh is not None
        flat = np.zeros(flat_size(self.model), buffer.dtype) if self.process == 0 else None
        fill({} if flat is None else {0: flat}, buffer, self.model, self.mesh)
        return flat

    def blocks(self, buffer: jax.Array, numbers: Iterable[int]) -> dict[int, np.ndarray]:
        """Return blocks of a flat buffer in llm.c's order on the host, by their numbers: each (flat_size / BLOCKS,).

        If it is split it is an exchange: each process makes it at the same place among its programs, with numbers of
        its own. None of the arrays is a view of the buffer.
        """
        if buffer.sharding.is_fully_replicated:
            return whole_blocks(buffer, numbers)
        assert self.mesh is not None
        size = block_size(self.model)
        found = {number: np.zeros(size, buffer.dtype) for number in numbers}
        fill({number * size: block for number, block in found.items()}, buffer, self.model, self.mesh)
        return found

    def weights(self, state: TrainState) -> jax.Array:
        """Return the parameters that the model computes with, (flat_size,) in llm.c's order on every device.

        An exchange, if they are split: each process makes it at the same place among its programs.
        """
        return whole(state.weights, self.model, self.mesh) if self.parallel.splits else state.weights

    def first(self, array: jax.Array) -> jax.Array:
        """Return an array that every device has, as that of this process's first one: for programs of one device."""
        return array if self.mesh is None else array.addressable_data(0)

    def vote(self, value: int) -> Any:
        """Begin to find the largest of the numbers that the processes give; `read_vote` waits for it.

        An exchange between several processes: each makes it at the same place among its programs.
        """
        if self.processes == 1:
            return value
        return _largest(self._put(np.full(len(self.own_devices), value, np.int32), SPLIT), self.mesh)

    def read_vote(self, vote: Any) -> int:
        """Return the largest of the numbers that the processes gave, the same in each."""
        return int(vote)


def _same(values: Any) -> Any:
    return values


@partial(jax.jit, static_argnums=1)
def _largest(numbers: jax.Array, mesh: Mesh) -> jax.Array:
    """Return the largest of numbers (n,), one on each device."""
    each = jax.shard_map(largest, mesh=mesh, in_specs=SPLIT, out_specs=EVERYWHERE, check_vma=False)
    return each(numbers)[0]


def placement(model: ModelShape, parallel: Parallel, devices: Sequence[Any]) -> Placement:
    """Return the placement of a run on devices, as many as it takes.

    Of several processes each has equally many of them, one process after the other.
    """
    n = len(devices)
    assert n == parallel.devices, (devices, parallel)
    processes = len({device.process_index for device in devices})
    assert [device.process_index for device in devices] == [d * processes // n for d in range(n)], devices
    mesh = Mesh(np.array(devices), (AXIS,)) if n > 1 else None
    return Placement(model, parallel, mesh, jax.process_index() if processes > 1 else 0, processes)


def order_of_batches(micro_batches: int, parallel: Parallel) -> np.ndarray:
    """Return the order in which an update's micro-batches lie, device after device: (A,) int."""
    n = parallel.devices
    if parallel.interleaved:
        return np.arange(micro_batches).reshape(-1, n).T.reshape(-1)
    return np.arange(micro_batches)
