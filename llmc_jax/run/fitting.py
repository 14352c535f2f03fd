"""`-b auto`: the largest micro-batch whose step fits, as the compiler lays it out for the device at hand.

Leaves out which sizes there are (plan/search.py), the estimate that says where to begin (plan/memory.py), and that a
resumed run keeps what it had (resume.py).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from llmc_jax import cluster
from llmc_jax.cluster.agreement import of_first
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import compiling
from llmc_jax.machine.device import devices_of, full_memory, gib
from llmc_jax.plan.compiled import arguments
from llmc_jax.plan.fits import check_fits, refusal
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan
from llmc_jax.plan.search import sizes_up_to
from llmc_jax.training.parallel.placement import placement
from llmc_jax.training.step import train_step

NEAR = 1.1  # times what it may take: up to which estimate a size is compiled, because estimates err


class Tried(NamedTuple):
    """A size whose step was compiled."""

    batch_size: int
    bytes: int | None  # that it takes on one device, its state included; None: more than there was for compiling it

    def fits(self, limit: int) -> bool:
        """Return whether it takes at most so many bytes."""
        return self.bytes is not None and self.bytes <= limit


class Fitted(NamedTuple):
    """How -b auto came to a number."""

    plan: Plan  # with that number
    taken: Tried
    limit: int  # bytes that a step may take on one device
    tried: tuple[Tried, ...]  # in the order in which they were compiled

    def to_json(self) -> dict[str, Any]:
        """Return it as a run records it."""
        tried = [each._asdict() for each in self.tried]
        return {"asked": "auto", "taken": self.taken.batch_size, "limit_bytes": self.limit, "compiled": tried}


def fitted(config: TrainConfig, most: int, limit: int, plan_with: Callable[[int], Plan]) -> Fitted:
    """Return the number that -b auto stands for. most: rows that the data has; limit: bytes that a step may take.

    plan_with: makes the plan of a size. Raises InputError where nothing fits.
    """

    def estimates() -> list[Tried]:
        plans = {size: plan_with(size) for size in sizes_up_to(most, config)}  # the largest first
        check_fits(plans[min(plans)])
        return [Tried(size, computed(plan).program) for size, plan in plans.items()]

    estimated = of_first("estimates", estimates)
    return largest([Tried(*each) for each in estimated], limit, plan_with, compiled_bytes)


def largest(
    estimated: Sequence[Tried], limit: int, plan_with: Callable[[int], Plan], bytes_of: Callable[[Plan], int | None]
) -> Fitted:
    """Return the largest size whose compiled step fits: from the one that does by estimate, or nearly, up or down.

    estimated: the largest first. bytes_of: compiles a plan's step and returns what it takes. Raises DoesNotFit where
    none fits.
    """
    tried, plans = list[Tried](), dict[int, Plan]()

    def fits(place: int) -> bool:
        size = estimated[place].batch_size
        plans[size] = plan_with(size)
        tried.append(Tried(size, bytes_of(plans[size])))
        return tried[-1].fits(limit)

    def is_near(place: int) -> bool:  # by an estimate that is scaled by the last compilation
        scale = (tried[-1].bytes or 0) / max(1, estimated[place + 1].bytes or 0)
        return scale * (estimated[place].bytes or 0) <= NEAR * limit

    last = len(estimated) - 1
    place = next((k for k, each in enumerate(estimated) if each.fits(int(NEAR * limit))), last)
    if fits(place):
        while place > 0 and is_near(place - 1) and fits(place - 1):
            place -= 1
    else:
        while place < last and not fits(place + 1):
            place += 1
    if fitting := [each for each in tried if each.fits(limit)]:
        taken = max(fitting)
        return Fitted(plans[taken.batch_size], taken, limit, tuple(tried))
    smallest = tried[-1]
    takes = "more than there is" if smallest.bytes is None else gib(smallest.bytes)
    words = f"-b auto: not even -b {smallest.batch_size} fits: its step takes {takes}, and may take {gib(limit)}"
    raise refusal(plans[smallest.batch_size], words, limit, smallest.bytes)


def compiled_bytes(plan: Plan) -> int | None:
    """Compile a plan's step and return the bytes that it takes on one device, of several processes the most.

    None where the device's memory is too small for the compiler, which times products on a GPU.
    """
    group = cluster.here()
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
