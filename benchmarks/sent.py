"""What a compiled program sends from device to device, from XLA's text of it, and what runs meanwhile.

XLA runs a collective in one of two ways. A synchronous one stands alone: the device computes nothing until it is done.
An asynchronous one is two instructions, a start and a done, and what is scheduled between them may run at the same
time. A pair that XLA marks with `is_sync` is a synchronous one all the same. XLA also joins collectives of one kind:
several arrays in one instruction, or, of all-reduces, copied together before it; then it has the names of all. Leaves
out how long anything takes.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.hlo import num_bytes
from benchmarks.repeats import times_of
from llmc_jax.machine.hlo import CONTAINERS, FREE, Instruction, Module
from llmc_jax.plan.program import is_own_product

KINDS = (
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip
IDLE = FREE | {"partition-id", "replica-id"}  # instructions that nothing is run for
_HALVES = ("-start", "-update", "-done")


class Operation(NamedTuple):
    """Something that a device computes."""

    name: str
    opcode: str
    target: str  # of a custom call; the kind of a fusion that has one: `__triton_nested_gemm_fusion`
    scope: str  # named scopes: `backward/layer_03/qkv`
    product: bool  # a matrix product is in it


class Collective(NamedTuple):
    """One collective of a program, as one of the devices sees it."""

    kind: str  # one of KINDS
    name: str  # of the instruction, the start of a pair
    scopes: tuple[str, ...]  # named scopes: `backward/layer_03/reduce`; several where XLA has joined some
    # Of the whole array that it is about, on one device: all-reduce, all-to-all, collective-permute: what goes in, as
    # much as comes out; reduce-scatter: what goes in; all-gather: what comes out. Of all arrays together.
    bytes: int
    arrays: int  # that are joined in it
    devices: int  # in each of its groups; of a collective-permute all
    asynchronous: bool
    between: tuple[Operation, ...]  # scheduled between start and done; synchronous: none
    computation: str
    times: int  # that it runs in one execution of the program: more than 1 in a loop

    @property
    def products(self) -> int:
        """Return how many operations with a matrix product are scheduled between start and done."""
        return sum(operation.product for operation in self.between)


def sent_bytes(collective: Collective) -> float:
    """Return the bytes that each device sends, once: in a ring, an all-to-all straight to the others."""
    if collective.kind in ("collective-permute", "collective-broadcast"):
        return collective.bytes
    rounds = 2 if collective.kind == "all-reduce" else 1  # a reduce-scatter, then an all-gather
    return rounds * collective.bytes * (collective.devices - 1) / collective.devices


def collectives(hlo: str) -> list[Collective]:
    """Return every collective of a program's text (`compiled.as_text()`), those of a computation in their order.

    Raises ValueError for groups of devices in a spelling that is not known.
    """
    module = Module(hlo)
    header = hlo.partition("\n")[0]
    everyone = _number(r"num_partitions=(\d+)", header) * _number(r"replica_count=(\d+)", header)
    found = []
    # What is called in another way, by a fusion or by the start of a pair, belongs to the instruction that calls it.
    for computation, times in times_of(module, CONTAINERS).items():
        instructions = module.computations[computation]
        for index, instruction in enumerate(instructions):
            if members := _members(module, instruction):
                between = _between(module, instruction, instructions[index + 1 :], members)
                found.append(_collective(module, instruction, members, between, computation, times, everyone))
    return found


def _members(module: Module, instruction: Instruction) -> list[Instruction]:
    """Return the collectives that an instruction is, or is the start of: itself, or those that it calls."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return [instruction]
    if not instruction.opcode.endswith("-start") and instruction.opcode != "fusion":
        return []
    inside = (each for called in instruction.called for each in module.computations.get(called, []))
    return [member for each in inside for member in _members(module, each)]


def _collective(
    module: Module,
    instruction: Instruction,
    members: list[Instruction],
    between: tuple[Operation, ...] | None,
    computation: str,
    times: int,
    everyone: int,
) -> Collective:
    kind = members[0].opcode.removesuffix("-start")
    devices = _devices(members[0], everyone)
    scopes = _scopes(instruction.op_name or members[0].op_name)
    sizes = [num_bytes(module.by_name[name].shape) for each in members for name in each.operands]
    pieces = kind == "all-to-all" and "dimensions=" not in members[0].rest  # an operand for each device
    return Collective(
        kind=kind,
        name=instruction.name,
        scopes=scopes,
        bytes=sum(sizes) * (devices if kind == "all-gather" else 1),
        arrays=max(len(scopes), len(sizes) // devices if pieces else len(sizes)),
        devices=devices,
        asynchronous=between is not None,
        between=between or (),
        computation=computation,
        times=times,
    )


def _between(
    module: Module, start: Instruction, later: Sequence[Instruction], members: list[Instruction]
) -> tuple[Operation, ...] | None:
    """Return what is computed between a start and its done, or None for a collective that runs alone.

    later: what follows the start. Where the done stands in another computation, as the result of a loop's round, that
    is all of it.
    """
    if not start.opcode.endswith("-start") or any('"is_sync":true' in each.rest for each in (start, *members)):
        return None
    chain, found = {start.name}, []
    for instruction in later:
        if instruction.opcode.endswith(_HALVES):
            if chain.intersection(instruction.operands):
                if instruction.opcode.endswith("-done"):
                    break
                chain.add(instruction.name)
        elif instruction.opcode not in IDLE and not _members(module, instruction):
            found.append(_operation(module, instruction))
    return tuple(found)


def _operation(module: Module, instruction: Instruction) -> Operation:
    match = re.search(r'custom_call_target="([^"]*)"|"kind":"(__\w+)"', instruction.rest)
    target = (match[1] or match[2]) if match else ""
    return Operation(
        instruction.name, instruction.opcode, target, scope_of(instruction.op_name), _is_product(module, instruction)
    )


def _is_product(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call":
        by_library = re.search(r'custom_call_target="[^"]*(?:gemm|matmul)', instruction.rest) is not None
        return by_library or is_own_product(instruction)
    inside = (each for called in instruction.called for each in module.computations.get(called, []))
    return instruction.opcode in ("dot", "convolution") or any(_is_product(module, each) for each in inside)


def _devices(collective: Instruction, everyone: int) -> int:
    """Return the devices of one group: `{{0,1},{2,3}}`, `[2,4]<=[8]`, `mesh['a'=2,'b'=4] {'b'}`, or `{}` for all."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", collective.rest):
        return len(set(re.findall(r"\d+", pairs[1])))
    groups = collective.rest.partition("replica_groups=")[2]
    if match := re.match(r"\{\{([\d,]+)\}", groups):
        return len(match[1].split(","))
    if match := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(match[1])
    if match := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", groups):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])  # 'b':(1)2 is a part of an axis
        return math.prod(int(part) if part else sizes[axis] for axis, part in parts)
    if groups.startswith("{}") or not groups:
        return everyone
    raise ValueError(f"{collective.name}: groups of devices in an unknown spelling: {groups[:60]}")


def _number(pattern: str, header: str) -> int:
    match = re.search(pattern, header)
    return int(match[1]) if match else 1


def scope_of(op_name: str) -> str:
    """Return the named scopes in an op_name, without what JAX adds: jit(f)/shard_map/backward/fc/dot -> backward/fc."""
    parts = op_name.split(";")[0].split("/")[:-1]
    return "/".join(part for part in parts if re.fullmatch(r"[A-Za-z_]\w*", part) and part != "shard_map")


def _scopes(op_name: str) -> tuple[str, ...]:
    """Return the named scopes of one instruction, or of several that XLA has joined: `f/backward/(a/psum:b/psum)`."""
    shared, joined, rest = op_name.partition("/(")
    names = [f"{shared}/{each}" for each in rest.rstrip(")").split(":")] if joined else [op_name]
    return tuple(map(scope_of, names))
