"""One training step: micro-batches, gradient, norm, clip, schedule, update. State in, state out, jitted and donated."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelShape
from llmc_jax.models import program
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.units import own_rows, row_size
from llmc_jax.models.work import MATRICES
from llmc_jax.training.optimizer import (
    LossScaleNumbers,
    Optimizer,
    clip_scale,
    decay_ranges,
    frozen_ranges,
    in_ranges,
    next_loss_scale,
    ranges_of,
    update_by,
)
from llmc_jax.training.outliers import Outliers, is_outlier, update_outliers
from llmc_jax.training.parallel.collectives import device_number, gather, pinned
from llmc_jax.training.parallel.gradient import batch_gradient as gradient_over
from llmc_jax.training.parallel.gradient import gradient_norm
from llmc_jax.training.parallel.matrices import by_matrix
from llmc_jax.training.parallel.stage import ALONE, EVERYWHERE, SPLIT, Parallel, state_specs
from llmc_jax.training.rounding import Rows, rounding_seed
from llmc_jax.training.rules.adamw import ADAMW
from llmc_jax.training.schedule import ScheduleNumbers, learning_rate
from llmc_jax.training.state import TrainState


class StepNumbers(NamedTuple):
    """The numbers that a run sets. Traced: changing one needs no new compilation."""

    schedule: ScheduleNumbers
    optimizer: Any  # as its `update` takes them
    grad_clip: Any  # largest global norm; 0: no clipping
    loss_scale: LossScaleNumbers = LossScaleNumbers(100, 2.0)
    seed: Any = 0  # of stochastic rounding, uint32
    skip_loss_z: Any = 0.0  # a loss whose z-score exceeds this updates nothing; 0: none does
    skip_norm_z: Any = 0.0  # the same of the gradient norm


class StepOptions(NamedTuple):
    """The choices that shape the program. Static: another value is another program."""

    schedule: str
    decay: str  # 'matrices' or 'all'; 'none' where the weight decay is 0
    execution: Execution = PLAIN
    rounding: str = "nearest"  # to the compute dtype; or 'stochastic'
    optimizer: Optimizer = ADAMW
    parallel: Parallel = ALONE


class Metrics(NamedTuple):
    """What a step reports, scalars on the device."""

    loss: jax.Array  # mean over the whole batch, nats per token
    norm: jax.Array  # global norm of the gradient before clipping
    learning_rate: jax.Array
    finite: jax.Array  # False: loss or gradient was not finite, and nothing was updated
    loss_scale: jax.Array  # with which this step was made; 1 where the loss is not scaled
    z_loss: jax.Array  # of the loss among the last ones; NaN while they are fewer than outliers.WINDOW
    z_norm: jax.Array  # the same of the norm
    applied: jax.Array  # False: nothing was updated, because of what was not finite or an outlier


def batch_gradient(
    weights: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    config: ModelShape,
    execution: Execution = PLAIN,
    weight: jax.Array | float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Return mean loss and flat gradient over the micro-batches of inputs and targets (A, B, T), both times `weight`.

    weights (flat_size,): the parameters in the compute dtype. The gradient of one micro-batch has that dtype too; over
    several it is summed in at least float32, since 16 bits would lose what the later ones add. Of several devices, or
    in a fixed order: parallel/gradient.py.
    """
    micro_batches = inputs.shape[0]

    def share_of_loss(weights: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return program.loss_fn(weights, inputs, targets, config, execution, weight / micro_batches)

    value_and_grad = jax.value_and_grad(share_of_loss)
    if micro_batches == 1:
        return value_and_grad(weights, inputs[0], targets[0])

    wide = jnp.promote_types(weights.dtype, jnp.float32)

    def add(total: tuple[jax.Array, jax.Array], batch: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        loss, gradient = value_and_grad(weights, *batch)
        with jax.named_scope("gradient"):
            return (total[0] + loss, total[1] + gradient.astype(wide)), None

    zero = (jnp.zeros((), wide), jnp.zeros(weights.shape, wide))
    return jax.lax.scan(add, zero, (inputs, targets))[0]


def step_fn(
    state: TrainState,
    inputs: jax.Array,
    targets: jax.Array,
    numbers: StepNumbers,
    config: ModelShape,
    options: StepOptions,
) -> tuple[TrainState, Metrics]:
    """Make one step on inputs and targets (A, B, T) int32: A micro-batches, one update.

    With several devices, in the context of their mesh: each takes A/n micro-batches, and its part of what is split.
    """
    parallel = options.parallel
    one_device = partial(_step, config=config, options=options)
    if parallel.devices == 1:
        return one_device(state, inputs, targets, numbers)
    specs = state_specs(state, parallel)
    each = jax.shard_map(
        one_device, in_specs=(specs, SPLIT, SPLIT, EVERYWHERE), out_specs=(specs, EVERYWHERE), check_vma=False
    )
    return each(state, inputs, targets, numbers)


def _step(
    state: TrainState,
    inputs: jax.Array,
    targets: jax.Array,
    numbers: StepNumbers,
    config: ModelShape,
    options: StepOptions,
) -> tuple[TrainState, Metrics]:
    """Make the step on one device.

    What decides whether it updates anything has the same bits on every device, so none goes another way than the rest.
    A loss or gradient that is not finite updates nothing, nor does one that is an outlier by the limits in numbers; the
    step still counts for the schedule. An outlier is no overflow: the loss scale moves as after any finite step, and
    the optimizer's t counts the step, as in llm.c. It does not count one that is not finite, after which llm.c's
    parameters are NaN.
    Source: llm.c train_gpt2.cu, `gpt2_update` and the loop in `main`.
    """
    optimizer, parallel = options.optimizer, options.parallel
    wide = jnp.promote_types(state.params.dtype, jnp.float32)
    scale = jnp.ones((), wide) if state.loss_scale is None else state.loss_scale.scale
    batch = state.weights, inputs, targets, config, options.execution, scale
    loss, gradient = batch_gradient(*batch) if parallel.alone else gradient_over(*batch, parallel)
    loss = loss / scale
    gradient = without_frozen(gradient, config, parallel)
    with jax.named_scope("update"):
        with jax.named_scope("norm"):
            whole = not (parallel.splits or parallel.fixed)
            norm = (optimizer.global_norm(gradient) if whole else gradient_norm(gradient, config, parallel)) / scale
            outliers, z_loss, z_norm = _z_scores(state.outliers, loss, norm)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        applied = finite & ~(is_outlier(z_loss, numbers.skip_loss_z) | is_outlier(z_norm, numbers.skip_norm_z))
        rate = learning_rate(options.schedule, state.step, numbers.schedule)
        with jax.named_scope(optimizer.scope):
            params, *buffers, copy = update_state(
                state,
                gradient,
                config,
                options,
                scale=clip_scale(norm, numbers.grad_clip) / scale,
                learning_rate=rate,
                update=state.updates + 1,
                apply=applied,
                numbers=numbers.optimizer,
                decay=() if options.decay == "none" else decay_ranges(config, options.decay),
                rounding=options.rounding,
                seed=None if options.rounding == "nearest" else rounding_seed(numbers.seed, state.step),
            )
    moved = None if state.loss_scale is None else next_loss_scale(state.loss_scale, finite, numbers.loss_scale)
    updates = state.updates + finite.astype(jnp.int32)
    kept = dict(zip(optimizer.buffers, buffers, strict=True))
    new_state = TrainState(params, kept, state.step + 1, updates, copy, moved, outliers)
    return new_state, Metrics(loss, norm, rate, finite, scale, z_loss, z_norm, applied)


def without_frozen(gradient: jax.Array, config: ModelShape, parallel: Parallel) -> jax.Array:
    """Return the gradient, flat or a device's part of it, with zeros for what is not updated.

    Every optimizer leaves a parameter whose gradient was always zero where it is, and its buffers zero.
    """
    ranges = frozen_ranges(config)
    if not ranges:
        return gradient
    rows = own_part(config, parallel) if parallel.splits else None
    with jax.named_scope("gradient"):
        return jnp.where(in_ranges(gradient.size, ranges, rows), 0, gradient)


def own_part(config: ModelShape, parallel: Parallel) -> Rows:
    """Return which rows of the flat buffer this device has of what is split."""
    return Rows(own_rows(config, parallel.devices, device_number()), row_size(config))


def update_state(
    state: TrainState, gradient: jax.Array, config: ModelShape, options: StepOptions, **how: Any
) -> tuple[Any, ...]:
    """Return the new params, buffers and copy. how: what `update_by` takes beside the arrays.

    Where the state is split, each device updates its rows.
    """
    optimizer, parallel = options.optimizer, options.parallel
    buffers = [state.buffers[name] for name in optimizer.buffers]
    if (updated := optimizer.update) is None:
        kind = jnp.bfloat16 if state.weights.dtype.itemsize == 2 else state.weights.dtype  # fp16 loses what is small
        matrices = partial(
            by_matrix, rule_of=optimizer.rule, config=config, parallel=parallel, dtype=kind, update=how["update"]
        )
        updated = partial(update_by, rules=ranges_of(config, optimizer), by_matrix=jax.named_scope(MATRICES)(matrices))
    if parallel.fixed and (optimizer.update is None or options.decay == "all"):  # the bits of AdamW stay as they were
        how["held"] = pinned
    if not parallel.splits:
        return updated(state.params, *buffers, gradient, copy=state.copy, **how)
    rows = own_part(config, parallel)
    return updated(state.params, *buffers, gradient, copy=state.copy, rows=rows, **how)


def _z_scores(state: Outliers | None, loss: jax.Array, norm: jax.Array) -> tuple[Outliers | None, jax.Array, jax.Array]:
    if state is None:
        unknown = jnp.full((), jnp.nan, norm.dtype)
        return None, unknown, unknown
    return update_outliers(state, loss, norm)


train_step = partial(jax.jit, static_argnames=("config", "options"), donate_argnames=("state",))(step_fn)


@partial(jax.jit, static_argnames=("config", "execution"))
def evaluate_loss(
    weights: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    config: ModelShape,
    execution: Execution = PLAIN,
) -> jax.Array:
    """Return the mean loss of one batch (B, T), nats per token; weights (flat_size,) in the compute dtype."""
    return program.mean_loss(weights, inputs, targets, config, execution)


@partial(jax.jit, static_argnames=("config", "execution"))
def evaluate_losses(
    weights: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    config: ModelShape,
    execution: Execution = PLAIN,
) -> jax.Array:
    """Return what `evaluate_loss` returns of each of n batches (n, B, T), one on each device of the mesh: (n,).

    Every device has all of them.
    """

    def one_device(weights: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return gather(program.mean_loss(weights, inputs[0], targets[0], config, execution)[None])

    each = jax.shard_map(one_device, in_specs=(EVERYWHERE, SPLIT, SPLIT), out_specs=EVERYWHERE, check_vma=False)
    return each(weights, inputs, targets)
