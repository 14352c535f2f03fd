"""The outlier detector against llm.c's running sums in exact arithmetic, and what must never enter its window."""

import math
from collections import deque
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.training.outliers import WINDOW, Outliers, init_outliers, is_outlier, skip_message, update_outliers

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 300  # the window, filled more than twice
HIGHEST = math.sqrt(WINDOW - 1)  # no z-score is further from 0


class RunningSums:
    """llm.c's detector of one figure: two sums, which a value enters and leaves. Nothing is rounded here."""

    def __init__(self) -> None:
        self.window: deque[Fraction] = deque()
        self.total = self.squares = Fraction(0)

    def update(self, value: float) -> float:
        full = len(self.window) == WINDOW
        if full:
            oldest = self.window.popleft()
            self.total -= oldest
            self.squares -= oldest**2
        self.window.append(Fraction(value))
        self.total += self.window[-1]
        self.squares += self.window[-1] ** 2
        if not full:
            return math.nan
        mean = self.total / WINDOW
        variance = self.squares / WINDOW - mean**2
        apart = self.window[-1] - mean
        return 0.0 if variance == 0 else math.copysign(math.sqrt(apart**2 / variance), apart)


def running_sums(pairs: np.ndarray) -> np.ndarray:
    """z-scores (K, 2) of pairs (K, 2), which are finite."""
    detectors = RunningSums(), RunningSums()
    return np.array([[each.update(float(x)) for each, x in zip(detectors, pair, strict=True)] for pair in pairs])


@jax.jit
def detect(state: Outliers, pairs: jax.Array) -> tuple[Outliers, jax.Array]:
    """The state after pairs (K, 2), and their z-scores (K, 2)."""

    def next_one(state: Outliers, pair: jax.Array) -> tuple[Outliers, jax.Array]:
        state, z_loss, z_norm = update_outliers(state, pair[0], pair[1])
        return state, jnp.stack([z_loss, z_norm])

    return jax.lax.scan(next_one, state, pairs)


def tolerance(dtype: Any, z: np.ndarray) -> np.ndarray:
    """How far z may be off, for a window in that dtype of unit roundoff u.

    Each d_i = x - x_i is off by u |d_i|, and so a sum of n terms, in whatever order, by n u sum |d_i| at most. The mean
    of |d_i| is at most std sqrt(1 + z^2); mean(d) is off by n u of that, and std by half as much of itself. Together
    less than 2 n u (1 + |z|).
    """
    return 2 * WINDOW * np.finfo(dtype).eps / 2 * (1 + np.abs(z))


def figures(seed: int, some: list[float]) -> np.ndarray:
    """Losses and norms (LENGTH, 2) float32 such as a run has, with those of `some` strewn in at random."""
    rng = np.random.default_rng(seed)
    level, spread = 10.0 ** rng.uniform(-3, 3, 2), 10.0 ** rng.uniform(-6, 0, 2)
    pairs = (level * np.abs(1 + spread * rng.normal(size=(LENGTH, 2)))).astype(np.float32)
    if some:
        at = rng.random(pairs.shape) < rng.choice([0.0, 0.01, 0.5, 1.0])
        pairs[at] = rng.choice(np.array(some, np.float32), at.sum())
    return pairs


# Down to where float32 still holds the difference of neighbours.
some_figures = st.lists(st.just(0.0) | st.floats(2.0**-100, 2.0**127, width=32), max_size=8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), some=some_figures)
def test_z_scores_are_llmcs(dtype: Any, seed: int, some: list[float]) -> None:
    pairs = figures(seed, some)
    expected = running_sums(pairs)
    with jax.enable_x64(dtype == np.float64):
        state, found = jax.tree.map(np.asarray, detect(init_outliers(dtype), pairs.astype(dtype)))
    assert found.dtype == state.values.dtype == dtype and state.count == LENGTH
    assert np.isnan(expected[:WINDOW]).all() and np.isnan(found[:WINDOW]).all()
    found, expected = found[WINDOW:], expected[WINDOW:]
    assert (np.abs(found - expected) <= tolerance(dtype, expected)).all()
    assert (np.abs(found) <= HIGHEST + tolerance(dtype, np.array(HIGHEST))).all()


def test_a_spike_stands_out() -> None:
    """llm.c's own test: 256 values between -1 and 1, then 10."""
    values = np.random.default_rng(1337).uniform(-1, 1, 2 * WINDOW).astype(np.float32)
    state, z = detect(init_outliers(), np.stack([values, values[::-1]], axis=1))
    assert np.isnan(z[:WINDOW]).all() and (np.abs(z[WINDOW:]) < 3).all()
    _, z_loss, z_norm = update_outliers(state, jnp.float32(10.0), jnp.float32(0.0))
    assert z_loss >= 5 and abs(z_norm) < 1
    _, z_loss, z_norm = update_outliers(state, jnp.float32(0.0), jnp.float32(10.0))
    assert abs(z_loss) < 1 and z_norm >= 5


@pytest.mark.parametrize("value", [0.0, 0.1, 3.3, 1e-30, 1e30])
def test_equal_values_give_exactly_zero(value: float) -> None:
    """Where a mean that is off by a rounding would make a z-score of nothing."""
    _, z = detect(init_outliers(), np.full((LENGTH, 2), value, np.float32))
    assert (np.asarray(z[WINDOW:]) == 0).all() and not np.signbit(z[WINDOW:]).any()


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, LENGTH])
def test_the_window_holds_the_last_ones(count: int) -> None:
    pairs = figures(1, [])[:count]
    state, _ = detect(init_outliers(), pairs)
    assert int(state.count) == count
    newest_last = np.roll(state.values, -(count % WINDOW), axis=1)[:, -min(count, WINDOW) :]
    np.testing.assert_array_equal(newest_last, pairs[-WINDOW:].T)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["loss", "norm", "both"])
@pytest.mark.parametrize("count", [0, 50, WINDOW - 1, WINDOW, 200])
def test_what_is_not_finite_stays_out(count: int, which: tuple[int, ...], bad: float) -> None:
    """Its own z is NaN, and all others are what they would be without it."""
    pairs = figures(2, [])
    spoilt = pairs[:1].copy()
    spoilt[:, which] = bad
    before, _ = detect(init_outliers(), pairs[:count])
    after, z = detect(before, spoilt)
    assert np.isnan(z).all()
    jax.tree.map(np.testing.assert_array_equal, after, before)
    jax.tree.map(np.testing.assert_array_equal, detect(after, pairs[count:]), detect(before, pairs[count:]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "held"),
    [(jnp.bfloat16, "float32"), (jnp.float16, "float32"), (None, "float32"), (jnp.float64, "float64")],
)
def test_the_window_has_at_least_float32(dtype: Any, held: str) -> None:
    with jax.enable_x64(held == "float64"):
        state = init_outliers() if dtype is None else init_outliers(dtype)
        after, z_loss, z_norm = update_outliers(state, jnp.zeros((), dtype or jnp.float32), jnp.float32(1.0))
    assert {str(array.dtype) for array in (state.values, after.values, z_loss, z_norm)} == {held}
    assert state.count.dtype == after.count.dtype == jnp.int32
    assert state.values.shape == (2, WINDOW) and int(state.count) == 0


@pytest.mark.parametrize(
    ("z", "limit", "expected"),
    [
        (7.1, 7.0, True), (7.0, 7.0, False), (-9.0, 7.0, False), (11.0, 0.0, False), (np.nan, 7.0, False),
        (np.nan, 0.0, False), (0.5, 0.25, True),
    ],
)  # fmt: skip
def test_is_outlier(z: float, limit: float, expected: bool) -> None:
    assert bool(is_outlier(np.float32(z), np.float32(limit))) is expected
    assert bool(jax.jit(is_outlier)(z, limit)) is expected


def test_skip_message_names_the_loss_first() -> None:
    assert skip_message(8.0, 9.0, 7.0, 7.0) == "skipping update due to loss z-score of 8.000000"
    assert skip_message(6.0, 9.0, 7.0, 7.0) == "skipping update due to grad z-score of 9.000000"
    assert skip_message(8.0, 9.0, 0.0, 7.0) == "skipping update due to grad z-score of 9.000000"
    assert skip_message(8.0, 9.0, 0.0, 0.0) == skip_message(np.nan, np.nan, 7.0, 7.0) == ""
    same = float(np.float32(3.2))  # what the device compared: not larger than the limit in its own precision
    assert same > 3.2 and skip_message(same, same, 3.2, 3.2) == ""
