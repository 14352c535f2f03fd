"""Traces of jax.profiler: recording some steps, and reading back when each instruction of the program ran.

A trace folder opens in Perfetto and in TensorBoard's profiler (docs/profiling.md). On a CPU each instruction that XLA
runs is an event with its name in the program; on a GPU each kernel is, and names the instruction that launched it.
Leaves out what the instructions mean (program.py).
"""

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.errors import InputError
from llmc_jax.files import reason

STEP = "train"  # the name of a step's annotation, which TensorBoard's profiler counts steps by


class Span(NamedTuple):
    """One run of one instruction, in nanoseconds of the trace's clock."""

    name: str  # the instruction's, in the program
    start: float
    end: float
    lane: str  # the thread or the stream


class Trace(NamedTuple):
    """What a trace says about one program."""

    spans: tuple[Span, ...]  # in the order of their starts
    steps: tuple[tuple[float, float], ...]  # start and end of each step on the host
    on_device: bool  # the spans are a GPU's


# ----- recording ----------------------------------------------------------------------------------------------------


def parse_slice(text: str) -> tuple[int, int]:
    """`START:STOP` as two step numbers; raises InputError if it is none, or empty."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isascii() and start.isdigit() and stop.isascii() and stop.isdigit()):
        raise InputError(f"--profile {text}: must be START:STOP, two step numbers, as in 10:15")
    if int(start) >= int(stop):
        raise InputError(f"--profile {text}: no step is in it; STOP must be above START, as in 10:15")
    return int(start), int(stop)


def check_writable(folder: Path) -> None:
    """Makes the folder and raises InputError if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{folder}: a trace cannot be written there ({reason(error)}); name another folder") from error


def start_recording(folder: Path) -> None:
    """Starts the profiler. Python's own calls are left out: they are many, and cost time."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(str(folder), profiler_options=options)


@contextmanager
def recorded_step(number: int) -> Iterator[None]:
    """Marks one step in the trace. What it computes must be complete when the block ends."""
    import jax

    with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
        yield


@contextmanager
def slice_trace(
    folder: Path, start: int, stop: int, done: Callable[[], None] = lambda: None
) -> Iterator[Callable[[int], None]]:
    """Records steps start to stop - 1 of a loop into a folder: call what it yields with each step's number before it.

        with slice_trace(folder, 10, 15) as tick:
            for step in range(steps):
                tick(step)
                ...  # the step, complete before the next tick

    done: called once, when the recording has been written. A loop that ends early writes what it has; one that never
    reaches `start` writes nothing. Raises InputError, at once, if the folder cannot be written.
    """
    check_writable(folder)
    import jax

    recording = contextlib.ExitStack()  # open while the profiler runs
    annotation = contextlib.ExitStack()  # open during a step
    active = False

    def finish() -> None:
        nonlocal active
        if active:
            active = False
            recording.close()
            done()

    def tick(step: int) -> None:
        nonlocal active
        annotation.close()
        if start <= step < stop:
            if not active:
                start_recording(folder)
                recording.callback(jax.profiler.stop_trace)
                active = True
            annotation.enter_context(recorded_step(step))
        else:
            finish()

    try:
        yield tick
    finally:
        annotation.close()
        finish()


# ----- reading ------------------------------------------------------------------------------------------------------


def newest_trace(folder: Path) -> Path:
    """The latest .xplane.pb below a trace folder; raises InputError if there is none."""
    found = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(f"{folder}: there is no trace (plugins/profile/*/*.xplane.pb); record one with --trace {folder}")
    return found[-1]


def read_trace(path: Path, program: str) -> Trace:
    """The runs of a program's instructions in an .xplane.pb file. program: its name, such as `jit_step_fn`."""
    import jax

    return trace_of(jax.profiler.ProfileData.from_serialized_xspace(path.read_bytes()), program)


def trace_of(data: Any, program: str) -> Trace:
    """The runs of a program's instructions in what jax.profiler.ProfileData has read.

    A GPU's kernels count where there are any, since the host then only launches them.
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
            found, marked = _host_events(plane, program)
            host += found
            steps += marked
    spans = device or host
    return Trace(tuple(sorted(spans, key=lambda span: (span.start, -span.end))), tuple(sorted(steps)), bool(device))


def _spans(line: Any, program: str) -> Iterator[Span]:
    for event in line.events:
        stats = dict(event.stats)
        if stats.get("hlo_op") and stats.get("hlo_module", program) == program:
            yield Span(str(stats["hlo_op"]), event.start_ns, event.start_ns + event.duration_ns, line.name)


def _host_events(plane: Any, program: str) -> tuple[list[Span], list[tuple[float, float]]]:
    """Instructions that XLA ran on the CPU, and the steps.

    An instruction may go on after its event ends, on other threads; its end is then an event `end: name` of its own,
    which the same number marks.
    """
    open_spans: dict[int, Span] = {}
    ends: dict[int, float] = {}
    found: list[Span] = []
    steps: list[tuple[float, float]] = []
    for line in plane.lines:
        for event in line.events:
            name = event.name
            if name == STEP:
                steps.append((event.start_ns, event.start_ns + event.duration_ns))
            elif name.startswith("end: "):
                number = dict(event.stats).get("_c")
                if number is not None:
                    ends[number] = event.start_ns
            elif not name.startswith(("Threadpool", "Thunk")):
                stats = dict(event.stats)
                if stats.get("hlo_op") and stats.get("hlo_module", program) == program:
                    span = Span(str(stats["hlo_op"]), event.start_ns, event.start_ns + event.duration_ns, line.name)
                    if stats.get("_p") is None:
                        found.append(span)
                    else:
                        open_spans[stats["_p"]] = span
    found += [span._replace(end=max(span.end, ends.get(number, 0.0))) for number, span in open_spans.items()]
    return found, steps


# ----- whose time it was --------------------------------------------------------------------------------------------


class Use(NamedTuple):
    """One instruction's part in the time of a trace."""

    seconds: float  # each moment counted once: several instructions at once share it
    calls: int


def shared_time(spans: Sequence[Span], containers: Iterable[str] = ()) -> dict[str, Use]:
    """How long each instruction ran, such that the sum is the time in which anything ran.

    Instructions that ran at the same moment, on several threads or streams, get equal parts of it. Containers (loops)
    get what none of the instructions inside them takes.
    """
    outer = frozenset(containers)
    moments: list[tuple[float, int, int]] = []
    for index, span in enumerate(spans):
        moments += [(span.start, 1, index), (span.end, 0, index)]
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
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
            calls[spans[index].name] += 1
        else:
            group.discard(index)
    return {name: Use(seconds[name] * 1e-9, count) for name, count in calls.items()}
