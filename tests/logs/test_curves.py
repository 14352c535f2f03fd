"""Curves averaged, binned and thinned: nothing that matters gets lost."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc_jax.logs.curves import Curve, binned, loss_range, smoothed, spread, thinned_places, window_of

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300)
ANY_VALUES = st.lists(st.floats(), max_size=300)


def _curve(values: list[float]) -> Curve:
    return Curve(np.arange(len(values), dtype=np.int64), np.array(values))


@given(VALUES, st.integers(1, 40))
def test_bins_hide_no_value_and_keep_the_mean(values: list[float], bins: int) -> None:
    c = _curve(values)
    b = binned(c, bins)
    assert len(b.steps) == min(len(values), bins) if len(values) > bins else len(values)
    assert b.low.min() == min(values) and b.high.max() == max(values)
    assert np.all(b.low <= b.mean + 1e-9) and np.all(b.mean <= b.high + 1e-9)
    assert np.all(np.diff(b.steps) > 0)
    if len(values) % len(b.steps) == 0:
        assert b.mean.mean() == pytest.approx(np.mean(values), abs=1e-9)
    # every value lies within the band of the bin that holds it
    owner = np.clip(
        np.searchsorted(np.linspace(0, len(values), len(b.steps) + 1).astype(int), c.steps, "right") - 1, 0, None
    )
    assert np.all(c.values >= b.low[owner]) and np.all(c.values <= b.high[owner])


@given(VALUES, st.integers(0, 30))
def test_a_smooth_curve_has_full_windows_alone(values: list[float], half: int) -> None:
    got = smoothed(_curve(values), 2 * half + 1)
    assert got.steps.tolist() == list(range(half, len(values) - half))
    for step, mean in zip(got.steps, got.values, strict=True):
        assert mean == pytest.approx(np.mean(values[step - half : step + half + 1]), abs=1e-8)


def test_one_enormous_loss_spoils_no_mean_after_it() -> None:
    values = np.full(1000, 2.5)
    values[100] = 1e30
    np.testing.assert_allclose(smoothed(Curve(np.arange(1000), values), 21).values[111:], 2.5, rtol=1e-6)


@given(st.integers(1, 100_000))
def test_every_curve_has_a_window_that_fits_and_has_a_middle(count: int) -> None:
    window = window_of(count)
    assert window % 2 == 1 and 1 <= window <= count


@given(st.lists(st.floats(-1e3, 1e30), min_size=1, max_size=300), st.lists(st.floats(-1e3, 1e3), max_size=5))
@example([0.0] * 12 + [1.0], [])
def test_of_a_thousand_losses_five_lie_outside_at_most(training: list[float], others: list[float]) -> None:
    """And none of the others; a logarithmic axis has positive ends."""
    found = loss_range([_curve(training)], [np.array(others)])
    assert found is not None and found.low < found.high
    assert found.low > 0 or not found.log
    assert np.count_nonzero(np.array(training) > found.high) <= 0.005 * len(training)
    assert all(found.low <= value <= found.high for value in [min(training), training[0], *others])


@pytest.mark.parametrize("values", [[1e308, 1.0], [-1e308, 1e308]])
def test_an_axis_has_finite_ends_whatever_a_damaged_file_holds(values: list[float]) -> None:
    found = loss_range([_curve(values)], [])
    assert found is not None and np.isfinite([found.low, found.high, found.high - found.low]).all()


@given(ANY_VALUES, st.integers(8, 100))
@example([float("nan")] * 50, 8)
def test_a_thinned_curve_keeps_real_points_and_the_extremes(values: list[float], points: int) -> None:
    whole = _curve(values)
    found = whole.at(thinned_places(whole.values, points))
    assert (np.diff(found.steps) > 0).all()
    np.testing.assert_array_equal(found.values, whole.values[found.steps])
    assert len(found.steps) <= max(points, 4) and (len(values) > points or len(found.steps) == len(values))
    finite = whole.values[np.isfinite(whole.values)]
    if len(finite):
        kept = found.values[np.isfinite(found.values)]
        assert (kept[0], kept[-1], kept.min(), kept.max()) == (finite[0], finite[-1], finite.min(), finite.max())
    bad = len(values) - len(finite)
    assert np.count_nonzero(~np.isfinite(found.values)) >= min(bad, points // 4)


@given(st.lists(st.integers(-9, 9), min_size=41, max_size=400))
def test_a_thinned_curve_has_the_extremes_of_every_part(values: list[int]) -> None:
    whole = _curve([float(value) for value in values])
    found = whole.at(thinned_places(whole.values, 40))
    edges = np.linspace(0, len(values), 11).astype(int)
    for start, end in itertools.pairwise(edges):
        inside = found.values[(found.steps >= start) & (found.steps < end)]
        assert (min(values[start:end]), max(values[start:end])) == (inside.min(), inside.max())


@given(st.integers(0, 300), st.integers(1, 50))
def test_what_is_spread_has_both_ends(count: int, most: int) -> None:
    found = spread(count, most).tolist()
    assert len(found) == min(count, most) and found == sorted(set(found))
    assert not found or (found[0] == 0 and (most == 1 or found[-1] == count - 1))
