"""Traces of jax.profiler, read back: when each instruction of the program ran.

A trace folder opens in Perfetto and in TensorBoard's profiler (docs/profiling.md). On a CPU each instruction that XLA
runs is an event with its name in the program; on a GPU each kernel is, and names the instruction that launched it.
Leaves out how steps are recorded (run/record.py) and what the instructions mean (plan/program.py).
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.run.record import STEP

PROGRAM = "program.hlo.txt"  # `compiled.as_text()` of the step, kept in the folder of its trace


class Span(NamedTuple):
    """A stretch of time in which one thread or stream worked on one instruction; nanoseconds of the trace's clock."""

    name: str  # the instruction's, in the program
    start: float
    end: float
    lane: str  # the thread or the stream
    begins: bool = True  # the instruction's first: a CPU's threads share the work of one


class Trace(NamedTuple):
    """What a trace says about one program."""

    spans: tuple[Span, ...]  # in the order of their starts
    steps: tuple[tuple[float, float], ...]  # start and end of each step on the host


# ----- reading ------------------------------------------------------------------------------------------------------


def read_trace(folder: Path, program: str, whole: Container[str] = ()) -> Trace:
    """Return what the newest trace in a folder says about a program. Arguments as in `trace_of`."""
    import jax

    newest = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return trace_of(jax.profiler.ProfileData.from_serialized_xspace(newest.read_bytes()), program, whole)


def trace_of(data: Any, program: str, whole: Container[str] = ()) -> Trace:
    """Return what jax.profiler.ProfileData has read about a program.

    A GPU's kernels count where there are any, since the host then only launches them.

    program: its name, such as `jit_step_fn`. whole: the instructions (of a CPU) whose events last until all their work
    is done; the threads that help with it go on to help others under the same number, so they do not count.
    """
    host: list[Span] = []
    device: list[Span] = []
    steps: list[tuple[float, float]] = []
    for plane in data.planes:
        if plane.name.startswith("/device:"):
            for line in plane.lines:
                if line.name.startswith("Stream"):  # other lines repeat these in summary
                    device += _spans(line, program)
        elif plane.name.startswith("/host:CPU"):
            found, marked = _host_events(plane, program, whole)
            host += found
            steps += marked
    spans = device or host
    return Trace(tuple(sorted(spans, key=lambda span: (span.start, -span.end))), tuple(sorted(steps)))


def _spans(line: Any, program: str) -> Iterator[Span]:
    for event in line.events:
        if name := _instruction(event, program):
            yield Span(name, event.start_ns, event.start_ns + event.duration_ns, line.name)


def _instruction(event: Any, program: str) -> str | None:
    """Return which of the program's instructions an event is about."""
    stats = dict(event.stats)
    return str(stats["hlo_op"]) if stats.get("hlo_op") and stats.get("hlo_module", program) == program else None


# What XLA's thread pool writes into a trace: a task handed in, and its begin and end on the thread that takes it.
HANDED_IN = "ThreadpoolListener::Record"
TASK, TASK_DONE = "ThreadpoolListener::StartRegion", "ThreadpoolListener::StopRegion"
SCHEDULER = "ThunkExecutor::Execute"
OTHERS = ("end: ", "Threadpool", "Thunk", "SlinkyThreadPool")

Owner = str | int | None  # an instruction by its name, a task by its number, or nobody
Piece = tuple[Owner, float, float, str, bool]  # a Span, but for whose it is


def _host_events(plane: Any, program: str, whole: Container[str]) -> tuple[list[Span], list[tuple[float, float]]]:
    """Return what XLA's threads worked on, and the steps.

    Most instructions' events are over when their work has been handed to the threads. Some of these may get to their
    part much later, so the parts are found by the number that each carries from where it was handed in.
    """
    posted_by: dict[int, Owner] = {}
    pieces: list[Piece] = []
    steps: list[tuple[float, float]] = []
    for line in plane.lines:
        pieces += _lane(line, program, posted_by, steps)

    def instruction(owner: Owner) -> str | None:
        for _ in range(1000):  # a longer chain would be a circle
            if not isinstance(owner, int):
                return owner
            owner = posted_by.get(owner)
        return None

    spans = [
        Span(name, start, end, lane, begins)
        for owner, start, end, lane, begins in pieces
        if (name := instruction(owner)) is not None and not (isinstance(owner, int) and name in whole)
    ]
    return spans, steps


def _lane(line: Any, program: str, posted_by: dict[int, Owner], steps: list[tuple[float, float]]) -> list[Piece]:
    """Return one thread's time, cut where the innermost of what it is doing changes; notes who handed in which task."""
    pieces: list[Piece] = []
    open_events: list[tuple[float, Owner, bool]] = []  # (end, whose, not cut yet), the innermost last
    task: Owner = None
    now = 0.0

    def advance(to: float) -> None:
        """Account for the time up to `to`."""
        nonlocal now
        while open_events and open_events[-1][0] <= to:
            end, owner, fresh = open_events.pop()
            keep(owner, now, end, fresh)
            now = max(now, end)
        if open_events:
            end, owner, fresh = open_events[-1]
            if to > now:
                keep(owner, now, to, fresh)
                open_events[-1] = (end, owner, False)
        else:
            keep(task, now, to, False)
        now = to

    def keep(owner: Owner, start: float, end: float, begins: bool) -> None:
        if owner is not None and (end > start or begins):
            pieces.append((owner, start, end, line.name, begins))

    for event in sorted(line.events, key=lambda event: (event.start_ns, -event.duration_ns)):
        name, start, end = event.name, event.start_ns, event.start_ns + event.duration_ns
        if name == STEP:
            steps.append((start, end))
        elif name == HANDED_IN:
            advance(start)
            posted_by[dict(event.stats)["_p"]] = open_events[-1][1] if open_events else task
        elif name == TASK:
            advance(start)
            task = dict(event.stats)["_c"]
        elif name == TASK_DONE:
            advance(start)
            task = None
        elif name == SCHEDULER:
            advance(start)
            open_events.append((end, None, False))
        elif not name.startswith(OTHERS) and (ran := _instruction(event, program)):
            advance(start)
            open_events.append((end, ran, True))
    advance(max((end for end, *_ in open_events), default=now))
    return pieces


# ----- whose time it was --------------------------------------------------------------------------------------------


class Use(NamedTuple):
    """One instruction's part in the time of a trace."""

    seconds: float  # each moment counted once: what runs at once shares it
    calls: int


def shared_time(spans: Sequence[Span], containers: Iterable[str] = ()) -> dict[str, Use]:
    """Return how long each instruction ran, such that the sum is the time in which anything ran.

    What ran at the same moment, on several threads or streams, gets equal parts of it. Containers (loops) get what none
    of the instructions inside them takes.
    """
    outer = frozenset(containers)
    moments: list[tuple[float, int, int]] = []
    calls: dict[str, int] = defaultdict(int)
    for index, span in enumerate(spans):
        calls[span.name] += span.begins
        if span.end > span.start:
            moments += [(span.start, 1, index), (span.end, 0, index)]
    seconds: dict[str, float] = defaultdict(float)
    inner_active: set[int] = set()
    outer_active: set[int] = set()
    last = 0.0
    for moment, starts, index in sorted(moments):
        active = inner_active or outer_active
        for each in active:
            seconds[spans[each].name] += (moment - last) / len(active)
        last = moment
        group = outer_active if spans[index].name in outer else inner_active
        if starts:
            group.add(index)
        else:
            group.discard(index)
    return {name: Use(seconds[name] * 1e-9, count) for name, count in calls.items()}
