"""A figure over the steps keeps its mean and its ends in bounded memory."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.watch import story
from llmc_jax.watch.story import Series


def of(values: list[float]) -> Series:
    made = Series()
    for step, value in enumerate(values):
        made.add(step, value)
    return made


def test_few_values_are_kept_as_they_are() -> None:
    found = of([3.0, 1.0, 2.0]).curve()
    assert found.steps.tolist() == [0, 1, 2] and found.values.tolist() == [3.0, 1.0, 2.0]
    assert len(Series().curve().steps) == 0


@given(st.lists(st.floats(-100, 100), max_size=200), st.sampled_from([2, 4, 8, 20]))
def test_bins_have_the_means_of_their_values(values: list[float], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(story, "MOST_BINS", most)
        found = of(values).curve()
    assert len(found.steps) <= most
    if len(values):
        size = next(1 << power for power in range(20) if len(values) < most << power)
        parts = [values[at : at + size] for at in range(0, len(values), size)]
        np.testing.assert_allclose(found.values, [sum(part) / len(part) for part in parts], rtol=1e-9, atol=1e-9)
        assert np.all(np.diff(found.steps) > 0) or size == 1


def test_what_is_not_finite_is_counted_apart() -> None:
    made = of([1.0, math.nan, 2.0, math.inf])
    assert made.curve().values.tolist() == [1.0, 2.0] and made.odd == (2, 3)
