"""Mistakes in what several devices exchange, by name: each must make a comparison of test_mutations.py fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llmc_jax.training import optimizer, rounding, step
from llmc_jax.training.parallel import collectives, gradient, matrices, placement, weights
from llmc_jax.training.parallel.collectives import device_number
from llmc_jax.training.parallel.stage import AXIS, Parallel

Patch = pytest.MonkeyPatch


@contextmanager
def made(name: str) -> Iterator[None]:
    """Make a mistake within the block; none without a name."""
    with Patch.context() as patch:
        if name:
            MISTAKES[name](patch)
        yield


def everywhere(patch: Patch, name: str, wrong: Any) -> None:
    """Replace a collective where it is defined and where it is used."""
    for module in (collectives, gradient, weights):
        if hasattr(module, name):
            patch.setattr(module, name, wrong)


def devices() -> int:
    return jax.lax.axis_size(AXIS)


def all_reduce(patch: Patch) -> None:
    everywhere(patch, "all_reduce", lambda array: array)


def reduce_scatter(patch: Patch) -> None:
    def wrong(rows: jax.Array) -> jax.Array:
        share = rows.shape[0] // devices()
        return jax.lax.dynamic_slice_in_dim(rows, device_number() * share, share)

    everywhere(patch, "reduce_scatter", wrong)


def gather(patch: Patch) -> None:
    everywhere(patch, "gather", lambda rows: jnp.concatenate([rows] * devices()))


def gather_of_weights(patch: Patch) -> None:
    """Every device computes with its own rows alone, and zeros for those of the others."""
    right = gradient.gathered

    def wrong(part: Any, config: Any, devices: int) -> list[jax.Array]:
        return [
            jnp.where((jnp.arange(len(rows)) * devices // len(rows) == device_number())[:, None], rows, 0)
            for rows in right(part, config, devices)
        ]

    patch.setattr(gradient, "gathered", wrong)


def exchange(patch: Patch) -> None:
    everywhere(patch, "exchange", lambda parts: parts)


def summed_number(patch: Patch) -> None:
    everywhere(patch, "summed_number", lambda number, parallel: number)


def norm_of_the_own_part(patch: Patch) -> None:
    def wrong(found: jax.Array, config: Any, parallel: Parallel) -> jax.Array:
        return jnp.sqrt(jnp.sum(found.astype(jnp.float32) ** 2))

    patch.setattr(step, "gradient_norm", wrong)


def norm_in_the_order_of_the_parts(patch: Patch) -> None:
    """Another order of the same squares."""

    def wrong(found: jax.Array, config: Any, parallel: Parallel) -> jax.Array:
        rows = found.astype(jnp.float32).reshape(-1, config.channels)
        return jnp.sqrt(jnp.sum(collectives.pinned(collectives.gather(jnp.sum(rows * rows, axis=1)))))

    patch.setattr(step, "gradient_norm", wrong)


def decay_by_the_place(patch: Patch) -> None:
    """A part's elements decay as if it were the beginning of the buffer."""
    right = optimizer.in_ranges
    patch.setattr(optimizer, "in_ranges", lambda size, ranges, rows: right(size, ranges, first_rows(rows)))


def noise_by_the_place(patch: Patch) -> None:
    right = rounding._noise_positions_of
    patch.setattr(rounding, "_noise_positions_of", lambda rows: right(first_rows(rows)))


def first_rows(rows: Any) -> Any:
    return rows and rows._replace(numbers=jnp.arange(rows.numbers.size, dtype=jnp.int32))


def sum_from_first_to_last(patch: Patch) -> None:
    """Another order of the same numbers."""

    def wrong(values: list[jax.Array]) -> jax.Array:
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    everywhere(patch, "by_halves", wrong)


def neighbours_on_one_device(patch: Patch) -> None:
    """Stage 2 sums micro-batches over the devices that are no neighbours in the tree."""
    patch.setattr(Parallel, "interleaved", False)


def micro_batches_summed_in_turn(patch: Patch) -> None:
    def wrong(of_micro_batch: Any, inputs: Any, targets: Any, at_once: bool, parallel: Parallel) -> Any:
        def leaf(inputs: jax.Array, targets: jax.Array) -> Any:
            loss, units = of_micro_batch(inputs, targets)
            return summed_number(loss, parallel) if at_once else loss, units

        return gradient.sum_in_turn(leaf, inputs, targets)

    summed_number = gradient.summed_number
    patch.setattr(gradient, "sum_of_tree", wrong)


def loss_of_one_device(patch: Patch) -> None:
    """The loss, and so the gradient, is divided by the micro-batches of a device, not by all."""
    right = step.gradient_over

    def wrong(*batch: Any) -> Any:
        *rest, weight, parallel = batch
        return right(*rest, weight * parallel.devices, parallel)

    patch.setattr(step, "gradient_over", wrong)


def same_batch_on_every_device(patch: Patch) -> None:
    patch.setattr(placement, "order_of_batches", lambda count, parallel: [i % (count // parallel.devices)
                                                                         for i in range(count)])  # fmt: skip


def narrow_sums(patch: Patch) -> None:
    """Sums over devices in a fixed order are in 16 bits."""
    patch.setattr(collectives, "wide", lambda array: array)


def matrices_of_the_own_rows(patch: Patch) -> None:
    """A device takes its rows of some layers for all rows of one."""
    patch.setattr(matrices, "exchange", lambda rows: rows)


MISTAKES: dict[str, Callable[[Patch], None]] = {
    each.__name__: each
    for each in (
        all_reduce, reduce_scatter, gather, gather_of_weights, exchange, summed_number, norm_of_the_own_part,
        norm_in_the_order_of_the_parts, decay_by_the_place, noise_by_the_place, sum_from_first_to_last,
        neighbours_on_one_device, micro_batches_summed_in_turn, loss_of_one_device, same_batch_on_every_device,
        narrow_sums, matrices_of_the_own_rows,
    )
}  # fmt: skip
