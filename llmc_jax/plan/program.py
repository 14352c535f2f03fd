"""What a compiled program consists of, from XLA's text of it: its products, and whose each instruction is.

The model's named scopes stand in each instruction's `op_name`: `jit(step_fn)/jvp(forward)/layer_03/qkv/...`. XLA joins
instructions into fusions, which may mix operations; such a fusion belongs to the operation that does most in it. Leaves
out time (profile/trace.py).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from llmc_jax.machine.hlo import FREE, Instruction, Module, arrays, elements
from llmc_jax.models.work import OPERATIONS, PHASES


class Place(NamedTuple):
    """Where in the model an instruction belongs."""

    phase: str  # one of PHASES
    operation: str  # one of OPERATIONS, 'weights' (a slice copied out of the flat buffer), or 'other'
    layer: int | None = None


class Owner(NamedTuple):
    """The operation that an instruction belongs to, and how much of the instruction's work is another's."""

    place: Place
    mixed: float  # share of the work that belongs to other places, 0 where it is all one operation's


_LIBRARY_PRODUCT = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul)')
# Products of ours (pallas_kernels/matmul.py); those that run only where a sum is too large end otherwise.
_OWN_PRODUCT = re.compile(r"/(head_weights|head_totals|linear_gelu_forward|linear_gelu_backward)/[^/]*$")
_LAYER = re.compile(r"layer_([0-9]+)")
_WORD = re.compile(r"[A-Za-z_][\w.]*")


def place_of(op_name: str) -> Place | None:
    """Return the operation that an instruction's op_name says, or None where no named scope of the model stands in it.

    The innermost phase counts: the head goes backwards in the middle of the forward pass. Outside all scopes JAX's own
    marks of differentiation tell the phase.
    """
    first = op_name.split(";")[0]
    parts = first.split("/")
    words = [found[-1] if (found := _WORD.findall(part)) else "" for part in parts]
    phases = [index for index, word in enumerate(words) if word in PHASES]
    if not phases and "jvp" not in first:
        return None
    phase = words[phases[-1]] if phases else "backward" if "transpose(" in first else "forward"
    layer = next((int(match[1]) for word in words if (match := _LAYER.fullmatch(word))), None)
    operation = next((word for word in reversed(words[:-1]) if word in OPERATIONS), None)
    if operation is None:
        operation = "weights" if words[-1] in ("slice", "dynamic_slice") else "other"
    return Place(phase, operation, layer)


def is_own_product(instruction: Instruction) -> bool:
    """Return whether an instruction is a product by a kernel of ours."""
    return "mosaic_gpu" in instruction.rest and _OWN_PRODUCT.search(instruction.op_name) is not None


class Program(Module):
    """A program with what its instructions are for: products, and whose each one is."""

    @property
    def whole(self) -> frozenset[str]:
        """Return the instructions of XLA's CPU library YNN: they wait for the threads that help them."""
        return frozenset(name for name, each in self.by_name.items() if "__ynn_fusion" in each.rest)

    # ----- products -----

    def product_flops(self, instruction: Instruction) -> int:
        """Return the operations of one instruction, 0 where it is no product; its `members` count by themselves."""
        if instruction.opcode == "dot":
            match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
            contracted = [int(each) for each in match[1].split(",") if each] if match else []
        elif instruction.opcode == "custom-call" and _LIBRARY_PRODUCT.search(instruction.rest):
            match = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.rest)
            contracted = [int(each) for each in json.loads(match[1])] if match else []
        elif is_own_product(instruction):
            (_, left), (_, right) = (arrays(self.by_name[name].shape)[0] for name in instruction.operands[:2])
            return 2 * math.prod(left) * math.prod(right) // left[-1]
        else:
            return 0
        _, left = arrays(self.by_name[instruction.operands[0]].shape)[0]
        _, output = arrays(instruction.shape)[0]  # a library call's tuple ends with its workspace
        return 2 * math.prod(output) * math.prod(left[axis] for axis in contracted)

    # ----- owners -----

    @cached_property
    def owners(self) -> Mapping[str, Owner]:
        """Return the owner of every instruction that can be found one for, by its name."""
        owners: dict[str, Owner] = {}
        for instructions in self.computations.values():
            for instruction in instructions:
                if owner := self._owner(instruction):
                    owners[instruction.name] = owner
        for instructions in self.computations.values():
            self._inherit(instructions, owners)
        for name, owner in list(owners.items()):  # what a fusion or a call consists of is its own
            for member in self.members(self.by_name[name]):
                owners.setdefault(member.name, owner)
        return owners

    def _owner(self, instruction: Instruction) -> Owner | None:
        own = place_of(instruction.op_name)
        if instruction.opcode != "fusion":
            return Owner(own, 0.0) if own else None
        votes: Counter[Place] = Counter()
        for member in self.members(instruction):
            if member.opcode not in FREE and member.opcode != "broadcast" and (place := place_of(member.op_name)):
                votes[place] += max(elements(member.shape), self.product_flops(member))
        if own:
            votes[own] += 1  # decides where all are equal
        if not votes:
            return None
        named = [place for place in votes if place.operation not in ("weights", "other")]
        winner = max(named or votes, key=lambda place: votes[place])
        total = sum(votes[place] for place in named or votes)
        return Owner(winner, 1 - votes[winner] / total)

    def members(self, fusion: Instruction) -> Iterator[Instruction]:
        """Yield every instruction that a fusion consists of."""
        for called in fusion.called:
            for member in self.computations.get(called, []):
                yield member
                if member.opcode == "fusion":
                    yield from self.members(member)

    def _inherit(self, instructions: list[Instruction], owners: dict[str, Owner]) -> None:
        """Give instructions without a scope to who made their operands, or else to who uses them."""
        for instruction in instructions:
            if instruction.name not in owners and instruction.opcode not in FREE:
                found = [owners[name] for name in instruction.operands if name in owners]
                if found:
                    owners[instruction.name] = found[-1]
        for instruction in reversed(instructions):
            if instruction.name in owners:
                for name in instruction.operands:
                    if name in self.by_name and self.by_name[name].opcode != "parameter":
                        owners.setdefault(name, owners[instruction.name])
