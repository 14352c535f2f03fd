"""The table: each operation's time beside its work, and how far it is from what the machine could do.

Takes the time from a trace, the work from models/work.py, its floor from plan/efficiency.py. Leaves out how they
are obtained.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from llmc_jax.base import text
from llmc_jax.machine.hlo import CONTAINERS
from llmc_jax.models.work import OPERATIONS, PHASES, Work
from llmc_jax.plan.efficiency import Roof, roofline
from llmc_jax.plan.program import Program
from llmc_jax.profile.trace import Trace, shared_time

NAMELESS = 0.2  # share of the time that may have no operation
ORDER = (OPERATIONS[0], "weights", *OPERATIONS[1:], "other")
LAST = ("gradient", "other")  # of a phase, the backward too


class Line(NamedTuple):
    """One operation, in all layers together, per step."""

    phase: str
    operation: str
    calls: float  # instructions that ran
    seconds: float
    flops: int  # of products
    bytes: int  # compulsory
    floor: float  # seconds that the machine's rates allow
    bound: str  # what sets the floor: products, memory; empty: there is none
    mixed: float = 0.0  # share of the time in instructions that also do other operations' work

    @property
    def gap(self) -> float | None:
        """Return how many times the floor it takes; None without a floor or a time."""
        return self.seconds / self.floor if self.floor and self.seconds > 0 else None


class Report(NamedTuple):
    """All lines of a step, and what of its time none of them has."""

    lines: tuple[Line, ...]
    step: float  # seconds of a step in the trace
    idle: float  # seconds of a step in which nothing of the program ran
    unknown: float  # seconds of instructions that no operation owns

    @property
    def problem(self) -> str:
        """Return why this is no table of the step; empty: it is one."""
        busy = self.unknown + sum(line.seconds for line in self.lines)
        if not busy:
            return "the trace has no instructions of the step (a GPU's counters may be closed to this user)"
        if self.unknown > NAMELESS * busy:
            share = f"{100 * self.unknown / busy:.0f} % of the time in the trace"
            return f"{share} has no operation (CUDA graphs hide the names of kernels)"
        return ""


Row = tuple[str, str]  # phase and operation
Groups = dict[Row, list[Work]]


def _line(row: Row, seconds: float, calls: float, mixed: float, work: Sequence[Work], roof: Roof | None) -> Line:
    """Return a line; the floors of its work add up, and without a roof there are none."""
    floors = [roofline(each, roof) for each in work] if roof else []
    floor = sum((least for least, _ in floors), 0.0)
    by_products = sum(least for least, bound in floors if bound == "products")
    bound = ("products" if by_products > floor / 2 else "memory") if floor else ""
    flops, moved = sum(each.flops for each in work), sum(each.bytes for each in work)
    return Line(*row, calls, seconds, flops, moved, floor, bound, mixed)


def _sorted(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines: forward in the order of the model, backward against it, then the update."""

    def key(line: Line) -> tuple[int, int]:
        place = ORDER.index(line.operation) if line.operation in ORDER else len(ORDER)
        is_backward = line.phase == "backward" and line.operation not in LAST
        return PHASES.index(line.phase), -place if is_backward else place

    return tuple(sorted(lines, key=key))


# ----- from a trace -------------------------------------------------------------------------------------------------


def report_from_trace(trace: Trace, program: Program, work: Sequence[Work], roof: Roof | None) -> Report:
    """Return the table of a traced program; without a roof it has no floors."""
    steps = max(1, len(trace.steps))
    containers = [name for name, each in program.by_name.items() if each.opcode in CONTAINERS]
    uses = shared_time(trace.spans, containers)
    ran: dict[Row, list[tuple[float, int, float]]] = defaultdict(list)  # seconds, calls, seconds of others' work
    unknown = 0.0  # seconds of instructions that belong nowhere
    for name, use in uses.items():
        if owner := program.owners.get(name):
            row = owner.place.phase, owner.place.operation
            ran[row].append((use.seconds, use.calls, use.seconds * owner.mixed))
        else:
            unknown += use.seconds
    groups = _where_it_ran(work, ran)
    lines = []
    for row, found in ran.items():
        seconds, calls, mixed = map(sum, zip(*found, strict=True))
        share = mixed / seconds if seconds else 0.0
        lines.append(_line(row, seconds / steps, calls / steps, share, groups.get(row, []), roof))
    busy = sum(use.seconds for use in uses.values()) / steps
    step = sum(end - start for start, end in trace.steps) * 1e-9 / steps if trace.steps else busy
    return Report(_sorted(lines), step, max(0.0, step - busy), unknown / steps)


def _where_it_ran(work: Iterable[Work], ran: Container[Row]) -> Groups:
    """Return the work of each line; where nothing ran under an operation's phase, its work is with its other phase.

    So it is with the head, which goes backwards in the middle of the forward pass.
    """
    placed: Groups = defaultdict(list)
    for each in work:
        here = each.phase, each.operation
        there = {"forward": "backward", "backward": "forward"}.get(each.phase, each.phase), each.operation
        placed[there if here not in ran and there in ran else here].append(each)
    return placed


# ----- as text and JSON ---------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values; seconds, FLOPs and bytes per step."""
    return {
        "step_seconds": report.step,
        "idle_seconds": report.idle,
        "unknown_seconds": report.unknown,
        "problem": report.problem,
        "operations": [line._asdict() | {"gap": line.gap} for line in report.lines],
    }


def as_text(report: Report) -> str:
    """Return the report as a table for the screen: the lines, each phase with its sum, and the step."""
    rows: list[list[str]] = []
    for phase, members in groupby(report.lines, key=lambda line: line.phase):
        listed = [line._replace(phase="") for line in members]
        listed[0] = listed[0]._replace(phase=phase)
        rows += [_cells(line, report.step) for line in [*listed, _sum("all", listed)]]
        rows.append([])
    for name, seconds in (("of no operation", report.unknown), ("nothing runs", report.idle)):
        if seconds > 0:
            rows.append(["", name, "", f"{1e3 * seconds:.3f}", _percent(seconds, report.step)])
    rows.append(_cells(_sum("step", report.lines)._replace(seconds=report.step), report.step))
    return text.table(HEADINGS, rows, left=LEFT, optional=OPTIONAL)


def _sum(name: str, lines: Sequence[Line]) -> Line:
    """Return the sum of some lines under a name."""
    sums = {
        each: sum(getattr(line, each) for line in lines) for each in ("calls", "seconds", "flops", "bytes", "floor")
    }
    mixed = sum(line.mixed * line.seconds for line in lines)
    return Line("", name, **sums, bound="", mixed=mixed / sums["seconds"] if sums["seconds"] else 0.0)


HEADINGS = (
    "", "operation", "calls", "ms", "share", "GFLOP", "MB", "floor ms", "bound by", "achieved", "x floor", "mixed",
)  # fmt: skip
LEFT = frozenset({"", "operation", "bound by"})


# What goes where a terminal is too narrow, the first one first.
OPTIONAL = ("calls", "mixed", "achieved", "floor ms", "MB", "GFLOP", "share", "bound by")


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole > 0 else ""


def _cells(line: Line, step: float) -> list[str]:
    rate = ""
    if line.seconds > 0 and (line.bound == "memory" or not line.flops) and line.bytes:
        rate = f"{line.bytes / line.seconds / 1e9:,.1f} GB/s"
    elif line.seconds > 0 and line.flops:
        rate = f"{line.flops / line.seconds / 1e9:,.0f} GFLOP/s"
    return [
        line.phase,
        line.operation,
        f"{line.calls:g}" if line.calls else "",
        f"{1e3 * line.seconds:.3f}",
        _percent(line.seconds, step),
        f"{line.flops / 1e9:,.2f}" if line.flops else "",
        f"{line.bytes / 1e6:,.1f}" if line.bytes else "",
        f"{1e3 * line.floor:.3f}" if line.floor else "",
        line.bound,
        rate,
        f"{line.gap:.1f}" if line.gap else "",
        f"{100 * line.mixed:.0f}%" if line.mixed >= 0.005 else "",
    ]
