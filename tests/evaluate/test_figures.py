"""Standard errors against the textbook's and against resampling; differences against paired values."""

import math

import numpy as np
import pytest

from llmc_jax.evaluate import figures

RNG = np.random.default_rng(3)


def test_the_error_of_a_mean_is_the_usual_one() -> None:
    values = RNG.normal(2, 3, 50)
    found, expected = figures.mean("x", values), [values.mean(), values.std(ddof=1) / math.sqrt(50)]
    np.testing.assert_allclose([*found.mean], expected, rtol=1e-12)
    np.testing.assert_allclose(found.parts.sum(), 0, atol=1e-12)


def test_the_error_of_a_share_is_that_of_its_answers() -> None:
    right = np.arange(40) < 13
    found, p = figures.mean("accuracy", right), 13 / 40
    np.testing.assert_allclose([*found.mean], [p, math.sqrt(p * (1 - p) / 39)], rtol=1e-12)


def test_a_ratio_and_functions_of_it_vary_as_their_errors_say() -> None:
    sizes = RNG.integers(5, 40, 200)
    sums = RNG.gamma(2, 1, 200) * sizes
    loss = figures.ratio("loss", sums, sizes)
    assert loss.value == sums.sum() / sizes.sum()
    drawn = RNG.integers(0, 200, (4000, 200))
    again = sums[drawn].sum(1) / sizes[drawn].sum(1)
    np.testing.assert_allclose(loss.mean.error, again.std(), rtol=0.06)
    np.testing.assert_allclose(figures.exponential("perplexity", loss).mean.error, np.exp(again).std(), rtol=0.1)


def test_a_difference_is_paired() -> None:
    first, noise = RNG.normal(5, 2, 30), RNG.normal(0, 0.1, 30)
    found = figures.difference(figures.mean("", first + noise), figures.mean("", first))
    np.testing.assert_allclose([*found], [noise.mean(), noise.std(ddof=1) / math.sqrt(30)], rtol=1e-9)


@pytest.mark.parametrize(("count", "value"), [(0, math.nan), (1, 4.0)])
def test_too_few_units_have_no_error(count: int, value: float) -> None:
    found = figures.ratio("x", np.full(count, 8.0), np.full(count, 2))
    assert found.value == pytest.approx(value, nan_ok=True) and math.isnan(found.mean.error)
    assert figures.exponential("", figures.mean("", np.full(2, 1e4))).value == math.inf
