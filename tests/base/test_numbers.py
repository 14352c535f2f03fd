"""Tests of intervals."""

from llmc_jax.base.numbers import Interval, certain, total


def test_arithmetic() -> None:
    one = Interval(1, 2, 4)
    assert one.times(2) == (2, 4, 8)
    assert one.rate(8) == (2, 4, 8)  # the order is kept
    assert total([one, certain(1)]) == (2, 3, 5)
    assert total([]) == (0, 0, 0)
