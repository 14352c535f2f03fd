"""One training step: micro-batches, gradient, norm, clip, schedule, update. State in, state out, jitted and donated."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax import gpt2
from llmc_jax.config import ModelConfig
from llmc_jax.ops.linear import linear_forward
from llmc_jax.optimizer import AdamWNumbers, adamw_update, clip_scale, decay_ranges, global_norm
from llmc_jax.params import views
from llmc_jax.schedule import ScheduleNumbers, learning_rate


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: jax.Array  # (flat_size,) float32
    m: jax.Array  # (flat_size,) float32, running mean of the gradient
    v: jax.Array  # (flat_size,) float32, running mean of its square
    step: jax.Array  # () int32, steps taken, which the schedule counts
    updates: jax.Array  # () int32, steps that changed the parameters, which AdamW's bias correction counts


class StepNumbers(NamedTuple):
    """The numbers that a run sets. Traced: changing one needs no new compilation."""

    schedule: ScheduleNumbers
    adamw: AdamWNumbers
    grad_clip: Any  # largest global norm; 0: no clipping


class StepOptions(NamedTuple):
    """The choices that shape the program. Static: another value is another program."""

    schedule: str
    decay: str  # 'matrices' or 'all'; 'none' where the weight decay is 0
    recompute: int


class Metrics(NamedTuple):
    """What a step reports, scalars on the device."""

    loss: jax.Array  # mean over the whole batch, nats per token
    norm: jax.Array  # global norm of the gradient before clipping
    learning_rate: jax.Array
    finite: jax.Array  # False: loss or gradient was not finite, and nothing was updated


def initial_state(params: jax.Array) -> TrainState:
    """The state before the first step, from a flat buffer (flat_size,)."""
    return TrainState(
        params, jnp.zeros_like(params), jnp.zeros_like(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    )


def batch_gradient(
    params: jax.Array, inputs: jax.Array, targets: jax.Array, config: ModelConfig, recompute: int
) -> tuple[jax.Array, jax.Array]:
    """Mean loss and flat gradient over the micro-batches of inputs and targets (A, B, T)."""
    micro_batches = inputs.shape[0]

    def share_of_loss(params: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        return gpt2.loss_fn(params, inputs, targets, config, recompute) / micro_batches

    value_and_grad = jax.value_and_grad(share_of_loss)
    if micro_batches == 1:
        return value_and_grad(params, inputs[0], targets[0])

    def add(total: tuple[jax.Array, jax.Array], batch: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        loss, gradient = value_and_grad(params, *batch)
        return (total[0] + loss, total[1] + gradient), None

    zero = (jnp.zeros((), jnp.promote_types(params.dtype, jnp.float32)), jnp.zeros_like(params))
    return jax.lax.scan(add, zero, (inputs, targets))[0]


def step_fn(
    state: TrainState,
    inputs: jax.Array,
    targets: jax.Array,
    numbers: StepNumbers,
    config: ModelConfig,
    options: StepOptions,
) -> tuple[TrainState, Metrics]:
    """One step on inputs and targets (A, B, T) int32: A micro-batches, one update.

    A loss or gradient that is not finite updates nothing; the step still counts for the schedule.
    Source: llm.c train_gpt2.cu, `gpt2_update` and the loop in `main`.
    """
    loss, gradient = batch_gradient(state.params, inputs, targets, config, options.recompute)
    norm = global_norm(gradient)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    rate = learning_rate(options.schedule, state.step, numbers.schedule)
    params, m, v, _ = adamw_update(
        state.params,
        state.m,
        state.v,
        gradient,
        scale=clip_scale(norm, numbers.grad_clip),
        learning_rate=rate,
        update=state.updates + 1,
        apply=finite,
        numbers=numbers.adamw,
        decay=() if options.decay == "none" else decay_ranges(config, options.decay),
    )
    new_state = TrainState(params, m, v, state.step + 1, state.updates + finite.astype(jnp.int32))
    return new_state, Metrics(loss, norm, rate, finite)


train_step = partial(jax.jit, static_argnames=("config", "options"), donate_argnames=("state",))(step_fn)


@partial(jax.jit, static_argnames=("config",))
def evaluate_loss(params: jax.Array, inputs: jax.Array, targets: jax.Array, config: ModelConfig) -> jax.Array:
    """Mean loss of one batch (B, T) without a gradient, nats per token."""
    return gpt2.loss_fn(params, inputs, targets, config)


@partial(jax.jit, static_argnames=("config",))
def next_token_logits(params: jax.Array, tokens: jax.Array, position: jax.Array, config: ModelConfig) -> jax.Array:
    """Logits (V,) of the token after `position` in the only row of tokens (1, T). The head sees that position alone."""
    tensors = views(params, config)
    lnf, _ = gpt2.forward_stream(tensors, tokens, config)  # (1, T, C)
    return linear_forward(lnf[0, position], tensors.wte, None)[: config.vocab_size]
