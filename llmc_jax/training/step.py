"""One training step: micro-batches, gradient, norm, clip, schedule, update. State in, state out, jitted and donated."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.models.gpt2.model import PLAIN, Execution
from llmc_jax.models.gpt2.tensors import views
from llmc_jax.ops.linear import linear_forward
from llmc_jax.training.adamw import AdamWNumbers, clip_scale, decay_ranges, squirrel_noise5
from llmc_jax.training.outliers import Outliers, init_outliers, is_outlier, update_outliers
from llmc_jax.training.schedule import ScheduleNumbers, learning_rate


class LossScale(NamedTuple):
    """fp16's dynamic loss scaling: small gradients are multiplied up to where fp16 can hold them."""

    scale: jax.Array  # () float32, what the loss is multiplied by
    clean: jax.Array  # () int32, steps without overflow since it last changed


SMALLEST_SCALE = 2.0**-14  # the loss is divided by the scale again: it must never reach zero


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: jax.Array  # (flat_size,) float32; in the compute dtype where there are no master weights
    m: jax.Array  # (flat_size,) float32, running mean of the gradient
    v: jax.Array  # (flat_size,) float32, running mean of its square
    step: jax.Array  # () int32, steps taken, which the schedule counts
    updates: jax.Array  # () int32, AdamW's t: the finite steps, those that an outlier kept from updating among them
    copy: jax.Array | None = None  # (flat_size,) the parameters rounded to the compute dtype; None: they are in it
    loss_scale: LossScale | None = None  # None: the loss is not scaled
    outliers: Outliers | None = None  # None: none are looked for, and z-scores are NaN

    @property
    def weights(self) -> jax.Array:
        """The parameters that the model computes with."""
        return self.params if self.copy is None else self.copy


class LossScaleNumbers(NamedTuple):
    """How the loss scale moves."""

    growth_steps: Any  # after so many steps without overflow it grows
    factor: Any  # by this; an overflow divides it by the same


class StepNumbers(NamedTuple):
    """The numbers that a run sets. Traced: changing one needs no new compilation."""

    schedule: ScheduleNumbers
    adamw: AdamWNumbers
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


def initial_state(
    params: jax.Array, dtype: Any = None, *, master_weights: bool = True, loss_scale: float | None = None
) -> TrainState:
    """The state before the first step, from a flat buffer (flat_size,) in float32.

    dtype: what the model computes in (None: params' own). Where it is another, the parameters stay in float32 beside a
    copy in dtype, or without master_weights are in dtype alone. loss_scale: the first one; None: no scaling.
    """
    wide = jnp.promote_types(params.dtype, jnp.float32)
    m, v = jnp.zeros(params.shape, wide), jnp.zeros(params.shape, wide)
    low = params.astype(dtype or params.dtype)
    copy = low if master_weights and low.dtype != params.dtype else None
    start = params if master_weights else low
    scale = None if loss_scale is None else LossScale(jnp.asarray(loss_scale, jnp.float32), _zero())
    return TrainState(start, m, v, _zero(), _zero(), copy, scale, init_outliers(wide))


def _zero() -> jax.Array:
    """A count that begins; an array of its own each time, because a buffer can be donated only once."""
    return jnp.zeros((), jnp.int32)


def batch_gradient(
    weights: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
    execution: Execution = PLAIN,
    weight: jax.Array | float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Mean loss and flat gradient over the micro-batches of inputs and targets (A, B, T), both times `weight`.

    weights (flat_size,): the parameters in the compute dtype. The gradient of one micro-batch has that dtype too; over
    several it is summed in at least float32, since 16 bits would lose what the later ones add.
    """
    micro_batches = inputs.shape[0]

    def share_of_loss(weights: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return gpt2.loss_fn(weights, inputs, targets, config, execution, weight / micro_batches)

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


def next_loss_scale(state: LossScale, finite: jax.Array, numbers: LossScaleNumbers) -> LossScale:
    """The loss scale after a step: smaller after an overflow, larger after growth_steps without one."""
    clean = jnp.where(finite, state.clean + 1, 0)
    grows = clean >= numbers.growth_steps
    factor = jnp.where(finite, jnp.where(grows, numbers.factor, 1.0), 1.0 / numbers.factor)
    scale = jnp.maximum(state.scale * factor, SMALLEST_SCALE)
    return LossScale(scale.astype(jnp.float32), jnp.where(grows, 0, clean))


def step_fn(
    state: TrainState,
    inputs: jax.Array,
    targets: jax.Array,
    numbers: StepNumbers,
    config: ModelConfig,
    options: StepOptions,
) -> tuple[TrainState, Metrics]:
    """One step on inputs and targets (A, B, T) int32: A micro-batches, one update.

    A loss or gradient that is not finite updates nothing, nor does one that is an outlier by the limits in numbers; the
    step still counts for the schedule. An outlier is no overflow: the loss scale moves as after any finite step, and
    AdamW's bias correction counts the step, as in llm.c. It does not count one that is not finite, after which llm.c's
    parameters are NaN.
    Source: llm.c train_gpt2.cu, `gpt2_update` and the loop in `main`; the loss scale: Micikevicius et al., Mixed
    Precision Training (2018).
    """
    op = options.execution.op
    wide = jnp.promote_types(state.params.dtype, jnp.float32)
    scale = jnp.ones((), wide) if state.loss_scale is None else state.loss_scale.scale
    loss, gradient = batch_gradient(state.weights, inputs, targets, config, options.execution, scale)
    loss = loss / scale
    with jax.named_scope("update"):
        with jax.named_scope("norm"):
            norm = op.global_norm(gradient) / scale
            outliers, z_loss, z_norm = _z_scores(state.outliers, loss, norm)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        applied = finite & ~(is_outlier(z_loss, numbers.skip_loss_z) | is_outlier(z_norm, numbers.skip_norm_z))
        rate = learning_rate(options.schedule, state.step, numbers.schedule)
        with jax.named_scope("adamw"):
            params, m, v, copy = op.adamw_update(
                state.params,
                state.m,
                state.v,
                gradient,
                scale=clip_scale(norm, numbers.grad_clip) / scale,
                learning_rate=rate,
                update=state.updates + 1,
                apply=applied,
                numbers=numbers.adamw,
                decay=() if options.decay == "none" else decay_ranges(config, options.decay),
                copy=state.copy,
                rounding=options.rounding,
                seed=None if options.rounding == "nearest" else rounding_seed(numbers.seed, state.step),
            )
    moved = None if state.loss_scale is None else next_loss_scale(state.loss_scale, finite, numbers.loss_scale)
    updates = state.updates + finite.astype(jnp.int32)
    new_state = TrainState(params, m, v, state.step + 1, updates, copy, moved, outliers)
    return new_state, Metrics(loss, norm, rate, finite, scale, z_loss, z_norm, applied)


def _z_scores(state: Outliers | None, loss: jax.Array, norm: jax.Array) -> tuple[Outliers | None, jax.Array, jax.Array]:
    if state is None:
        unknown = jnp.full((), jnp.nan, norm.dtype)
        return None, unknown, unknown
    return update_outliers(state, loss, norm)


def rounding_seed(seed: jax.Array, step: jax.Array) -> jax.Array:
    """The seed of one step's stochastic rounding, uint32: a function of the run's seed and the step alone."""
    return squirrel_noise5(step.astype(jnp.uint32), jnp.asarray(seed, jnp.uint32))


train_step = partial(jax.jit, static_argnames=("config", "options"), donate_argnames=("state",))(step_fn)


@partial(jax.jit, static_argnames=("config", "execution"))
def evaluate_loss(
    weights: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
    execution: Execution = PLAIN,
) -> jax.Array:
    """Mean loss of one batch (B, T) without a gradient, nats per token; weights (flat_size,) in the compute dtype."""
    return gpt2.mean_loss(weights, inputs, targets, config, execution)


@partial(jax.jit, static_argnames=("config", "execution"))
def next_token_logits(
    weights: jax.Array,
    tokens: jax.Array,
    position: jax.Array,
    config: ModelConfig,
    execution: Execution = PLAIN,
) -> jax.Array:
    """Logits (V,) in float32 of the token after `position` in the only row of tokens (1, T).

    weights (flat_size,) in the compute dtype. The head sees that position alone.
    """
    tensors = views(weights, config)
    lnf, _ = gpt2.forward_stream(tensors, tokens, config, execution)  # (1, T, C)
    return linear_forward(lnf[0, position], tensors.wte, None)[: config.vocab_size].astype(jnp.float32)
