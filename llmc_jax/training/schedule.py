"""The learning rate of a step, computed inside the jitted step from the traced step number.

It is that of one in config/schedules.py, or of `rising`, the learning-rate range test of --find-lr: with S steps and
the first rate as a fraction of the last, lr * fraction^((S - 1 - step) / (S - 1)).
Source: Smith (2015, https://arxiv.org/abs/1506.01186).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.schedules import SCHEDULES, WITHOUT_WARM_UP

RISING = "rising"  # of --find-lr


class ScheduleNumbers(NamedTuple):
    """The numbers of a schedule. Traced, so that another value needs no new compilation."""

    learning_rate: Any  # highest rate
    warmup_steps: Any
    total_steps: Any
    final_fraction: Any  # of the highest rate, reached at the last step; `rising` begins with it
    step_every: Any  # steps between two reductions of `step`
    step_factor: Any  # by which `step` multiplies the rate


class Place(NamedTuple):
    """What a schedule computes a rate from."""

    step: jax.Array  # 0-based
    high: jax.Array  # the highest rate
    low: jax.Array  # the rate at the end
    r: jax.Array  # share of the steps after the warm-up that are done
    total: jax.Array  # steps
    numbers: ScheduleNumbers
    np: Any = jnp

    @staticmethod
    def share(done: jax.Array, whole: jax.Array) -> jax.Array:
        """Return done / whole within 0..1; llm.c divides by zero where the whole run is warm-up."""
        wide = jnp.result_type(float)  # JAX divides two int32 in float32, even where float64 is on
        return jnp.clip(done.astype(wide) / jnp.maximum(whole, 1).astype(wide), 0.0, 1.0)


def learning_rate(kind: str, step: jax.Array, numbers: ScheduleNumbers) -> jax.Array:
    """Return the rate at a 0-based step, float32 (float64 if the numbers are). kind: one of SCHEDULES, or RISING."""
    high = jnp.asarray(numbers.learning_rate, jnp.result_type(float))
    low = high * numbers.final_fraction
    warmup, total = jnp.asarray(numbers.warmup_steps), jnp.asarray(numbers.total_steps)
    if kind == RISING:
        left = Place.share(total - 1 - step, total - 1)
        return high * jnp.power(jnp.asarray(numbers.final_fraction, high.dtype), left)
    if kind not in SCHEDULES:
        raise ValueError(f"unknown schedule {kind!r}; one of {', '.join(SCHEDULES)}")
    r = Place.share(step - warmup, total - warmup)
    after: jax.Array = SCHEDULES[kind](Place(step, high, low, r, total, numbers))
    if kind in WITHOUT_WARM_UP:
        return after
    rising = high * Place.share(step + 1, warmup)
    return jnp.where(step < warmup, rising, after)
