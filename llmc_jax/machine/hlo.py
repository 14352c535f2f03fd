"""What a compiled program's text says, instruction by instruction: `compiled.as_text()` of XLA, as plain data.

Leaves out what the instructions are for: whose they are and what they cost (plan/program.py), how often they run
(benchmarks/repeats.py), and what goes from device to device (benchmarks/sent.py).
"""

import math
import re
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str  # XLA's text: f32[4,64]{1,0}, or a tuple of such
    opcode: str
    operands: tuple[str, ...]
    rest: str  # what stands behind the operands
    op_name: str
    called: tuple[str, ...]  # computations
    is_root: bool = False  # the computation's result


# Name, shape, operation, names: `  ROOT %dot.3 = f32[2,3]{1,0} dot(%a, %b), lhs_contracting_dims={1}, ...`. A shape
# may be a tuple of tuples, and a layout in it have brackets of its own: ((f32[8]{0:S(1)}), f32[64]{0}).
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\S+) ([\w-]+)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) (?:\(.*\) -> .*)?\{$")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"([a-z]+[0-9]*(?:e\dm\d\w*)?)\[([0-9,]*)\]")
CONTAINERS = frozenset({"while", "call", "conditional"})  # their time is that of the instructions that they call
FREE = frozenset({"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier"})


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the dtype and the dimensions of an array, or of all arrays of a tuple."""
    return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in _ARRAY.findall(shape)]


def elements(shape: str) -> int:
    """Return the elements of an array, or of all arrays of a tuple."""
    return sum(math.prod(sizes) for _, sizes in arrays(shape))


class Module:
    """A program, parsed from what `compiled.as_text()` gives, or `lowered.as_text(dialect='hlo')`.

    Names of instructions are unique in it, so that a trace's names lead here.
    """

    def __init__(self, text: str) -> None:
        self.name = text.partition("\n")[0].partition(" ")[2].partition(",")[0]
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if line[:1] not in (" ", "}", "") and (match := _COMPUTATION.match(line)):
                current = self.computations.setdefault(match[2], [])
                self.entry = match[2] if match[1] else self.entry
            elif instruction := _parse(line):
                current.append(instruction)
        self.by_name = {each.name: each for found in self.computations.values() for each in found}


def _parse(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    name, shape, opcode, rest = match.groups()
    inside, behind = _split_operands(rest)
    op_name = _OP_NAME.search(rest)
    called = _CALLED.findall(behind)
    if branches := _BRANCHES.search(behind):
        called += [each.strip().removeprefix("%") for each in branches[1].split(",")]
    operands = tuple(re.findall(r"%([\w.-]+)", inside)) or tuple(
        each.strip().split(" ")[-1] for each in inside.split(",") if each.strip()
    )
    kept = rest if opcode == "constant" else behind
    is_root = line.lstrip().startswith("ROOT ")
    return Instruction(name, shape, opcode, operands, kept, op_name[1] if op_name else "", tuple(called), is_root)


def _split_operands(text: str) -> tuple[str, str]:
    """Return what stands before the bracket that closes the operands, and what behind it."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:index], text[index + 1 :]
    return text, ""
