"""The flat buffer as rows of equal length, and its rows in units: what the backward finishes at once.

A row has so many elements that every tensor is a whole number of rows, and so is each layer's slice of one: GPT-2's
rows have C. Its units:

    unit          rows          tensors
    wte           Vp            wte, whose gradient is complete only when the backward reaches the embedding
    ends          maxT + 2      wpe, lnfw, lnfb
    layer 0 …     12 C + 13     its slices of the 12 tensors with a layer axis, in their order

ZeRO splits a buffer over n devices unit by unit: device d holds the d-th n-th of the rows of each unit, one unit after
the other. So the gradients of a layer can be reduced and split as soon as they exist, and every device has the same
share of the work. Where n does not divide a unit's rows, rows of zeros fill it up.

    split order   device 0: its rows of wte, of ends, of layer 0, …; device 1: likewise; …

Leaves out what is done with the parts (training/parallel/).

    C elements of a row, Vp padded vocabulary, R = N / C rows of the flat buffer, n devices,
    r rows that each of them holds
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import flat_size, num_layers, num_parameters, params_type, tensor_specs

LONGEST = 1 << 16  # elements of a row, which stochastic rounding counts in 32 bits (training/rounding.py)


class Unit(NamedTuple):
    """Rows of the flat buffer that are reduced and split together."""

    name: str
    pieces: tuple[tuple[int, int], ...]  # a row of the flat buffer and how many from there, in the unit's order

    @property
    def rows(self) -> int:
        """Return the rows of all pieces."""
        return sum(count for _, count in self.pieces)

    @property
    def starts(self) -> list[int]:
        """Return the row of the unit that each piece begins at."""
        return list(accumulate((count for _, count in self.pieces[:-1]), initial=0))

    def share(self, devices: int) -> int:
        """Return the rows of it that each device holds."""
        return -(-self.rows // devices)


@cache
def row_size(config: ModelShape) -> int:
    """Return C, the elements of a row: the most, up to LONGEST, that divide every tensor and layer's slice of one."""
    layers = num_layers(config)
    divisor = gcd(*(spec.size // (layers if spec.tensor.layered else 1) for spec in tensor_specs(config)))
    return next(size for size in range(min(divisor, LONGEST), 0, -1) if divisor % size == 0)


@cache
def units(config: ModelShape) -> tuple[Unit, ...]:
    """Return the units of a model: the tensors that are one by themselves, ends, and the layers in their order."""
    C, layers, specs = row_size(config), num_layers(config), tensor_specs(config)

    def pieces(layer: int) -> Iterator[tuple[int, int]]:
        for spec in specs:
            if spec.tensor.layered:
                yield (spec.offset + layer * (spec.size // layers)) // C, spec.size // layers // C

    whole = {spec: (spec.offset // C, spec.size // C) for spec in specs if not spec.tensor.layered}
    own = (Unit(spec.name, (piece,)) for spec, piece in whole.items() if spec.tensor.own)
    ends = tuple(piece for spec, piece in whole.items() if not spec.tensor.own)
    found = (*own, Unit("ends", ends), *(Unit(f"layer {layer}", tuple(pieces(layer))) for layer in range(layers)))
    return tuple(unit for unit in found if unit.pieces)


def total_rows(config: ModelShape) -> int:
    """Return R, the rows of the flat buffer without its padding."""
    return num_parameters(config) // row_size(config)


def split_rows(config: ModelShape, devices: int) -> int:
    """Return r, the rows that each of some devices holds."""
    return sum(unit.share(devices) for unit in units(config))


def split_size(config: ModelShape, devices: int) -> int:
    """Return the elements of a buffer in split order, over all devices: at least N."""
    return devices * split_rows(config, devices) * row_size(config)


# ----- on the device --------------------------------------------------------------------------------------------------


def as_rows(tensors: Any, length: int, multiple: int = 1) -> jax.Array:
    """Return tensors, a tree of arrays, as rows (…, C) in their order: one concatenation.

    multiple: of which there are as many rows in all, the last ones zeros.
    """
    pieces = [leaf.reshape(-1, length) for leaf in jax.tree.leaves(tensors)]
    missing = -sum(len(piece) for piece in pieces) % multiple
    return jnp.concatenate([*pieces, jnp.zeros((missing, length), pieces[0].dtype)] if missing else pieces)


def flat_of(found: Sequence[jax.Array], config: ModelShape) -> jax.Array:
    """Return a flat buffer (flat_size,) from its units, each (its rows or more, C), in the order of `units`."""
    ordered = [piece.reshape(-1) for piece in _pieces_of(found, config)]
    padding = flat_size(config) - num_parameters(config)
    return jnp.concatenate([*ordered, jnp.zeros(padding, found[0].dtype)])


def tensors_in(found: Sequence[jax.Array], config: ModelShape) -> Any:
    """Return the tensors in the units of a flat buffer, of those with a layer axis a tuple of L. found: as above."""
    pieces, L = iter(_pieces_of(found, config)), num_layers(config)
    tensors = (
        tuple(next(pieces).reshape(spec.shape[1:]) for _ in range(L)) if spec.tensor.layered
        else next(pieces).reshape(spec.shape) for spec in tensor_specs(config)
    )  # fmt: skip
    return params_type(config)(*tensors)


def _pieces_of(found: Sequence[jax.Array], config: ModelShape) -> list[jax.Array]:
    """Return the rows of the units' pieces in the order of the flat buffer."""
    pieces = [
        (first, found[i][start : start + count])
        for i, unit in enumerate(units(config))
        for (first, count), start in zip(unit.pieces, unit.starts, strict=True)
    ]
    return [piece for _, piece in sorted(pieces, key=lambda each: each[0])]


def own_rows(config: ModelShape, devices: int, device: Any) -> jax.Array:
    """Return which row of the flat buffer stands at each place of a device's part, (r,) int32; R where none does.

    device: its number from 0, traced.
    """
    found = []
    for unit in units(config):
        share = unit.share(devices)
        place = device * share + jnp.arange(share, dtype=jnp.int32)  # (share,) row of the unit
        row = place
        for start, (first, _) in zip(unit.starts, unit.pieces, strict=True):
            row = jnp.where(place >= start, place - start + first, row)
        found.append(jnp.where(place < unit.rows, row, total_rows(config)))
    return jnp.concatenate(found).astype(jnp.int32)


# ----- on the host ----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Rows that lie together in the flat buffer and on a device."""

    device: int
    place: int  # of the first one, on the device
    row: int  # of the first one, in the flat buffer
    rows: int


@cache
def runs(config: ModelShape, devices: int) -> tuple[Run, ...]:
    """Return all rows of the flat buffer, where they lie together on one of the devices."""
    found, offset = [], 0
    for unit in units(config):
        share = unit.share(devices)
        for start, (first, count) in zip(unit.starts, unit.pieces, strict=True):
            for device in range(start // share, (start + count - 1) // share + 1):
                begin, end = max(start, device * share), min(start + count, (device + 1) * share)
                place = offset + begin - device * share
                found.append(Run(device, place, first + begin - start, end - begin))
        offset += share
    return tuple(found)


def split_on_host(flat: np.ndarray, config: ModelShape, devices: int, own: range | None = None) -> np.ndarray:
    """Return a flat buffer (flat_size,) in split order, (split_size,).

    own: devices in a row whose parts alone are returned.
    """
    own = range(devices) if own is None else own
    C = row_size(config)
    found = np.zeros((len(own), split_rows(config, devices), C), flat.dtype)
    for device, place, row, count in runs(config, devices):
        if device in own:
            found[device - own.start, place : place + count] = flat[row * C : (row + count) * C].reshape(count, C)
    return found.reshape(-1)


def joined_on_host(parts: Sequence[np.ndarray], config: ModelShape) -> np.ndarray:
    """Return the flat buffer (flat_size,) of the parts (r C,) that the devices have, in their order."""
    flat = np.zeros(flat_size(config), parts[0].dtype)
    rows = flat[: num_parameters(config)].reshape(-1, row_size(config))
    on_devices = [part.reshape(-1, row_size(config)) for part in parts]
    for device, place, row, count in runs(config, len(parts)):
        rows[row : row + count] = on_devices[device][place : place + count]
    return flat
