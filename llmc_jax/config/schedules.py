"""Learning-rate schedules, a function each: `--schedule`, `--help` and the step have them from this table.

S total steps, W warm-up steps, lr the highest rate, low = lr * final fraction, r = (step - W) / (S - W), within 0..1.
Each begins with a linear warm-up, lr (step + 1) / W, but for `constant`. Knows no JAX: `at` brings what it
computes with (training/schedule.py).

Source: llm.c llmc/schedulers.h; `step` is not in llm.c.
"""

from collections.abc import Callable
from typing import Any

SCHEDULES: dict[str, Callable[[Any], Any]] = {}  # of a `training.schedule.Place` to the rate there
WITHOUT_WARM_UP = ("constant",)


def schedule(rate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Add a schedule, by its function's name."""
    return SCHEDULES.setdefault(rate.__name__, rate)


@schedule
def cosine(at: Any) -> Any:
    """Return low + (lr - low) (1 + cos(pi r)) / 2."""
    return at.low + 0.5 * (1.0 + at.np.cos(at.np.pi * at.r)) * (at.high - at.low)


@schedule
def linear(at: Any) -> Any:
    """Return lr - r (lr - low)."""
    return at.high - at.r * (at.high - at.low)


@schedule
def constant(at: Any) -> Any:
    """Return lr."""
    return at.high


@schedule
def wsd(at: Any) -> Any:
    """Return lr until 80 % of S, then low + (lr - low) (1 - sqrt(share of the last 20 % that is done))."""
    start = (0.8 * at.total).astype(at.np.int32)
    decayed = at.low + (1.0 - at.np.sqrt(at.share(at.step - start, at.total - start))) * (at.high - at.low)
    return at.np.where(at.step < start, at.high, decayed)


@schedule
def step(at: Any) -> Any:
    """Return lr * factor^floor(step / every)."""
    reductions = at.step // at.np.maximum(at.numbers.step_every, 1)
    return at.high * at.np.power(at.np.asarray(at.numbers.step_factor, at.high.dtype), reductions)
