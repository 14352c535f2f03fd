"""What a compiled program launches on a GPU, and the bytes that each kernel moves, for the step table.

Leaves out reading the program (llmc_jax/plan/program.py) and time.
"""

import re
from collections.abc import Iterator, Sequence

from benchmarks.hlo import num_bytes
from benchmarks.repeats import times_of
from llmc_jax.machine.hlo import CONTAINERS, FREE, Instruction
from llmc_jax.plan.program import Program

_WORKSPACE = re.compile(r"s8\[\d+\](\{0\})?")


def launched(program: Program) -> Iterator[tuple[Instruction, int]]:
    """Yield what runs by itself in one execution, a kernel each on a GPU, and how often."""
    for computation, times in times_of(program, ("call", "conditional", "while")).items():
        for each in program.computations[computation]:
            allocates = 'custom_call_target="AllocateBuffer"' in each.rest
            if not (each.opcode in FREE | CONTAINERS or each.opcode.endswith("-done") or allocates):
                yield each, times


def moved_bytes(program: Program, instruction: Instruction) -> int:
    """Bytes that an instruction reads and writes: each array once, of one that it only takes a part of that part.

    A custom call is taken to read and write whole arrays. Workspaces of a library (s8) do not count.
    """
    inside = [each for name in instruction.called for each in program.computations.get(name, [])]
    if instruction.opcode not in ("fusion", "fusion-start", "async-start") or not inside:
        read = sum(num_bytes(program.by_name[name].shape) for name in dict.fromkeys(instruction.operands))
        return read + _written(program, instruction)
    parameters = [each for each in inside if each.opcode == "parameter"]
    roots = [each for each in inside if each.is_root]
    return sum(_read(each, inside) for each in parameters) + sum(_written(program, root) for root in roots)


def _read(array: Instruction, inside: Sequence[Instruction]) -> int:
    """Bytes of a fusion's parameter, or of another name for it, that the fusion reads."""
    total = 0
    for user in inside:
        if array.name not in user.operands:
            continue
        first = user.operands[0] == array.name
        if user.opcode == "bitcast":
            total += _read(user, inside)
        elif user.opcode in ("slice", "dynamic-slice", "gather") and first:
            total += num_bytes(user.shape)
        elif not (user.opcode == "dynamic-update-slice" and first):
            total = num_bytes(array.shape)
        if total >= num_bytes(array.shape):
            return num_bytes(array.shape)
    return total


def _written(program: Program, result: Instruction) -> int:
    """Bytes of a result, of one that is written into an array that is there already only the new part."""
    if result.opcode == "dynamic-update-slice":
        return num_bytes(program.by_name[result.operands[1]].shape)
    if result.opcode == "tuple" or (result.opcode == "bitcast" and result.operands[0] in program.by_name):
        return sum(_written(program, program.by_name[name]) for name in result.operands)
    if result.opcode == "custom-call":
        return num_bytes(_WORKSPACE.sub("", result.shape))
    return num_bytes(result.shape)
