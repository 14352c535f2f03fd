"""The measures of a difference: against NumPy's own over whole arrays, however they are cut, NaN and infinities."""

import math

import numpy as np
import pytest

from llmc_jax.compare import tensors
from llmc_jax.compare.tensors import Difference, Limit, difference, index_text


def pair(shape: tuple[int, ...], seed: int = 0, error: float = 1e-3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    b = rng.normal(0, 1, shape).astype(np.float32)
    return (b + rng.normal(0, error, shape)).astype(np.float32), b


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(f"u{values.dtype.itemsize}")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_against_numpy(dtype: type, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "CHUNK", chunk)
    a, b = (values.astype(dtype) for values in pair((3, 5, 7)))
    found = difference(a, b, Limit(1e-3, 1e-3))
    x, y = a.astype(np.float64), b.astype(np.float64)
    distance = np.abs(x - y)
    share = distance / (1e-3 + 1e-3 * np.abs(y))
    assert found.shape == (3, 5, 7) and found.largest_error == distance.max()
    assert found.worst_index == np.unravel_index(distance.argmax(), a.shape)
    assert found.worst_values == (x[found.worst_index], y[found.worst_index])
    assert found.differing_values == np.count_nonzero(a != b)
    assert found.differing_bits == int(np.bitwise_count(bits(a) ^ bits(b)).sum())
    assert found.beyond == np.count_nonzero(share > 1) and not found.agrees
    expected = (distance.mean(), np.linalg.norm(x - y) / np.linalg.norm(y), share.max())
    measured = (found.mean_error, found.relative_norm, found.share)
    assert measured == pytest.approx(expected, rel=1e-12)
    assert found.not_finite == 0 and not found.same_bits


def test_signed_zeros_differ_in_bits_alone() -> None:
    found = difference(np.zeros(3, np.float32), -np.zeros(3, np.float32), Limit(0.0))
    assert (found.differing_values, found.differing_bits, found.largest_error, found.agrees) == (3, 3, 0, True)


@pytest.mark.parametrize("side", ["a", "b", "both"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_a_failure_and_the_worst(side: str, value: float) -> None:
    a, b = pair((5, 5), error=0.1)
    for name, array in (("a", a), ("b", b)):
        if side in (name, "both"):
            array[2, 3] = array[4, 1] = value
    found = difference(a, b, Limit(1e9))
    assert found.worst_index == (2, 3) and found.not_finite == found.beyond == 2 and not found.agrees
    assert not math.isfinite(found.largest_error) and found.share == math.inf
    good = np.isfinite(a) & np.isfinite(b)
    x, y = a[good].astype(np.float64), b[good].astype(np.float64)
    assert found.mean_error == pytest.approx(np.abs(x - y).mean(), rel=1e-12)
    assert found.relative_norm == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-12)


def test_the_first_nan_stays_the_worst_in_later_pieces() -> None:
    found = Difference((3, 2), Limit(1.0))
    for piece in ([0.5, 0.0], [0.0, np.nan], [9.0, np.nan]):
        found.add(np.array(piece, np.float32), np.zeros(2, np.float32))
    assert found.worst_index == (1, 1) and found.not_finite == 2 and found.beyond == 3


def test_equal_nan_of_two_files() -> None:
    """Of files the payload counts: the same bits agree, another payload does not."""
    a = np.array([0x7FC00001, 0x7F800000, 0x3F800000], np.uint32).view(np.float32)
    assert difference(a, a.copy(), nan_agrees=True).not_finite == 0
    assert difference(a, a.copy(), Limit(0.5), nan_agrees=True).agrees
    other = a.copy()
    other.view(np.uint32)[0] ^= 2
    found = difference(a, other, nan_agrees=True)
    assert (found.not_finite, found.differing_values, found.differing_bits, found.worst_index) == (1, 1, 1, (0,))


def test_limits() -> None:
    """Of numbers that are exact in binary, so that the border itself is met."""
    b = np.array([1.0, 2.0])
    limit = Limit(0.5, 0.125)  # allows 0.625 and 0.75
    for distances, share in (([0.625, 0.75], 1.0), ([0.5, 0.375], 0.8), ([0.625, 0.7500001], 1.0000001333)):
        found = difference(b + np.array(distances), b, limit)
        assert found.agrees == (share <= 1) and found.share == pytest.approx(share, rel=1e-9)
        assert difference(b - np.array(distances), b, limit).agrees == found.agrees
    assert difference(b + 0.5, b, Limit(0.5)).agrees
    assert not difference(b + 0.5, b, Limit(0.5, strict=True)).agrees
    assert difference(b + 0.4999, b, Limit(0.5, strict=True)).agrees
    assert (str(Limit(0.01, strict=True)), str(Limit(1e-6, 0.079))) == ("< 0.01", "<= 1e-06 + 0.079 |b|")


def test_shapes_without_axes_or_values_and_a_reference_of_zeros() -> None:
    found = difference(np.float32(2), np.float32(3))
    assert (found.worst_index, found.largest_error, found.worst_values) == ((), 1.0, (2.0, 3.0))
    empty = difference(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32), Limit(0.0))
    assert empty.worst_index is None and empty.same_bits and empty.agrees and empty.relative_norm == 0
    assert (index_text((1, 17)), index_text(()), index_text(None)) == ("[1,17]", "[]", "")
    assert difference(np.ones(2, np.float32), np.zeros(2, np.float32)).relative_norm == math.inf
