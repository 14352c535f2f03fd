"""Tile sizes of the kernels, one table per GPU architecture, and where each number comes from.

Leaves out which implementation of an operation is the fastest (llmc_jax/kernels.py).
"""

from typing import NamedTuple

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


class Sizes(NamedTuple):
    """What a kernel's speed depends on and its result does not."""

    sms: int  # multiprocessors of the largest common part: grids that go round in a loop have a multiple of it
    smem: int  # bytes of shared memory that one block may use


SIZES = {
    "sm_80": Sizes(sms=108, smem=166_912),  # A100
    "sm_86": Sizes(sms=82, smem=101_376),  # RTX 3090
    "sm_89": Sizes(sms=128, smem=101_376),  # RTX 4090
    "sm_90": Sizes(sms=132, smem=232_448),  # H100, H200
    "sm_100": Sizes(sms=148, smem=232_448),  # B200
    "sm_120": Sizes(sms=170, smem=101_376),  # RTX 5090
}


def sizes(target: str) -> Sizes:
    """The table's row of an architecture. Raises ValueError for one that has no kernels."""
    if target not in SIZES:
        raise ValueError(f"no kernels for {target}: known are {', '.join(TARGETS)} (Ampere and later)")
    return SIZES[target]
