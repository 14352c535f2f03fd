"""How often each computation of a compiled program runs: the bodies of loops as often as they turn."""

import re
from collections import Counter
from collections.abc import Container

from llmc_jax.machine.hlo import Instruction, Module

CALLING = frozenset({"fusion", "call", "conditional", "while", "async-start"})


def times_of(module: Module, opcodes: Container[str] = CALLING) -> Counter[str]:
    """Return how often each computation that such instructions call runs in one execution of the program."""
    times: Counter[str] = Counter()

    def visit(computation: str, count: int) -> None:
        times[computation] += count
        for instruction in module.computations[computation]:
            if instruction.opcode in opcodes:
                trips = trip_count(module, instruction) if instruction.opcode == "while" else 1
                for called in instruction.called:
                    visit(called, count * trips)

    visit(module.entry, 1)
    return times


def trip_count(module: Module, loop: Instruction) -> int:
    """Return how often a while loop's body runs: as XLA says, or what its condition compares the counter with."""
    if match := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(match[1])
    condition = re.search(r"condition=%?([\w.-]+)", loop.rest)
    assert condition is not None
    numbers = [
        int(match[1])
        for instruction in module.computations[condition[1]]
        if instruction.opcode == "constant" and (match := re.match(r"(\d+)\)", instruction.rest))
    ]
    return max(numbers, default=1)
