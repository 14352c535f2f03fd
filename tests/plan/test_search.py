"""The largest -b that fits, against trying every one; which ways there are to compute a configuration."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.config.train import TrainConfig
from llmc_jax.plan.search import MOST_ROWS, largest_size, sizes, ways


@given(
    rows=st.integers(1, 300), devices=st.integers(1, 8), most=st.integers(0, 400),
    reduction=st.sampled_from(["auto", "fixed"]),
)  # fmt: skip
def test_the_largest_of_what_an_update_allows(rows: int, devices: int, most: int, reduction: str) -> None:
    total = 64 * devices * rows
    config = TrainConfig(sequence_length=64, total_batch_size=total, devices=devices, reduction=reduction)
    found = largest_size(config, lambda each: each.batch_size <= most)
    asked = [replace(config, batch_size=size) for size in range(1, rows + 1)]
    whole = [each for each in asked if total % each.tokens_at_once == 0]
    if reduction == "fixed":  # equal subtrees of a tree over the micro-batches
        whole = [each for each in whole if devices in (1, 2, 4, 8) and each.micro_batches % devices == 0]
    assert found == max((each.batch_size for each in whole if each.batch_size <= most), default=None)


def test_with_d_a_larger_one_may_fit_where_a_smaller_one_does_not() -> None:
    config = TrainConfig(sequence_length=64, total_batch_size=64 * 32)
    assert largest_size(config, lambda each: each.batch_size in (8, 16)) == 16
    assert largest_size(config, lambda each: False) is None


@given(most=st.integers(0, 2 * MOST_ROWS))
def test_without_d_every_size_up_to_a_bound(most: int) -> None:
    tried = []

    def fits(config: TrainConfig) -> bool:
        tried.append(config.batch_size)
        return config.batch_size <= most

    assert largest_size(TrainConfig(), fits) == (min(most, MOST_ROWS) or None)
    assert len(tried) == len(set(tried)) <= 13


def test_no_size_where_an_update_is_shorter_than_a_row() -> None:
    assert list(sizes(TrainConfig(sequence_length=64, total_batch_size=64, devices=2))) == []


def test_ways_are_those_that_go_with_the_rest() -> None:
    alone, several = TrainConfig(), TrainConfig(devices=4, zero_stage=1)
    assert {(way.recompute_blocks, way.zero_stage) for way in ways(alone, 12)} == {(0, 0), (1, 0), (2, 0), (4, 0)}
    assert {way.zero_stage for way in ways(several, 12)} == {0, 1, 2}
    assert {way.recompute_blocks for way in ways(alone, 2)} == {0, 1}
