"""The gradient of a batch that is spread over devices: summed over micro-batches and devices, whole or split.

With one micro-batch on each device, each layer's gradients are summed over the devices as soon as the backward has made
them, while it goes on. With several, stages 0 and 1 sum on each device first, and over the devices once per update: so
there is less to exchange the more micro-batches there are. Stage 2 exchanges each micro-batch's, and keeps only its
part of their sum, so the whole gradient never exists. But for wte's: the output head makes the whole of it (Vp C
elements in float32, 31 % of GPT-2 124M's parameters) and it stays until the backward has reached the embedding.

In a fixed order ("--reduction fixed") an update is a tree of sums over its A micro-batches, in llm.c's order:

    A = 8:   ((0+1)+(2+3)) + ((4+5)+(6+7))

n devices, a power of two, take a subtree each and then sum over devices by halves, or the other way round. Either way
it is the same tree, so the same bits. Where A is no power of two, its odd factor is summed at the bottom, first to
last. A leaf is one micro-batch's gradient, compiled alike on any number of devices: in a loop whose length the compiler
does not know, between barriers. Each device keeps up to log2(A/n) + 2 gradients in float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelShape
from llmc_jax.models import program
from llmc_jax.models.execution import Execution
from llmc_jax.models.gradients import pieces_of
from llmc_jax.models.layout import num_parameters, tensor_specs
from llmc_jax.models.units import as_rows, flat_of, own_rows, row_size, tensors_in, total_rows
from llmc_jax.training.parallel.collectives import (
    all_reduce,
    device_number,
    pinned,
    summed,
    summed_number,
    wide,
)
from llmc_jax.training.parallel.stage import Parallel
from llmc_jax.training.parallel.weights import gathered

Found = tuple[jax.Array, tuple[jax.Array, ...]]  # a loss, and gradients as units


def batch_gradient(
    weights: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    config: ModelShape,
    execution: Execution,
    weight: jax.Array | float,
    parallel: Parallel,
) -> tuple[jax.Array, jax.Array]:
    """Return mean loss and gradient over the micro-batches of all devices, both times `weight`.

    inputs, targets (A/n, B, T): this device's. weights, in the compute dtype, and the gradient are flat (flat_size,),
    or where the state is split, this device's part (r C,).
    """
    micro_batches, kind = inputs.shape[0], weights.dtype
    of_model = tensors_in(gathered(weights, config, parallel.devices), config) if parallel.splits else weights
    share_of_loss = weight / (micro_batches * parallel.devices)
    at_once = parallel.stage == 2 or (micro_batches == 1 and not parallel.fixed)
    multiple = parallel.devices if parallel.splits or parallel.fixed else 1  # what divides the rows of a unit
    waits = parallel.splits and parallel.stage == 2

    def over_devices(rows: jax.Array) -> jax.Array:
        with jax.named_scope("reduce"):
            return summed(rows, parallel)

    def unit(tensors: Any) -> jax.Array:
        with jax.named_scope("gradient"):
            rows = as_rows(jax.tree.map(lambda leaf: leaf.astype(kind), tensors), row_size(config), multiple)
        return over_devices(rows) if at_once else rows

    def of_micro_batch(inputs: jax.Array, targets: jax.Array) -> Found:
        """Return what inputs and targets (B, T) add to the loss, and their gradients in the order of `units`."""
        batch = of_model, inputs, targets, config, execution, share_of_loss
        loss, (found, blocks) = program.loss_and_gradients(*batch, unit, waits)
        whole = [spec for spec in tensor_specs(config) if not spec.tensor.layered]
        own = (unit(found[spec.name]) for spec in whole if spec.tensor.own)
        ends = tuple(pieces_of(found[spec.name], spec) for spec in whole if not spec.tensor.own)
        return loss, (*own, *((unit(ends),) if ends else ()), *blocks)

    if parallel.fixed:
        found = sum_of_tree(of_micro_batch, inputs, targets, at_once, parallel)
    elif micro_batches == 1:
        found = of_micro_batch(inputs[0], targets[0])
    else:
        found = sum_in_turn(of_micro_batch, inputs, targets)
    loss, units = found
    if not at_once:
        # of one micro-batch it is a gradient in the weights' dtype, which it has only been widened from
        dtype = kind if micro_batches == 1 else None
        units = tuple(over_devices(rows if dtype is None else rows.astype(dtype)) for rows in units)
    if not (parallel.fixed and at_once):
        loss = summed_number(loss, parallel)
    with jax.named_scope("gradient"):
        return loss, jnp.concatenate(units).reshape(-1) if parallel.splits else flat_of(units, config)


# ----- sums over micro-batches ----------------------------------------------------------------------------------------


def sum_in_turn(of_micro_batch: Callable[..., Found], inputs: jax.Array, targets: jax.Array) -> Found:
    """Return the sum over micro-batches (a, B, T), first to last, in at least float32."""

    def add(total: Found, batch: tuple[jax.Array, jax.Array]) -> tuple[Found, None]:
        found = of_micro_batch(*batch)
        with jax.named_scope("gradient"):
            return jax.tree.map(lambda a, b: a + wide(b), total, found), None

    shapes = jax.eval_shape(of_micro_batch, inputs[0], targets[0])
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), shapes)
    return jax.lax.scan(add, zero, (inputs, targets))[0]


def odd_factor(count: int) -> int:
    """Return the odd number that a count is, but for a power of two."""
    return count // (count & -count)


def sums_kept(micro_batches: int) -> int:
    """Return how many gradients in float32 one device keeps for the tree over its micro-batches."""
    odd = odd_factor(micro_batches)
    return (micro_batches // odd).bit_length() + (odd > 1)


def sum_of_tree(
    of_micro_batch: Callable[..., Found], inputs: jax.Array, targets: jax.Array, at_once: bool, parallel: Parallel
) -> Found:
    """Return the sum over this device's micro-batches (a, B, T) by halves, in at least float32.

    at_once: `of_micro_batch` has summed the gradients over the devices; the loss then is here.
    """
    count = inputs.shape[0]
    odd = odd_factor(count)  # that many are summed in turn, at the bottom
    groups = count // odd
    levels = groups.bit_length()

    def leaf(i: jax.Array) -> Found:
        batch = (jax.lax.dynamic_index_in_dim(each, i, keepdims=False) for each in (inputs, targets))
        *batch, _ = pinned((*batch, i))
        loss, units = pinned(of_micro_batch(*batch))
        return pinned(jax.tree.map(wide, (summed_number(loss, parallel) if at_once else loss, units)))

    def group(g: jax.Array) -> Found:
        if odd == 1:
            return leaf(g)

        def add(i: jax.Array, total: Found) -> Found:
            return pinned(jax.tree.map(jnp.add, total, leaf(g * odd + i)))

        return jax.lax.fori_loop(1, unknown(odd, inputs), add, leaf(g * odd))

    def push(g: jax.Array, sums: tuple[Found, ...]) -> tuple[Found, ...]:
        """Put the next sum on the pile, and add up what is complete: as a carry goes through a binary counter."""
        new = group(g)
        complete = jax.lax.population_count(g ^ (g + 1)) - 1  # the ones at the end of g: sums that wait for this one
        return pinned(jax.lax.switch(complete, [partial(merged, level=level) for level in range(levels)], sums, new))

    def merged(sums: tuple[Found, ...], new: Found, level: int) -> tuple[Found, ...]:
        for earlier in sums[:level]:
            new = jax.tree.map(jnp.add, earlier, new)
        return (*sums[:level], new, *sums[level + 1 :])

    shapes = jax.eval_shape(leaf, jnp.int32(0))
    empty = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
    return jax.lax.fori_loop(0, unknown(groups, inputs), push, (empty,) * levels)[-1]


def unknown(number: int, tokens: jax.Array) -> jax.Array:
    """Return a number that the compiler does not know. It would unroll a loop of one round, and fuse it otherwise.

    tokens: ids, which are never negative.
    """
    return jnp.where(tokens[0, 0, 0] >= 0, number, 0).astype(jnp.int32)


# ----- the norm -----------------------------------------------------------------------------------------------------


def gradient_norm(gradient: jax.Array, config: ModelShape, parallel: Parallel) -> jax.Array:
    """Return the L2 norm of the whole gradient, of which this device has a part or all: a scalar.

    Summed row by row, then over the rows. In a fixed order that is the order of the flat buffer, however it is split.
    """
    of_model = gradient if parallel.splits else gradient[: num_parameters(config)]
    rows = wide(of_model.reshape(-1, row_size(config)))
    if not parallel.fixed:
        return jnp.sqrt(all_reduce(jnp.sum(jnp.sum(rows * rows, axis=1))))
    # The compiler chooses in which order it sums a row, by how many there are: so the additions are written out.
    parts = pinned(rows * rows)
    while (width := parts.shape[1]) > 1:
        half = width // 2
        odd = parts[:, 2 * half :]
        parts = jnp.concatenate([parts[:, :half] + parts[:, half : 2 * half], odd], axis=1)
    squares = pinned(parts[:, 0])  # (r,), or (R,) of the flat gradient
    if parallel.splits:
        own = own_rows(config, parallel.devices, device_number())
        row_by_row = jnp.zeros(total_rows(config) + 1, squares.dtype).at[own].set(squares)  # zeros are exact to add
        squares = pinned(all_reduce(row_by_row[:-1]))
    return jnp.sqrt(jnp.sum(squares))
