"""An optimizer as the step sees it: its buffers, its update, its numbers; and what every one of them shares.

fp16's loss scale among it: the loss is multiplied up to where fp16 can hold small gradients. Source: Micikevicius et
al., Mixed Precision Training (2018).
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import TrainConfig
from llmc_jax.models.layout import Piece, pieces
from llmc_jax.models.tensors import FLAT_MULTIPLE
from llmc_jax.training.rounding import Rows


class Optimizer(NamedTuple):
    """An optimizer. Static: another one is another program."""

    name: str
    buffers: tuple[str, ...]  # what it keeps beside the parameters: each (flat_size,), at least float32, zero at first
    update: Callable[..., Any]  # (params, *buffers, gradient, …) -> (params, *buffers, copy), as adamw.adamw_update
    global_norm: Callable[[jax.Array], jax.Array]
    numbers: Callable[[TrainConfig], Any]  # what `update` takes as `numbers`


def global_norm(gradient: jax.Array) -> jax.Array:
    """Return the L2 norm of a flat gradient (flat_size,), a scalar in at least float32.

    Summed row by row, then over the rows: one running float32 sum over 10^8 squares would lose digits.
    """
    rows = gradient.reshape(-1, FLAT_MULTIPLE // 16).astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(jnp.sum(rows * rows, axis=1)))


def clip_scale(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """Return what to multiply the gradient by so that its norm is at most `limit`; limit <= 0: no clipping."""
    return jnp.where((limit > 0) & (norm > limit), limit / norm, 1.0).astype(norm.dtype)


def decay_ranges(config: ModelShape, rule: str) -> tuple[tuple[int, int], ...]:
    """Return the ranges [start, stop) of the flat buffer that weight decay applies to, neighbours joined.

    rule: 'matrices' as train_gpt2.cu (wte, wpe and the weight matrices), or 'all' as train_gpt2.c. What is frozen
    does not decay.
    """
    return joined(each for each in pieces(config) if not each.frozen and (rule == "all" or each.spec.tensor.matrix))


@cache
def frozen_ranges(config: ModelShape) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the flat buffer that are not updated, neighbours joined."""
    return joined(each for each in pieces(config) if each.frozen)


def joined(found: Iterable[Piece]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of some pieces of the flat buffer, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for _, _, start, stop, _ in found:
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return tuple(ranges)


def in_ranges(size: int, ranges: tuple[tuple[int, int], ...], rows: Rows | None = None) -> jax.Array:
    """Return which elements of a flat buffer, or of some rows of it, lie in one of the ranges, boolean (size,).

    The ranges are whole rows.
    """
    if rows is None:
        return _in_ranges(size, ranges)
    number, length = rows.numbers, rows.length
    inside = jnp.zeros(number.shape, bool)
    for start, stop in ranges:
        inside |= (number >= start // length) & (number < stop // length)
    return jnp.broadcast_to(inside[:, None], (number.size, length)).reshape(-1)


def _in_ranges(size: int, ranges: tuple[tuple[int, int], ...]) -> jax.Array:
    """Return which positions of a flat buffer lie in one of the ranges, boolean (size,)."""
    inside = jnp.zeros(size, bool)
    if size <= 2**32:
        position = jax.lax.iota(jnp.uint32, size)
        for start, stop in ranges:  # unsigned, positions before the range wrap round to large numbers: one comparison
            inside |= position - jnp.uint32(start) < jnp.uint32(stop - start)
        return inside
    # More elements than 32 bits count: compare (row, column). Right for any size, but twice as slow on a CPU.
    row = jax.lax.broadcasted_iota(jnp.int32, (size // FLAT_MULTIPLE, FLAT_MULTIPLE), 0).reshape(size)
    column = jax.lax.broadcasted_iota(jnp.int32, (size // FLAT_MULTIPLE, FLAT_MULTIPLE), 1).reshape(size)

    def at_or_after(position: int) -> jax.Array:
        r, c = divmod(position, FLAT_MULTIPLE)
        return (row > r) | ((row == r) & (column >= c))

    for start, stop in ranges:
        inside |= at_or_after(start) & ~at_or_after(stop)
    return inside


SMALLEST_SCALE = 2.0**-14  # the loss is divided by the scale again: it must never reach zero


class LossScale(NamedTuple):
    """The loss scale and what moves it."""

    scale: jax.Array  # () float32, what the loss is multiplied by
    clean: jax.Array  # () int32, steps without overflow since it last changed


class LossScaleNumbers(NamedTuple):
    """The numbers that move the loss scale."""

    growth_steps: Any  # after so many steps without overflow it grows
    factor: Any  # by this; an overflow divides it by the same


def next_loss_scale(state: LossScale, finite: jax.Array, numbers: LossScaleNumbers) -> LossScale:
    """Return the loss scale after a step: smaller after an overflow, larger after growth_steps without one."""
    clean = jnp.where(finite, state.clean + 1, 0)
    grows = clean >= numbers.growth_steps
    factor = jnp.where(finite, jnp.where(grows, numbers.factor, 1.0), 1.0 / numbers.factor)
    scale = jnp.maximum(state.scale * factor, SMALLEST_SCALE)
    return LossScale(scale.astype(jnp.float32), jnp.where(grows, 0, clean))
