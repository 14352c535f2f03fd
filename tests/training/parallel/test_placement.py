"""Where arrays lie: what a process reads of a batch, flat buffers brought to the devices and back to the host."""

from typing import Any

import numpy as np
import pytest

from llmc_jax.config.model import parse_descriptor
from llmc_jax.training.parallel.placement import Placement, placement
from llmc_jax.training.parallel.stage import Parallel
from tests.training.parallel.spread import answer

MODEL = parse_descriptor("L2-NH2-C48-V97-T32")


class Device:
    """What of a device is looked at."""

    def __init__(self, process_index: int) -> None:
        self.process_index = process_index


@pytest.mark.parametrize("parallel", [Parallel(8), Parallel(8, 2, fixed=True)])
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 16, 64])
def test_the_processes_share_an_update(parallel: Parallel, processes: int, micro_batches: int) -> None:
    """Each in the order of its devices; where neighbours must be on different devices, every eighth is a device's."""
    places = [Placement(MODEL, parallel, None, process, processes) for process in range(processes)]
    whole = Placement(MODEL, parallel, None).own(micro_batches)
    found = [place.own(micro_batches) for place in places]
    assert {len(each) for each in found} == {micro_batches // processes}
    np.testing.assert_array_equal(np.concatenate(found), whole)
    assert sorted(whole) == list(range(micro_batches))
    assert np.concatenate([place.own_devices for place in places]).tolist() == list(range(8))
    each = micro_batches // 8
    for device in range(8):
        taken = whole[device * each : (device + 1) * each].tolist()
        assert taken == list(range(device, micro_batches, 8) if parallel.fixed else
                             range(device * each, (device + 1) * each))  # fmt: skip


@pytest.mark.parametrize("owners", [[0, 1, 0, 1], [0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 2, 2]])
def test_devices_that_do_not_lie_process_by_process(owners: list[int]) -> None:
    with pytest.raises(AssertionError):
        placement(MODEL, Parallel(4), [Device(owner) for owner in owners])


def test_a_vote_of_one_process() -> None:
    place = placement(MODEL, Parallel(), [Device(0)])
    assert place.read_vote(place.vote(3)) == 3


# The shapes have units that the devices do not divide, and blocks that begin and end inside of rows.
BUFFERS = [
    ("L2-NH2-C48-V97-T32", 4, True, "float32", 1000),
    ("L3-NH1-C10-V41-T7", 8, True, "bfloat16", 1 << 22),
    ("L1-NH2-C48-V97-T32", 3, True, "float16", 4096),
    ("L1-NH2-C48-V97-T32", 2, False, "float32", 1 << 22),
    ("L1-NH2-C48-V97-T32", 1, False, "bfloat16", 1 << 22),
]


@pytest.fixture(scope="module")
def differences() -> dict[Any, list[str]]:
    return dict(zip(BUFFERS, answer("blocks", BUFFERS), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_buffer_comes_back_in_blocks(differences: dict[Any, list[str]], buffer: Any) -> None:
    assert differences[buffer] == []
