"""fp16's dynamic loss scaling: the loss is multiplied up to where fp16 can hold small gradients.

Source: Micikevicius et al., Mixed Precision Training (2018).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SMALLEST_SCALE = 2.0**-14  # the loss is divided by the scale again: it must never reach zero


class LossScale(NamedTuple):
    """The loss scale and what moves it."""

    scale: jax.Array  # () float32, what the loss is multiplied by
    clean: jax.Array  # () int32, steps without overflow since it last changed


class LossScaleNumbers(NamedTuple):
    """How the loss scale moves."""

    growth_steps: Any  # after so many steps without overflow it grows
    factor: Any  # by this; an overflow divides it by the same


def next_loss_scale(state: LossScale, finite: jax.Array, numbers: LossScaleNumbers) -> LossScale:
    """Return the loss scale after a step: smaller after an overflow, larger after growth_steps without one."""
    clean = jnp.where(finite, state.clean + 1, 0)
    grows = clean >= numbers.growth_steps
    factor = jnp.where(finite, jnp.where(grows, numbers.factor, 1.0), 1.0 / numbers.factor)
    scale = jnp.maximum(state.scale * factor, SMALLEST_SCALE)
    return LossScale(scale.astype(jnp.float32), jnp.where(grows, 0, clean))
