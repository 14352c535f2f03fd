"""What the machine's rates are measured with: arrays in place, larger than its caches."""

import jax.numpy as jnp
import pytest

from llmc_jax.profile.measure import WAYS, Rates, array_bytes, better, memory_rates


@pytest.mark.parametrize(
    ("cache", "memory", "expected"),
    [(32 << 20, None, 1 << 28), (384 << 20, 1 << 40, 1536 << 20), (32 << 20, 1 << 30, 1 << 27)],
    ids=["256 MiB at least", "four times the caches", "an eighth of the memory at most"],
)
def test_arrays_are_larger_than_the_caches(cache: int, memory: int | None, expected: int) -> None:
    assert array_bytes(cache, memory) == expected


@pytest.mark.parametrize("way", ["scale", "add"])
def test_what_is_written_is_written_in_place(way: str) -> None:
    """An array that is allocated anew is mapped page by page: that was measured, and not the memory."""
    x, y = jnp.ones(4096), jnp.ones(4096)
    before = x.unsafe_buffer_pointer()
    result = WAYS[way][1](x, y)
    assert x.is_deleted() and not y.is_deleted()
    assert result.unsafe_buffer_pointer() == before


def test_bytes_are_counted_and_a_rounded_array_is_enough() -> None:
    arrays = {"scale": 2, "add": 3, "read": 1}
    assert {name: count for name, (count, _) in WAYS.items()} == arrays
    best, reading, size = memory_rates(100_000, rounds=3)
    assert size == 98_304 and best >= reading > 0


def test_of_two_looks_the_better_counts() -> None:
    slow, fast = Rates(1.0, 3.0, 5.0, 3.0, 64, 16), Rates(2.0, 2.0, 4.0, 4.0, 32, 16)
    assert better(slow, fast) == Rates(2.0, 3.0, 5.0, 4.0, 64, 16)
    assert better(slow, fast).roof == (2.0, 5.0, 4.0, 16)
