"""`-b auto`: the largest micro-batch whose step fits, as the compiler lays it out for the device at hand.

Leaves out which sizes there are (plan/search.py), the estimate that says where to begin (plan/memory.py), and that a
run which goes on keeps what it had (resume.py).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from llmc_jax.cluster.worker import Group
from llmc_jax.config.train import TrainConfig
from llmc_jax.errors import InputError
from llmc_jax.machine import compiling
from llmc_jax.machine.device import devices_of, full_memory, gib
from llmc_jax.plan.compiled import arguments
from llmc_jax.plan.fits import DoesNotFit, advice, check_fits, remedies
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan
from llmc_jax.plan.search import sizes
from llmc_jax.training.parallel.placement import placement
from llmc_jax.training.step import train_step

# Of the memory, what a step may take; the rest is for what the run holds beside it. On a CPU that is the system, Python
# and other programs as well, since main memory is everybody's.
SHARES = {"cpu": 0.75, "gpu": 0.98}
NEAR = 1.1  # times what it may take: up to which estimate a size is compiled, because estimates err


class Tried(NamedTuple):
    """A size whose step was compiled."""

    batch_size: int
    bytes: int | None  # that it takes on one device, its state included; None: more than there was for compiling it


class Fitted(NamedTuple):
    """How -b auto came to a number."""

    plan: Plan  # with that number
    limit: int  # bytes that a step may take on one device
    tried: tuple[Tried, ...]  # the last one fits

    def to_json(self) -> dict[str, Any]:
        """Return it as a run records it."""
        tried = [each._asdict() for each in self.tried]
        return {"asked": "auto", "taken": self.tried[-1].batch_size, "limit_bytes": self.limit, "compiled": tried}


def limit_of(platform: str, memory: int) -> int:
    """Return the bytes that a step may take on a device. memory: that it can hold in all."""
    return int(SHARES.get(platform, SHARES["gpu"]) * memory)


def sizes_up_to(most: int, config: TrainConfig) -> list[int]:
    """Return what -b auto may come to, the largest first. Raises InputError where there is nothing.

    With -d what leaves the updates as they are; else powers of two, and three times those. most: that the data has
    rows for.
    """
    round_ones = (times * 2**k for times in (1, 3) for k in range(most.bit_length()))
    possible = round_ones if config.total_batch_size == -1 else sizes(config)
    if found := sorted((size for size in possible if size <= most), reverse=True):
        return found
    raise InputError(
        f"-b auto: no number up to {most}, which the data has rows of -t {config.sequence_length} for, goes with the "
        "other flags; take another -d or --reduction, or give more data"
    )


def worth_compiling(possible: Iterable[int], limit: int, plan_with: Callable[[int], Plan]) -> list[int]:
    """Return the sizes that fit by estimate, or nearly; where none does, the smallest. possible: the largest first.

    Raises DoesNotFit where that one cannot.
    """
    plans = {size: plan_with(size) for size in possible}
    if near := [size for size, plan in plans.items() if computed(plan).program <= NEAR * limit]:
        return near
    smallest = min(plans)
    check_fits(plans[smallest])
    return [smallest]


def largest(
    near: Iterable[int], limit: int, plan_with: Callable[[int], Plan], bytes_of: Callable[[Plan], int | None]
) -> Fitted:
    """Return the first size whose compiled step fits. Raises DoesNotFit where none does. near: the largest first."""
    tried, plan = list[Tried](), None
    for size in near:
        plan = plan_with(size)
        tried.append(Tried(size, bytes_of(plan)))
        needed = tried[-1].bytes
        if needed is not None and needed <= limit:
            return Fitted(plan, limit, tuple(tried))
    assert plan is not None
    needed = tried[-1].bytes
    takes = "more than there is" if needed is None else gib(needed)
    found = remedies(plan, limit)
    raise DoesNotFit(
        f"-b auto: not even -b {tried[-1].batch_size} fits: its step takes {takes}, and may take {gib(limit)}; "
        f"{advice(plan, found, limit)}",
        found,
    )


def compiled_bytes(plan: Plan, group: Group) -> int | None:
    """Compile a plan's step and return the bytes that it takes on one device, of several processes the most.

    None where the device's memory is too small for the compiler, which times products on a GPU.
    """
    group.phase("compile", 0)
    place = placement(plan.model, plan.parallel, devices_of(plan.parallel.devices))
    try:
        with place.context():
            given = place.described(arguments(plan))
            lowered = train_step.lower(*given, plan.model, plan.step_options)
        needed: int | None = step_bytes(compiling.compiled(lowered, plan.execution.compiler_options))
    except jax.errors.JaxRuntimeError as error:
        if full_memory(error) is None:
            raise
        needed = None
    everybody = group.meet(f"bytes of -b {plan.config.batch_size}", needed)
    group.phase("start", 0)
    return None if None in everybody else max(everybody)


def step_bytes(compiled: Any) -> int:
    """Return the bytes that a compiled step takes on one device, the state included; 0 where nothing says it."""
    memory = compiled.memory_analysis()
    return 0 if memory is None else int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)
