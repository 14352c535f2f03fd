"""The learning-rate schedules against llm.c's formulas in plain Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.config.schedules import SCHEDULES
from llmc_jax.training.schedule import RISING, ScheduleNumbers, learning_rate
from tests import plain_model

WIDTH = 32
RUNS = [  # W, S
    (0, 1),  # one step
    (1, 1),  # nothing but warm-up
    (5, 5),
    (40, 20),  # the run ends inside the warm-up
    (0, 7),
    (1, 7),
    (6, 7),
    (3, 25),
    (700, 18865),  # llm.c's 124M
    (700, 60_000),
    (0, 2_000_000),
]


@partial(jax.jit, static_argnums=0)
def rates(kind: str, steps: jax.Array, numbers: ScheduleNumbers) -> jax.Array:
    return jax.vmap(lambda step: learning_rate(kind, step, numbers))(steps)


def interesting_steps(W: int, S: int) -> np.ndarray:
    """(WIDTH,) steps of the run: all of a short one; the ends, the joints and a spread of a long one."""
    wanted = {0, 1, W - 2, W - 1, W, W + 1, int(0.8 * S) - 1, int(0.8 * S), int(0.8 * S) + 1, S - 2, S - 1}
    steps = sorted(wanted | set(np.linspace(0, S - 1, WIDTH - len(wanted)).astype(int)))
    return np.resize([step for step in steps if 0 <= step < S], WIDTH).astype(np.int32)


def compare(kind: str, W: int, S: int, final: float, rtol: float, every: int = 4, factor: float = 0.5) -> None:
    numbers = ScheduleNumbers(6e-4, W, S, final, every, factor)
    steps = interesting_steps(W, S)
    expected = [plain_model.learning_rate(kind, int(step), *numbers) for step in steps]
    np.testing.assert_allclose(rates(kind, steps, numbers), expected, rtol=rtol, atol=rtol * 6e-4)


@pytest.mark.parametrize(("W", "S"), RUNS)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_llm_c_s_formulas(kind: str, W: int, S: int) -> None:
    for final in (0.0, 0.1, 1.0):
        compare(kind, W, S, final, rtol=2e-6)
        with jax.enable_x64(True):
            compare(kind, W, S, final, rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(tuple(SCHEDULES)), st.integers(0, 300), st.integers(1, 400), st.floats(0, 1), st.integers(1, 99),
    st.floats(0.1, 1),
)  # fmt: skip
def test_any_run(kind: str, W: int, S: int, final: float, every: int, factor: float) -> None:
    with jax.enable_x64(True):
        compare(kind, W, S, final, 1e-11, every, factor)


def test_the_decay_of_wsd_begins_where_llm_c_truncates() -> None:
    """int(0.8 * S), for every S: one step later the rate is sqrt(1 / what is left) lower, whatever the precision."""
    total = np.arange(10, 20_000, dtype=np.int32)
    start = (4 * total) // 5
    found = jax.jit(jax.vmap(lambda S, step: learning_rate("wsd", step, ScheduleNumbers(1.0, 0, S, 0.0, 1, 1.0))))
    np.testing.assert_allclose(found(total, start), 1.0, rtol=1e-6)
    np.testing.assert_allclose(found(total, start + 1), 1 - np.sqrt(1 / (total - start)), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("low", "high", "steps"), [(1e-6, 1.0, 100), (1e-12, 1e3, 10), (1e-4, 2e-4, 10_000)])
def test_rising_has_the_same_factor_from_step_to_step(low: float, high: float, steps: int) -> None:
    """From the first rate to the last; a warm-up has no part in it."""
    numbers = ScheduleNumbers(high, 50, steps, low / high, 7, 0.5)
    expected = np.geomspace(low, high, steps)
    np.testing.assert_allclose(rates(RISING, np.arange(steps, dtype=np.int32), numbers), expected, rtol=1e-5)
    with jax.enable_x64(True):
        np.testing.assert_allclose(rates(RISING, np.arange(steps, dtype=np.int32), numbers), expected, rtol=1e-11)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_beyond_the_last_step_the_rate_stays_where_it_ended(kind: str) -> None:
    numbers = ScheduleNumbers(1.0, 2, 10, 0.25, 1000, 0.5)
    after = np.asarray(rates(kind, np.arange(10, 42, dtype=np.int32), numbers))
    np.testing.assert_allclose(after, 1.0 if kind in ("constant", "step") else 0.25, rtol=1e-6)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'cosin'; one of cosine, linear, constant, wsd, step"):
        learning_rate("cosin", jnp.int32(0), ScheduleNumbers(1.0, 0, 1, 0.0, 1, 1.0))
