"""Rates of GPUs that are not there: every card has them, in order, and products fill their tiles."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.machine import gpus
from llmc_jax.plan.efficiency import ATTENTION, MEMORY, PRODUCTS, SMALL_TILES, TILES, filled, gpu, shares_of

sides = st.integers(1, 100_000)
blocks = st.integers(1, 200)


@pytest.mark.parametrize("kind", gpus.GPUS)
def test_every_gpu_has_shares_in_order_with_their_source(kind: str) -> None:
    for share in shares_of(kind).values():
        assert 0 < share.low < share.typical < share.high < 1.1
        assert share.source and share.measured_on in (None, "NVIDIA H200")
    measured = gpus.GPUS[kind].capability == "9.0"
    assert (shares_of(kind)[PRODUCTS].measured_on is not None) == measured
    assert shares_of(kind, "tf32")[PRODUCTS].measured_on is None


@pytest.mark.parametrize("name", gpus.TARGETS)
def test_a_gpu_s_peaks_are_those_of_the_table(name: str) -> None:
    target = gpus.TARGETS[name]
    here = gpu(target.device_kind, "bf16")
    assert (here.flops, here.bandwidth) == (1e12 * (target.gpu.bf16 or 0), 1e9 * target.gpu.bandwidth)
    assert here.multiprocessors == target.multiprocessors
    assert here.roof.flops >= here.flops * here.shares[PRODUCTS].high  # nothing is faster than its floor


def test_what_is_known_of_one_kind_only() -> None:
    geforce, server = gpu("NVIDIA GeForce RTX 4090", "bf16"), gpu("NVIDIA L40S", "bf16")
    assert geforce.shares[PRODUCTS].typical > server.shares[PRODUCTS].typical  # half-rate tensor cores
    assert gpu("NVIDIA B200", "bf16").shares[ATTENTION].typical < 0.2  # our kernels there do not use its own
    assert server.shares[MEMORY] == geforce.shares[MEMORY] == server.share("forward gelu")
    hopper = gpu("NVIDIA H200", "bf16")
    assert hopper.share("backward ln1").typical < hopper.share("forward ln1").typical
    assert hopper.share("forward no such operation") == hopper.shares[MEMORY]


@pytest.mark.parametrize(("kind", "precision"), [("NVIDIA H300", "bf16"), ("Tesla T4", "bf16"), ("Tesla T4", "tf32")])
def test_what_is_not_known_is_refused(kind: str, precision: gpus.Precision) -> None:
    with pytest.raises(InputError, match=kind):
        gpu(kind, precision)


@given(sides, sides, blocks)
def test_tiles_fill_at_most_all_of_a_gpu(rows: int, columns: int, multiprocessors: int) -> None:
    share = filled(rows, columns, multiprocessors)
    assert 0 < share <= 1
    assert share == filled(columns, rows, multiprocessors)  # a block may stand or lie
    tiles = math.ceil(rows / 128) * math.ceil(columns / 256)
    if tiles >= multiprocessors:  # not fewer than whole waves of that tile
        waves = math.ceil(tiles / multiprocessors)
        assert share >= rows * columns / (waves * multiprocessors * 128 * 256) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("sides", "busy"),
    [
        ((132 * 128, 256), 1.0),
        ((133 * 128, 256), 133 / 264),
        ((8192, 768), 192 / 264),  # 192 tiles on 132 multiprocessors, twice
        ((66 * 128, 256), 1.0),  # half as many as there are: the sum is split in two
        ((2 * 128, 256), 32 / 132),  # two tiles, each sum in 16 parts
        ((132 * 128 - 64, 256), 131.5 / 132),  # half of a tile is beyond the edge
    ],
)
def test_products_fill_multiprocessors(sides: tuple[int, int], busy: float) -> None:
    assert filled(*sides, 132) == pytest.approx(busy)


def test_slow_multiprocessors_take_smaller_tiles() -> None:
    assert filled(128, 64, None, (*TILES, *SMALL_TILES)) == 1 > filled(128, 64, None)
    slow, fast = gpu("NVIDIA GeForce RTX 4090", "bf16"), gpu("NVIDIA A100-SXM4-80GB", "bf16")
    assert slow.filled(4096, 1600) > filled(4096, 1600, slow.multiprocessors)
    assert fast.filled(4096, 1600) == filled(4096, 1600, fast.multiprocessors)


def test_hopper_takes_the_tiles_that_cublaslt_took() -> None:
    here = gpu("NVIDIA H200", "bf16")
    assert here.filled(16384, 1600) == pytest.approx(64 / 66)  # 640 tiles of 256 x 160 in five waves
    assert filled(16384, 1600, here.multiprocessors) < 0.9
