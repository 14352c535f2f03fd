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

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelShape
from llmc_jax.models.gradients import put_together
from llmc_jax.models.layout import flat_size, matrix_shapes, num_layers, num_parameters, tensor_specs
from llmc_jax.models.tensors import Tensor, TensorSpec
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
    n, L, C = parallel.devices if parallel.splits else 1, num_layers(config), row_size(config)
    low, unit = values.astype(dtype), units(config)[-1]
    share = unit.share(n)
    layered = [spec for spec in tensor_specs(config) if spec.tensor.layered]
    counts = (count for _, count in unit.pieces)
    rows_of = {s: slice(at, at + count) for s, at, count in zip(layered, unit.starts, counts, strict=True)}
    if parallel.splits:
        own = low.reshape(-1, C)[-L * share :].reshape(L, share, C)
    else:
        own = jnp.concatenate([low[s.offset : s.offset + s.size].reshape(L, -1, C) for s in layered], axis=1)
    rounds = jnp.concatenate([own, jnp.zeros((-L % n, share, C), dtype)]).reshape(-1, n, share, C)
    held = pinned if parallel.fixed else lambda rows: rows

    def of_spec(spec: TensorSpec, rows: jax.Array) -> jax.Array:
        if rule.matrix is None or rule_of(spec.tensor) != rule:
            return jnp.zeros_like(rows)
        shapes = matrix_shapes(spec, config)
        parts = jnp.split(rows.reshape(-1), list(accumulate(math.prod(shape) for shape in shapes))[:-1])
        found = [rule.matrix(part.reshape(shape)).reshape(-1) for part, shape in zip(parts, shapes, strict=True)]
        return jnp.concatenate(found).reshape(-1, C)

    def of_layer(rows: jax.Array) -> jax.Array:
        """Return the results of a round, (n, s, C): this device's rows of n layers in and out."""
        whole = held((exchange(rows) if n > 1 else rows).reshape(-1, C))
        found = [of_spec(spec, whole[rows]) for spec, rows in rows_of.items()]
        out = held(jnp.concatenate([*found, jnp.zeros((n * share - unit.rows, C), dtype)])).reshape(n, share, C)
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
        return jnp.concatenate([jnp.zeros(values.size - found.size, dtype), found.reshape(-1)]).astype(values.dtype)
    zeros = partial(jnp.zeros, dtype=dtype)
    pieces = [found[:, rows_of[spec]] if spec in rows_of else zeros(spec.size) for spec in tensor_specs(config)]
    padding = zeros(flat_size(config) - num_parameters(config))
    return put_together([*pieces, padding], dtype).astype(values.dtype)
