"""The largest -b that fits, for each -r, --recompute-blocks and -z, and the fastest of them.

What fits and how long it takes comes in as a function, so that nothing here knows how either is found.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import Interval
from llmc_jax.config.checks import validate
from llmc_jax.config.model import divisors
from llmc_jax.config.train import TrainConfig

LEVELS = ((0, 0), (1, 0), (2, 0), (1, 1), (1, 2), (1, 4))  # -r and --recompute-blocks, which makes -r the same
STAGES = (0, 1, 2)  # of -z
# Of the memory, what a step may take; the rest is for what the run holds beside it. On a CPU that is the system, Python
# and other programs as well, since main memory is everybody's.
SHARES = {"cpu": 0.75, "gpu": 0.98}
MOST_ROWS = 4096  # where -d sets no bound: a search must end, and more rows make no step faster


class Largest(NamedTuple):
    """The most rows that fit in one way of computing."""

    recompute: int
    recompute_blocks: int
    zero_stage: int
    batch_size: int | None  # None: not even the fewest rows fit
    program: int | None  # bytes of the step's program, computed, with them or with the fewest; None: -d allows none
    tokens_per_second: Interval | None
    fastest: bool = False


Fits = Callable[[TrainConfig], bool]


def limit_of(platform: str, memory: int) -> int:
    """Return the bytes that a step may take on a device. memory: that it can hold in all."""
    return int(SHARES.get(platform, SHARES["gpu"]) * memory)


def ways(config: TrainConfig, layers: int, recomputes: bool = True) -> list[TrainConfig]:
    """Return a configuration with each -r, --recompute-blocks and, on several devices, -z that goes with the rest.

    recomputes: whether the model's backward can compute something again.
    """
    levels = [(level, blocks) for level, blocks in LEVELS if blocks <= max(1, layers // 2)] if recomputes else [(0, 0)]
    stages = STAGES if config.devices > 1 else (config.zero_stage,)
    found = [
        replace(config, recompute=level, recompute_blocks=blocks, zero_stage=stage)
        for level, blocks in levels
        for stage in stages
    ]
    return list(filter(_possible, found))


def sizes(config: TrainConfig) -> Sequence[int]:
    """Return the -b that a configuration can have, ascending: where -d is given, those that its updates allow."""
    if config.total_batch_size == -1:
        return range(1, MOST_ROWS + 1)
    rows = config.total_batch_size // (config.sequence_length * max(1, config.devices))
    return [size for size in reversed(divisors(rows)) if _possible(replace(config, batch_size=size))] if rows else []


def auto_sizes(config: TrainConfig, most: int = MOST_ROWS) -> list[int]:
    """Return the values that -b auto may take, at most `most`, the largest first.

    With -d what leaves the updates as they are; else powers of two, and three times those, up to MOST_ROWS.
    """
    most = most if config.total_batch_size != -1 else min(most, MOST_ROWS)
    round_ones = (times * 2**k for times in (1, 3) for k in range(most.bit_length()))
    possible = round_ones if config.total_batch_size == -1 else sizes(config)
    return sorted((size for size in possible if size <= most), reverse=True)


def sizes_up_to(most: int, config: TrainConfig) -> list[int]:
    """Return the values that -b auto may take, the largest first. Raises InputError where there is nothing.

    most: that the data has rows for.
    """
    if found := auto_sizes(config, most):
        return found
    raise InputError(
        f"-b auto: no number up to {most}, which the data has rows of -t {config.sequence_length} for, goes with the "
        "other flags; choose another -d or --reduction, or give more data"
    )


def _possible(config: TrainConfig) -> bool:
    try:
        validate(config)
    except InputError:
        return False
    return True


def largest_size(config: TrainConfig, fits: Fits) -> int | None:
    """Return the largest -b of a configuration that fits; None where none does. Without -d more rows take more.

    With -d they need not: there are fewer micro-batches, of which --reduction fixed keeps more sums.
    """
    found = sizes(config)
    if config.total_batch_size != -1:  # few
        return next((size for size in reversed(found) if fits(replace(config, batch_size=size))), None)
    count = bisect_left(found, True, key=lambda size: not fits(replace(config, batch_size=size)))  # of those that fit
    return found[count - 1] if count else None
