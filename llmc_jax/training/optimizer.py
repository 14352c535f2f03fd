"""An optimizer as the step sees it: its buffers, its update, its numbers; and what every one of them shares.

fp16's loss scale among it: the loss is multiplied up to where fp16 can hold small gradients. Source: Micikevicius et
al., Mixed Precision Training (2018).
"""

from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import TrainConfig
from llmc_jax.models.layout import Piece, pieces
from llmc_jax.models.tensors import FLAT_MULTIPLE, Tensor
from llmc_jax.training.rounding import Rows, check_rounding, rounded


def global_norm(gradient: jax.Array) -> jax.Array:
    """Return the L2 norm of a flat gradient (flat_size,), a scalar in at least float32.

    Summed row by row, then over the rows: one running float32 sum over 10^8 squares would lose digits.
    """
    # A CPU's program would share one conversion with the update, and keep all of it in memory.
    alone = jax.lax.platform_dependent(gradient, cpu=jax.lax.optimization_barrier, default=lambda gradient: gradient)
    rows = alone.reshape(-1, FLAT_MULTIPLE // 16).astype(jnp.promote_types(gradient.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(jnp.sum(rows * rows, axis=1)))


class Rule(NamedTuple):
    """How an optimizer changes each element of the tensors that it is for. Static: another one is another program.

    g: the gradient; t: the update, counted from 1; n: the optimizer's numbers.
    """

    # what it keeps: names, and of each (before, g, t, n) -> after; all are zero at first
    buffers: tuple[tuple[str, Callable[..., jax.Array]], ...]
    change: Callable[..., jax.Array]  # (g, *buffers, t, n) -> what is subtracted, times the learning rate
    couples: bool = False  # weight decay is added to the gradient, otherwise to the change
    # of a rule for whole matrices: what `change` returns of some, (…, rows, cols), -> what is subtracted in its place
    matrix: Callable[[jax.Array], jax.Array] | None = None
    products: int = 0  # steps of that, each of X X^T, its square, and their sum times X


class Optimizer(NamedTuple):
    """An optimizer. Static: another one is another program."""

    name: str
    rules: tuple[Rule, ...]
    numbers: tuple[str, ...]  # options of train.py that it takes beside the weight decay
    rule_of: Callable[[Tensor], Rule] | None = None  # one of `rules`, where there are several
    scope: str = "optimizer"  # the named scope that it runs in
    update: Callable[..., Any] | None = None  # a kernel in the place of `update_by`
    global_norm: Callable[[jax.Array], jax.Array] = global_norm
    source: str = ""  # of one in a user's file: its digest
    path: Path | None = None  # the file
    content: bytes = b""  # and what it held when it was loaded

    def rule(self, tensor: Tensor) -> Rule:
        """Return the rule of a tensor."""
        return self.rules[0] if self.rule_of is None else self.rule_of(tensor)

    @property
    def key(self) -> str:
        """Return its name, of one in a user's file with an @ and the file's digest."""
        return f"{self.name}@{self.source[:12]}" if self.source else self.name

    @property
    def buffers(self) -> tuple[str, ...]:
        """Return the names of what it keeps beside the parameters: each (flat_size,), at least float32."""
        return tuple(dict.fromkeys(name for rule in self.rules for name, _ in rule.buffers))


record: Any = cache(partial(namedtuple, "Numbers"))  # the type of numbers with some names
Ranges = tuple[tuple[int, int], ...]  # [start, stop) of the flat buffer


def numbers_of(optimizer: Optimizer, config: TrainConfig) -> Any:
    """Return an optimizer's numbers as a run sets them, by their names. Traced: others need no new compilation."""
    names = (*optimizer.numbers, "weight_decay")
    return record(names)._make(float(getattr(config, name)) for name in names)


@cache
def ranges_of(config: ModelShape, optimizer: Optimizer) -> tuple[tuple[Rule, Ranges], ...]:
    """Return an optimizer's rules, and the ranges of the flat buffer that each is for. The first is for all others.

    Raises InputError where a tensor's rule is none of them, or is one for matrices and the tensor none of a layer.
    """
    found: dict[Rule, list[Piece]] = {rule: [] for rule in optimizer.rules}
    for piece in pieces(config):
        tensor = piece.spec.tensor
        rule = optimizer.rule(tensor)
        if rule not in found or (rule.matrix is not None and not tensor.layer_matrix):
            words = "its rule for matrices is for it, which is none" if rule in found else "its rule is none of `rules`"
            raise InputError(f"--optimizer {optimizer.path or optimizer.name}: {tensor.name}: {words}")
        found[rule].append(piece)
    return tuple((rule, joined(ranges)) for rule, ranges in found.items())


def update_by(
    params: jax.Array,
    *arrays: jax.Array,
    rules: tuple[tuple[Rule, Ranges], ...],
    scale: jax.Array,
    learning_rate: jax.Array,
    update: jax.Array,
    apply: jax.Array,
    numbers: Any,
    decay: Ranges,
    copy: jax.Array | None = None,
    rounding: str = "nearest",
    seed: jax.Array | None = None,
    rows: Rows | None = None,
    by_matrix: Callable[[Rule, jax.Array], jax.Array] | None = None,
    held: Callable[[jax.Array], jax.Array] = lambda values: values,
) -> tuple[Any, ...]:
    """Update flat params and an optimizer's buffers (flat_size,) by scale * gradient: the new ones, and the copy.

    arrays: the buffers, and the gradient. rules: as `ranges_of` has them. by_matrix: returns what a rule's `matrix`
    makes of each matrix in what its `change` has found. rows: where the buffers are a part of the flat ones, which rows
    of it; decay and stochastic rounding go by those. held: a barrier behind each product, where the compiler must not
    choose by the program which products it fuses with a sum.
    params: float32 master weights, or bfloat16/float16 without any (llm.c's -w 0); the arithmetic is in at least
    float32 and rounded once. gradient: any of those dtypes. update: t, counted from 1. apply: boolean scalar; where
    False everything stays what it was. decay: the ranges that weight decay applies to; none of them: no decay.
    copy: the master weights in the dtype that the model computes in, (flat_size,), written anew; None: there is none.
    rounding: 'nearest' or 'stochastic' (`round_stochastically` with seed () uint32, another one at each update), of
    what is rounded down from float32: the copy, or bfloat16 params. Raises ValueError for another rounding, for a
    stochastic one without a seed or with nothing in bfloat16 to round, and for a copy of params that are no masters.
    """
    *buffers, gradient = arrays
    wide = jnp.promote_types(params.dtype, jnp.float32)
    check_rounding(params, copy, rounding, seed)
    g = held(gradient.astype(wide) * scale)
    masks = [in_ranges(params.size, ranges, rows) for _, ranges in rules[1:]]

    def pulled(values: jax.Array, before: jax.Array) -> jax.Array:
        """Return values with what weight decay adds to them. before: the parameters, in at least float32."""
        if not decay:
            return values
        return values + held(jnp.where(in_ranges(params.size, decay, rows), numbers.weight_decay * before, 0.0))

    def of_each(found: list[jax.Array]) -> jax.Array:
        """Return of each element what its rule has found."""
        return reduce(lambda rest, one: jnp.where(one[0], one[1], rest), zip(masks, found[1:], strict=True), found[0])

    gradients = [pulled(g, params.astype(wide)) if rule.couples else g for rule, _ in rules]
    kept = dict(zip(dict.fromkeys(name for rule, _ in rules for name, _ in rule.buffers), buffers, strict=True))
    for name, old in kept.items():
        moves = (dict(rule.buffers).get(name, lambda old, *_: old) for rule, _ in rules)
        new = [move(old, each, update, numbers) for move, each in zip(moves, gradients, strict=True)]
        kept[name] = jnp.where(apply, of_each(new), old)
    # The barrier makes the parameters' update read the new buffers. Without it XLA may compute them a second time from
    # the old ones, which it then has to keep: two copies of the buffers.
    kept = dict(zip(kept, jax.lax.optimization_barrier(tuple(kept.values())), strict=True))
    changes = []
    for (rule, ranges), each in zip(rules, gradients, strict=True):
        change = rule.change(each, *(kept[name] for name, _ in rule.buffers), update, numbers)
        if ranges and rule.matrix is not None and by_matrix is not None:
            change = by_matrix(rule, change)
        changes.append(change)
    before = params.astype(wide)
    changes = [each if rule.couples else pulled(each, before) for (rule, _), each in zip(rules, changes, strict=True)]
    after = before - held(learning_rate * of_each(changes))
    if params.dtype != wide:
        return jnp.where(apply, rounded(after, params.dtype, rounding, seed, rows), params), *kept.values(), None
    params = jnp.where(apply, after, params)
    if copy is not None:
        params = jax.lax.optimization_barrier(params)  # as above: the copy is made of the new ones
        copy = jnp.where(apply, rounded(params, copy.dtype, rounding, seed, rows), copy)
    return params, *kept.values(), copy


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
