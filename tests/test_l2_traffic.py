"""benchmarks/l2_traffic.py: what the simulated cache has and what it has not."""

import pytest

from benchmarks.l2_traffic import AXES, ORDERS, Traffic, Walk, rows, traffic, walks
from pallas_kernels.tuning import attention_sizes

BLOCKS = {"sequence": 3, "head": 2, "tile": 4}


def test_a_cache_that_holds_all_misses_each_tile_once() -> None:
    blocks = list(walks("forward", AXES, BLOCKS, tiles=2))
    assert traffic(blocks, resident=5, capacity=1000) == Traffic(reads=6 * (2 + 4 + 6 + 8), misses=6 * 8)


def test_blocks_one_after_another_find_only_what_fits() -> None:
    again = [Walk("a", 0, 3), Walk("a", 0, 3)]
    assert traffic(again, resident=1, capacity=3) == Traffic(6, 3)
    assert traffic(again, resident=1, capacity=2) == Traffic(6, 6)  # the oldest is gone when it is asked for again
    assert traffic(again, resident=2, capacity=1) == Traffic(6, 3)  # both at once: the second finds what the first read


def test_walks_are_those_of_the_kernels() -> None:
    blocks = {"sequence": 1, "head": 1, "tile": 3}
    assert [walk[1:] for walk in walks("dq", AXES, blocks, tiles=2)] == [(0, 6), (0, 4), (0, 2)]
    assert [walk[1:] for walk in walks("dkv", AXES, blocks, tiles=2)] == [(0, 6), (2, 6), (4, 6)]
    streams = [walk.stream for walk in walks("forward", ORDERS["sequences the fastest"], BLOCKS, tiles=1)]
    assert streams[:4] == [(0, 0), (1, 0), (2, 0), (0, 1)]


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_neighbours_in_time_share_what_they_read(kernel: str) -> None:
    """12 heads at once and a cache of 8 pairs of tiles: only one head's fit."""
    pair = 2 * attention_sizes("sm_90", 64, None).columns[kernel] * 64 * 2
    good, bad = rows(kernel, "sm_90", "wgmma", [4, 512, 3, 64], resident=4, cache=8 * pair)
    assert (good.order, bad.order) == tuple(ORDERS)
    assert good.read == bad.read
    assert good.missed == good.compulsory == 12 * 8 * pair
    assert bad.missed > 2 * good.missed
