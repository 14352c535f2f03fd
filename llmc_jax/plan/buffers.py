"""A compiled program's memory: XLA's buffer assignment, and what lies in it at the moment that needs most, by kind.

XLA puts all arrays that live only during a program into one block: each at an offset, over an interval of the program's
schedule. It says so in two files that it writes when asked to (`options`), for a GPU and for a CPU alike:

    *-buffer-assignment.txt    allocations; in each the values, with size and offset
    *-live-range.txt           the schedule, and from when to when each value lives

The moment that needs most is where the values alive cover the most bytes. What the block has beyond them is
fragmentation. The kind of a value follows from whose its instruction is and who uses it last. Leaves out what the
instructions are for (program.py) and what a step takes by shape alone (memory.py).
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmc_jax.base.errors import FormatError
from llmc_jax.config.model import ModelConfig
from llmc_jax.machine.hlo import arrays
from llmc_jax.plan.program import Place, Program

if TYPE_CHECKING:  # it imports JAX, which whoever reads what was kept does without
    from llmc_jax.machine.compiling import Settings

KINDS = (
    "parameters",  # what the step updates, the copy that the model computes with, and slices of it
    "optimizer",  # its buffers: AdamW's m and v
    "gradients",  # of the parameters: of one tensor, flat, summed over micro-batches
    "activations",  # what the forward keeps for the backward
    "logits",  # and their gradient
    "working arrays",  # what is made and used within a layer or the head
    "workspace",  # of the libraries' products
    "communication",  # what comes from other devices
    "batch",  # tokens, and the step's numbers
)

MODULE = ".*step_fn.*"  # the program whose memory is asked for, by name


class Value(NamedTuple):
    """An array that an instruction makes."""

    instruction: str
    element: str  # of a tuple's element: "0"; of the tuple itself or of an array nothing
    shape: str  # XLA's text
    size: int  # bytes
    offset: int  # in the allocation
    first: int = 0  # place in the schedule that it lives from
    last: int = 0  # and to


class Allocation(NamedTuple):
    """A block of memory."""

    size: int  # bytes
    about: str  # XLA's words: "parameter 0, …", "preallocated-temp"
    values: tuple[Value, ...]

    @property
    def parameter(self) -> bool:
        """Return whether it is an argument of the program; a donated one is also a result."""
        return "parameter " in self.about

    @property
    def temporary(self) -> bool:
        return "preallocated-temp" in self.about


class Assignment(NamedTuple):
    """Where a program's arrays lie, and when."""

    allocations: tuple[Allocation, ...]
    schedule: tuple[str, ...]  # instructions in the order that they run in

    @property
    def total(self) -> int:
        """Return the bytes of all allocations."""
        return sum(each.size for each in self.allocations)


class Held(NamedTuple):
    """Bytes that a value holds at a moment; of values that lie over each other the first has what it covers."""

    value: Value
    bytes: int


class Moment(NamedTuple):
    """What lies in an allocation at one place of the schedule."""

    at: int
    held: tuple[Held, ...]

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.held)


# ----- reading --------------------------------------------------------------------------------------------------------


def options(folder: Path) -> "Settings":
    """Return the options of XLA by which it writes the two files of `MODULE` into a folder."""
    return ("xla_dump_to", str(folder)), ("xla_dump_hlo_as_text", True), ("xla_dump_hlo_module_re", MODULE)


def read(folder: Path) -> tuple[Assignment, Program]:
    """Return what XLA wrote into a folder about one program.

    Raises FormatError where it did not, or in another form.
    """
    kinds = "after_optimizations-buffer-assignment", "after_optimizations-live-range", "after_optimizations"
    found = [sorted(folder.glob(f"*{kind}.txt")) for kind in kinds]
    if not all(found):
        raise FormatError(f"{folder}: XLA wrote no buffer assignment: the XLA of this JAX does not do so when asked to")
    assignment, live_ranges, program = (each[-1].read_text() for each in found)
    return parsed(assignment, live_ranges), Program(program)


_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*)")
_VALUE = re.compile(r" value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_STEP = re.compile(r"\s+(\d+):(\S+)$")
_RANGE = re.compile(r"\s+(\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")


def parsed(assignment: str, live_ranges: str) -> Assignment:
    """Return the two files' contents. Raises FormatError where they have another form."""
    steps, ranges = [], {}
    for line in live_ranges.splitlines():
        if match := _STEP.match(line):
            steps.append(match[2])
        elif match := _RANGE.match(line):
            ranges[match[1], match[2]] = int(match[3]), int(match[4])
    allocations = tuple(_allocations(assignment, ranges))
    if not allocations or not steps:
        raise FormatError("XLA's buffer assignment has another form than is known here")
    return Assignment(allocations, tuple(steps))


def _allocations(text: str, ranges: dict[tuple[str, str], tuple[int, int]]) -> Iterator[Allocation]:
    size, about, values = 0, "", list[Value]()
    for line in [*text.splitlines(), "allocation 0: size 0, end"]:
        if match := _ALLOCATION.match(line):
            if about:
                yield Allocation(size, about, tuple(values))
            size, about, values = int(match[1]), match[2], []
        elif (match := _VALUE.match(line)) and (live := ranges.get((match[1], match[2] or ""))):
            values.append(Value(match[1], match[2] or "", match[5], int(match[3]), int(match[4]), *live))
        elif match:
            values.append(Value(match[1], match[2] or "", match[5], int(match[3]), int(match[4])))


# ----- the moment that needs most -------------------------------------------------------------------------------------


def peak(allocation: Allocation) -> Moment:
    """Return the first place of the schedule at which an allocation's values cover the most bytes."""
    best = Moment(0, ())
    for most, at in sorted(_sums(allocation.values), key=lambda each: (-each[0], each[1])):
        if most <= best.bytes:  # values may lie over each other: their sum is no less than what they cover
            break
        held = tuple(covered(value for value in allocation.values if value.first <= at <= value.last))
        best = max(best, Moment(at, held), key=lambda moment: moment.bytes)
    return best


def _sums(values: tuple[Value, ...]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of all values that live, and the place, wherever one comes to life."""
    changes: dict[int, int] = {}
    for value in values:
        changes[value.first] = changes.get(value.first, 0) + value.size
        changes[value.last + 1] = changes.get(value.last + 1, 0) - value.size
    alive = 0
    for at in sorted(changes):
        alive += changes[at]
        yield alive, at


def covered(values: Iterator[Value]) -> Iterator[Held]:
    """Yield each value with the bytes that none before it covers, by offset; the larger first."""
    end = 0
    for value in sorted(values, key=lambda each: (each.offset, -each.size)):
        bytes_of_it = max(0, value.offset + value.size - max(end, value.offset))
        end = max(end, value.offset + value.size)
        if bytes_of_it:
            yield Held(value, bytes_of_it)


# ----- by kind --------------------------------------------------------------------------------------------------------


class Account(NamedTuple):
    """A program's memory by kind."""

    at: str  # what runs at the moment that needs most: phase and operation
    kinds: dict[str, int]  # bytes, every one of KINDS
    fragmentation: int  # bytes of the block of temporaries that no value covers at that moment
    unknown: int  # bytes of values that no rule gives a kind


def account(assignment: Assignment, program: Program, model: ModelConfig) -> Account:
    """Return a program's memory by kind at the moment that needs most."""
    block = max((each for each in assignment.allocations if each.temporary), key=lambda each: each.size)
    moment, found = peak(block), Counter[str]()
    for allocation in assignment.allocations:
        if allocation is not block and "thread-local" not in allocation.about:  # registers, in truth
            found[_kind_of_argument(allocation, program)] += allocation.size
    for held in moment.held:
        found[_kind_of(held.value, assignment.schedule, program, model) or ""] += held.bytes
    place = _place(program, assignment.schedule[moment.at])
    at = f"{place.phase} {place.operation}" if place else ""
    return Account(at, {kind: found[kind] for kind in KINDS}, block.size - moment.bytes, found[""])


def _kind_of_argument(allocation: Allocation, program: Program) -> str:
    if not allocation.parameter:
        return "batch" if not allocation.temporary else "working arrays"  # results that are numbers, constants
    names = (
        program.by_name[each.instruction].op_name for each in allocation.values if each.instruction in program.by_name
    )
    name = next((each for each in names if each.startswith("state.")), "")
    if name.startswith(("state.params", "state.copy")):
        return "parameters"
    return "optimizer" if name.startswith("state.buffers") else "batch"


COLLECTIVES = re.compile("all-reduce|all-gather|reduce-scatter|all-to-all|collective")


def _kind_of(value: Value, schedule: tuple[str, ...], program: Program, model: ModelConfig) -> str | None:
    """Return the kind of a temporary: by what it is, by its shape, by who makes it and who uses it last."""
    instruction, maker = program.by_name.get(value.instruction), _place(program, value.instruction)
    user = _place(program, schedule[value.last])
    if instruction is None:
        return None
    if value.shape.startswith("("):  # a tuple: addresses
        return "working arrays"
    dtype, sizes = arrays(value.shape)[0]
    if dtype in ("s8", "u8"):
        return "workspace"
    if COLLECTIVES.search(instruction.opcode + instruction.name):
        return "communication"
    if sizes[-1:] == (model.padded_vocab_size,) and len(sizes) > 1:
        return "logits"
    if sizes == (model.padded_vocab_size, model.channels) and (maker is None or maker.operation != "weights"):
        return "gradients"  # of wte
    if maker is None and dtype == "f32" and sizes[-1:] == (model.channels,):  # what a loop over micro-batches sums up
        return "gradients"
    return _kind_by_places(maker, user)


def _kind_by_places(maker: Place | None, user: Place | None) -> str | None:
    if maker is None:
        return None
    if maker.operation == "weights":
        return "parameters"
    ends = {"gradient", "norm", "adamw", "reduce"}
    if maker.phase == "update" or maker.operation in ends or (user and user.operation in ends):
        return "gradients"
    if maker.phase == "forward" and user and user.phase == "backward":
        return "activations"
    return "working arrays"


def _place(program: Program, instruction: str) -> Place | None:
    owner = program.owners.get(instruction)
    return owner.place if owner else None
