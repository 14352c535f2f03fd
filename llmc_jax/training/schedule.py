"""Learning-rate schedules, computed inside the jitted step from the traced step number.

S total steps, W warm-up steps, lr the highest rate, low = lr * final fraction, r = (step - W) / (S - W):

    cosine      low + (lr - low) (1 + cos(pi r)) / 2
    linear      lr - r (lr - low)
    constant    lr
    wsd         lr until 80 % of S, then low + (lr - low) (1 - sqrt(share of the last 20 % that is done))
    step        lr * factor^floor(step / every)
    rising      lr * fraction^((S - 1 - step) / (S - 1)), where fraction is the first rate as a share of the last

All but constant and rising begin with a linear warm-up, lr (step + 1) / W.
Source: llm.c llmc/schedulers.h; `step` is not in llm.c, nor is `rising`, the learning-rate range test of Smith (2015,
https://arxiv.org/abs/1506.01186).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

RISING = "rising"  # of --find-lr
SCHEDULES = ("cosine", "linear", "constant", "wsd", "step")


class ScheduleNumbers(NamedTuple):
    """The numbers of a schedule. Traced, so that another value needs no new compilation."""

    learning_rate: Any  # highest rate
    warmup_steps: Any
    total_steps: Any
    final_fraction: Any  # of the highest rate, reached at the last step; `rising` begins with it
    step_every: Any  # steps between two reductions of `step`
    step_factor: Any  # by which `step` multiplies the rate


def learning_rate(kind: str, step: jax.Array, numbers: ScheduleNumbers) -> jax.Array:
    """Return the rate at a 0-based step, float32 (float64 if the numbers are). kind: one of SCHEDULES, or RISING."""
    high = jnp.asarray(numbers.learning_rate, jnp.result_type(float))
    low = high * numbers.final_fraction
    warmup = jnp.asarray(numbers.warmup_steps)
    total = jnp.asarray(numbers.total_steps)
    if kind == "constant":
        return high
    if kind == RISING:
        left = _share(total - 1 - step, total - 1)
        return high * jnp.power(jnp.asarray(numbers.final_fraction, high.dtype), left)
    if kind == "cosine":
        after = low + 0.5 * (1.0 + jnp.cos(jnp.pi * _share(step - warmup, total - warmup))) * (high - low)
    elif kind == "linear":
        after = high - _share(step - warmup, total - warmup) * (high - low)
    elif kind == "wsd":
        decay_start = (0.8 * total).astype(jnp.int32)
        decayed = low + (1.0 - jnp.sqrt(_share(step - decay_start, total - decay_start))) * (high - low)
        after = jnp.where(step < decay_start, high, decayed)
    elif kind == "step":
        reductions = step // jnp.maximum(numbers.step_every, 1)
        after = high * jnp.power(jnp.asarray(numbers.step_factor, high.dtype), reductions)
    else:
        raise ValueError(f"unknown schedule {kind!r}; one of {', '.join(SCHEDULES)}")
    rising = high * _share(step + 1, warmup)
    return jnp.where(step < warmup, rising, after)


def _share(done: jax.Array, whole: jax.Array) -> jax.Array:
    """done / whole within 0..1; llm.c divides by zero where the whole run is warm-up."""
    wide = jnp.result_type(float)  # JAX divides two int32 in float32, even where float64 is on
    return jnp.clip(done.astype(wide) / jnp.maximum(whole, 1).astype(wide), 0.0, 1.0)
