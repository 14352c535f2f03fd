"""`-b auto`: the largest micro-batch whose step fits, as the compiler lays it out for the device at hand.

Leaves out which sizes there are (plan/search.py), the estimate that says where to begin (plan/memory.py), and that a
resumed run keeps what it had (resume.py).
"""

from collections.abc import Callable
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


class Fitted(NamedTuple):
    """How -b auto came to a number."""

    plan: Plan  # with that number
    bytes: int  # that its compiled step takes on one device, the state included
    limit: int  # bytes that it may take

    def to_json(self) -> dict[str, Any]:
        """Return it as a run records it."""
        size = self.plan.config.batch_size
        return {"asked": "auto", "taken": size, "bytes": self.bytes, "limit_bytes": self.limit}


def fitted(config: TrainConfig, most: int, limit: int, plan_with: Callable[[int], Plan]) -> Fitted:
    """Return the number that -b auto stands for: the largest that fits by estimate, or nearly, and once compiled too.

    most: rows that the data has; limit: bytes that a step may take; plan_with: makes the plan of a size. Raises
    InputError where nothing fits.
    """

    def likely() -> list[int]:
        plans = {size: plan_with(size) for size in sizes_up_to(most, config)}  # the largest first
        check_fits(plans[min(plans)])
        return [size for size, plan in plans.items() if computed(plan).program <= NEAR * limit] or [min(plans)]

    for size in of_first("sizes", likely):
        plan = plan_with(size)
        needed = compiled_bytes(plan)
        if needed is not None and needed <= limit:
            return Fitted(plan, needed, limit)
    takes = "more than there is" if needed is None else gib(needed)
    words = f"-b auto: not even -b {size} fits: its step takes {takes}, and may take {gib(limit)}"
    raise refusal(plan, words, limit, needed)


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
