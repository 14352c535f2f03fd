"""Every exchange between devices: one line each, inside `jax.shard_map` over the mesh's axis `data`.

Bytes are those that one of n devices sends, of an array of S bytes, as a ring or a switch does it:

    all_reduce        2 S (n-1)/n     the sum of everybody's array, on every device
    reduce_scatter      S (n-1)/n     of that sum, the n-th that is this device's
    gather              S (n-1)/n     everybody's parts, one after the other; S: of them all
    exchange            S (n-1)/n     everybody's part for this device, not summed: so it can sum in an order of its own
    largest           2 S (n-1)/n     the largest of everybody's array, on every device
"""

from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.training.parallel.stage import AXIS, Parallel

pinned: Any = jax.lax.optimization_barrier


def all_reduce(array: jax.Array) -> jax.Array:
    """Return the sum of the array over all devices."""
    return jax.lax.psum(array, AXIS)


def reduce_scatter(rows: jax.Array) -> jax.Array:
    """Return this device's n-th of the rows (n r, …) of the sum over all devices: (r, …)."""
    return jax.lax.psum_scatter(rows, AXIS, scatter_dimension=0, tiled=True)


def gather(rows: jax.Array) -> jax.Array:
    """Return the rows (r, …) of all devices, one device after the other: (n r, …)."""
    return jax.lax.all_gather(rows, AXIS, axis=0, tiled=True)


def exchange(parts: jax.Array) -> jax.Array:
    """Return part d of every device's parts (n, …), where d is this device: (n, …), in the order of the devices."""
    return jax.lax.all_to_all(parts, AXIS, split_axis=0, concat_axis=0)


def largest(array: jax.Array) -> jax.Array:
    """Return the largest of the devices' arrays, element by element, on every device."""
    return jax.lax.pmax(array, AXIS)


def device_number() -> jax.Array:
    """Return the number of this device among all, from 0."""
    return jax.lax.axis_index(AXIS)


# ----- sums over the devices ------------------------------------------------------------------------------------------


def summed(rows: jax.Array, parallel: Parallel) -> jax.Array:
    """Return rows (rows, C) summed over the devices: whole in stage 0, else this device's share of them (share, C).

    The devices must divide the rows, but in stage 0 without a fixed order.
    In a fixed order the sum is in float32 and by halves: ((0+1)+(2+3))+….
    """
    n = parallel.devices
    if n == 1:
        return rows
    if not parallel.fixed:
        return reduce_scatter(rows) if parallel.splits else all_reduce(rows)
    parts = pinned(exchange(rows.reshape(n, -1, rows.shape[-1])))
    share = by_halves([wide(parts[device]) for device in range(n)])
    return share if parallel.splits else gather(share)


def summed_number(number: jax.Array, parallel: Parallel) -> jax.Array:
    """Return a scalar summed over the devices, by halves where sums are fixed."""
    if parallel.devices == 1:
        return number
    if not parallel.fixed:
        return all_reduce(number)
    return by_halves(list(pinned(gather(number[None]))))


def by_halves(values: list[jax.Array]) -> jax.Array:
    """Return the sum of a power of two of values: neighbours first, then neighbouring sums, …."""
    while len(values) > 1:
        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    return values[0]


def wide(array: jax.Array) -> jax.Array:
    """Return an array in at least float32."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))
