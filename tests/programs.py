"""What tests count in a compiled program."""

from collections import Counter

from benchmarks.repeats import times_of
from llmc_jax.plan.program import Place, Program, place_of


def products_flops(program: Program) -> dict[Place | None, int]:
    """Return the operations of the matrix products by place, loops' bodies as often as they run.

    Counts `dot` and the library calls that stand for one; a handwritten kernel's products are not seen.
    """
    counted: Counter[Place | None] = Counter()
    for computation, times in times_of(program).items():
        for instruction in program.computations[computation]:
            if flops := program.product_flops(instruction):
                owner = program.owners.get(instruction.name)
                counted[place_of(instruction.op_name) or (owner.place if owner else None)] += times * flops
    return dict(counted)
