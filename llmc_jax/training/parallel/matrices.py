"""Whole matrices for an optimizer that needs them, wherever their rows lie.

Where the state is split, every device has an n-th of the rows of each layer, and of no matrix all. So the layers are
exchanged, a round of n of them at a time: device d gets the rows of the d-th from all devices, computes with its
matrices, and sends the rows of the results back. Each matrix is computed by exactly one device. No round waits for
another, so that one can be sent while another is computed. A device that has the whole buffer computes with all of it,
the layers together.

In a fixed order one layer is computed after another, in a loop whose length the compiler does not know, between
barriers. So it is compiled alike on any number of devices, and gives the same bits.

    n devices, L layers, C elements of a row, R rows of a layer, s = R / n rounded up
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelShape
from llmc_jax.models.gradients import put_together
from llmc_jax.models.layout import flat_size, matrix_shape, num_layers, num_parameters, tensor_specs
from llmc_jax.models.tensors import Tensor
from llmc_jax.models.units import row_size, units
from llmc_jax.training.optimizer import Rule
from llmc_jax.training.parallel.collectives import exchange, pinned
from llmc_jax.training.parallel.stage import Parallel


def by_matrix(
    rule: Rule,
    values: jax.Array,
    *,
    rule_of: Callable[[Tensor], Rule],
    config: ModelShape,
    parallel: Parallel,
    dtype: Any,
    update: jax.Array,
) -> jax.Array:
    """Return what a rule for matrices makes of values: a flat buffer, or this device's part of one (r C,).

    rule_of: says which tensors the rule is for; elsewhere there are zeros. dtype: of what is sent and computed with.
    update: a number above 0, which the compiler does not know.
    """
    layered = [spec for spec in tensor_specs(config) if spec.tensor.layered]
    whose = [rule_of(spec.tensor) == rule for spec in layered]
    n, L, C = parallel.devices if parallel.splits else 1, num_layers(config), row_size(config)
    low, unit = values.astype(dtype), units(config)[-1]
    share = unit.share(n)
    if parallel.splits:
        own = low.reshape(-1, C)[-L * share :].reshape(L, share, C)
    else:
        own = jnp.concatenate([low[s.offset : s.offset + s.size].reshape(L, -1, C) for s in layered], axis=1)
    missing = jnp.zeros((-L % n, share, C), dtype)
    rounds = jnp.concatenate([own, missing]).reshape(-1, n, share, C)

    def of_layer(rows: jax.Array) -> jax.Array:
        """Return the results of a round, (n, s, C): this device's rows of n layers in and out."""
        whole = (exchange(rows) if n > 1 else rows).reshape(-1, C)
        whole = pinned(whole) if parallel.fixed else whole
        found = {
            start: whole[start : start + count].reshape(matrix_shape(spec))
            for spec, own, start, (_, count) in zip(layered, whose, unit.starts, unit.pieces, strict=True)
            if own
        }
        found = alike(rule.matrix, found)
        pieces = [
            found[start].reshape(-1, C) if start in found else jnp.zeros((count, C), dtype)
            for start, (_, count) in zip(unit.starts, unit.pieces, strict=True)
        ]
        out = jnp.concatenate([*pieces, jnp.zeros((n * share - unit.rows, C), dtype)])
        out = (pinned(out) if parallel.fixed else out).reshape(n, share, C)
        return exchange(out) if n > 1 else out

    if parallel.fixed:
        known = jnp.where(update > 0, len(rounds), 0).astype(jnp.int32)
        found = jax.lax.fori_loop(0, known, lambda i, found: found.at[i].set(of_layer(rounds[i])), rounds)
    elif n > 1:
        found = jnp.stack([of_layer(rows) for rows in rounds])
    else:
        found = jax.vmap(of_layer)(rounds)
    found = found.reshape(-1, share, C)[:L]
    if parallel.splits:
        before = jnp.zeros(values.size - found.size, dtype)
        return jnp.concatenate([before, found.reshape(-1)]).astype(values.dtype)
    starts = iter(zip(unit.starts, unit.pieces, strict=True))
    pieces = []
    for spec in tensor_specs(config):
        start, (_, count) = next(starts) if spec.tensor.layered else (0, (0, 0))
        pieces.append(found[:, start : start + count] if count else jnp.zeros(spec.size, dtype))
    padding = jnp.zeros(flat_size(config) - num_parameters(config), dtype)
    return put_together([*pieces, padding], dtype).astype(values.dtype)


def alike(function: Any, matrices: dict[int, jax.Array]) -> dict[int, jax.Array]:
    """Return what a function makes of matrices (…, rows, cols), by their keys: those of one shape together."""

    def shape(key: int) -> tuple[int, ...]:
        return matrices[key].shape[-2:]

    found = {}
    for _, group in groupby(sorted(matrices, key=shape), key=shape):
        keys = list(group)
        counts = [len(matrices[key]) for key in keys]
        made = function(jnp.concatenate([matrices[key] for key in keys]))
        for key, count in zip(keys, counts, strict=True):
            found[key], made = made[:count], made[count:]
    return found
