"""A compiled program's memory: XLA's buffer assignment, and what lies in it at the moment that needs most, by kind.

XLA puts all arrays that live only during a program into one block: each at an offset, over an interval of the program's
schedule. It says so in two files that it writes when asked to (`options`), for a GPU and for a CPU alike:

    *-buffer-assignment.txt    allocations; in each the values, with size and offset
    *-live-range.txt           the schedule, and from when to when each value lives

The moment that needs most is where the values alive cover the most bytes. What the block has beyond them is
fragmentation. Leaves out what the instructions are for (program.py) and what a step takes by shape alone (memory.py).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmc_jax.errors import FormatError

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


def options(folder: Path) -> tuple[tuple[str, bool | int | str], ...]:
    """Return the options of XLA by which it writes the two files of `MODULE` into a folder."""
    return ("xla_dump_to", str(folder)), ("xla_dump_hlo_as_text", True), ("xla_dump_hlo_module_re", MODULE)


def read(folder: Path) -> Assignment:
    """Return what XLA wrote into a folder of one program. Raises FormatError where it did not, or in another form."""
    found = [sorted(folder.glob(f"*{kind}.txt")) for kind in ("buffer-assignment", "live-range")]
    if not all(found):
        raise FormatError(f"{folder}: XLA wrote no buffer assignment; this JAX's XLA may not know how to")
    return parsed(*(each[-1].read_text() for each in found))


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
