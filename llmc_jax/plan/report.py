"""The answer to `plan` as text: a section for each question. Leaves out how it is found (answer.py)."""

from collections.abc import Callable, Iterator, Sequence

from llmc_jax.base import text
from llmc_jax.kernels import Choice
from llmc_jax.machine.device import gib
from llmc_jax.plan.answer import Answer, Setting
from llmc_jax.plan.course import Course
from llmc_jax.plan.interval import Interval
from llmc_jax.plan.search import Largest
from llmc_jax.plan.time import OperationTime, StepTime

Row = list[str]
ENDS = ("low", "typical", "high")


def as_text(found: Answer, *, operations: bool = False, more: str = "", width: int | None = None) -> str:
    """Return the report.

    operations: with a line for each operation. more: another section. width: cells; None: the screen's.
    """
    sections = [
        head(found, width),
        text.wrapped(summary(found), width),
        memory_section(found, width),
        step_section(found.step, width),
        *([operations_section(found.step, width)] if operations else []),
        course_section(found, width),
        largest_section(found, width),
        more,
        "\n".join(["not known", *(text.wrapped(f"- {line}", width) for line in found.not_known)]),
    ]
    return "\n\n".join(filter(None, sections))


# ----- numbers --------------------------------------------------------------------------------------------------------


def three(value: float) -> str:
    """Return a number with three digits that count, in full from a thousand on: 0.0123, 1.23, 12.3, 1,234."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.{2 if abs(value) < 10 else 1}f}"


def in_ms(seconds: float) -> str:
    """Return seconds as milliseconds, to the microsecond below one."""
    return three(1e3 * seconds) if seconds >= 1e-3 else f"{1e3 * seconds:.3f}"


def in_percent(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}%"  # without the sign of -0.0


def amount(value: float) -> str:
    """Return a large number in short: 3.12M, 512k."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{three(value / size)}{unit}"
    return three(value)


Quantity = tuple[str, Interval | None, float, Callable[[float], str]]  # its name, values, their scale, how one is shown


def quantities(heading: str, rows: Sequence[Quantity], width: int | None) -> str:
    """Return a table of the three values of each quantity that has some."""
    cells = [[name, *(shown(scale * value) for value in values)] for name, values, scale, shown in rows if values]
    return text.table([heading, *ENDS], cells, left=(heading,), width=width)


# ----- what is planned ------------------------------------------------------------------------------------------------


def head(found: Answer, width: int | None) -> str:
    """Return the lines that say what is planned."""
    setting, place = found.setting, found.place
    count, each = (f"{setting.devices} x ", " on each device") if setting.devices > 1 else ("", "")
    parts = "1 micro-batch" if setting.micro_batches == 1 else f"{setting.micro_batches} micro-batches"
    lines = [
        f"{setting.model}, {setting.parameters:,} parameters, on {count}{place.label}",
        f"{flags_of(setting)}: {setting.tokens:,} tokens an update, {parts}{each}",
        f"{precision_of(setting)}; {kernels_text(found.kernels)}",
    ]
    return "\n".join(text.wrapped(line, width) for line in lines)


def flags_of(setting: Setting) -> str:
    """Return the flags of train.py that a plan depends on most."""
    blocks = f" --recompute-blocks {setting.recompute_blocks}" if setting.recompute_blocks else ""
    stage = f" -z {setting.zero_stage}" if setting.devices > 1 else ""
    auto = " (auto)" if setting.auto_batch else ""
    return f"-b {setting.batch_size}{auto} -t {setting.sequence_length} -r {setting.recompute}{blocks}{stage}"


def precision_of(setting: Setting) -> str:
    """Return what the model computes in."""
    if setting.dtype == "fp32":
        return "fp32, products in TF32" if setting.products == "tf32" else "fp32"
    return f"{setting.dtype}, {'fp32' if setting.master_weights else 'no'} master weights"


def kernels_text(choices: Sequence[Choice]) -> str:
    """Return what runs which operations: attention by cudnn, adamw and layernorm by xla."""
    by: dict[str, list[str]] = {}
    for choice in choices:
        by.setdefault(choice.by, []).append(choice.operation)
    if len(by) == 1:
        return f"all kernels: {next(iter(by))}"
    return "kernels: " + "; ".join(f"{name} ({', '.join(operations)})" for name, operations in by.items())


def summary(found: Answer) -> str:
    """Return the answer in short."""
    step, course = found.step, found.course
    words = [verdict(found)]
    words += [f"A step takes {spread(step.seconds)}: {amount(step.tokens_per_second.typical)} tokens a second."]
    if course is not None:
        cost = f" and costs {three(course.usd.typical)} USD" if course.usd else ""
        words.append(f"The run takes {spread(course.seconds)}{cost}.")
    return " ".join(words)


def verdict(found: Answer) -> str:
    """Return whether it fits, in a sentence."""
    memory = found.memory
    takes = f"the program takes {gib(memory.program)}"
    if memory.available is None or memory.spare is None:
        return f"Whether it fits is not known: {takes}, and nothing says how much the device has."
    on_cpu, alone = found.place.machine.platform == "cpu", found.setting.devices == 1
    whose = ("this machine has" if alone else "each device has") if on_cpu else "JAX may take"
    if memory.fits:
        return f"It fits: {takes} of the {gib(memory.available)} that {whose}."
    if memory.spare < 0:
        return f"It does not fit: {takes}, {gib(-memory.spare)} more than the {gib(memory.available)} that {whose}."
    return f"It does not fit: beside JAX's {gib(memory.available)} there is no room for {gib(memory.beside)} more."


UNITS = ((259200, 86400, "days"), (3600, 3600, "hours"), (60, 60, "minutes"), (1, 1, "s"), (0, 1e-3, "ms"))


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit that seconds are shown in: its own seconds, and its name."""
    return next((size, name) for least, size, name in UNITS if seconds >= least)


def spread(seconds: Interval) -> str:
    """Return an interval of seconds in short: 117 ms (104 to 134)."""
    size, name = unit_of(seconds.typical)
    low, typical, high = (three(value / size) for value in seconds)
    return f"{typical} {name} ({low} to {high})"


# ----- memory ---------------------------------------------------------------------------------------------------------

COMPILED = "The program is the compiler's; what each kind takes of it is computed, and what differs is unexplained."


def memory_section(found: Answer, width: int | None) -> str:
    """Return whether it fits, and what takes how much."""
    memory, compiled = found.memory, found.memory.source == "compiled"
    parts = {**memory.kinds, "unexplained": memory.unexplained, "the program": memory.program}
    scale, unit = (2**30, "GiB") if memory.program >= 2**30 else (2**20, "MiB")

    def shown(size: int) -> str:
        return f"{size / scale:,.2f}"

    rows = [
        [name, shown(size), in_percent(100 * size / memory.available) if memory.available else ""]
        for name, size in parts.items()
        if size
    ]
    if compiled:
        rows[-1].append(shown(found.computed.program))
    rows += [[part.name, shown(part.bytes)] for part in memory.outside]
    if memory.outside:
        rows.append(["with all that", shown(memory.total)])
    heading, of = f"fits? ({memory.source})", f"of {gib(memory.available)}" if memory.available else "share"
    table = text.table([heading, unit, of, "computed"], rows, left=(heading,), width=width)
    notes = [COMPILED] if compiled else []
    notes += [f"{part.name}, an estimate: {part.source}." for part in memory.outside]
    return "\n".join([table, *([""] if notes else []), *(text.wrapped(note, width) for note in notes)])


# ----- time -----------------------------------------------------------------------------------------------------------

BOUNDS = {
    "products": "Most of it is matrix products.",
    "memory": "Most of it waits for the device's memory.",
    "launches": "Most of it goes to kernels too small to keep the device busy, and the gaps between them.",
    "network": "Most of it waits for other devices.",
}


def step_section(step: StepTime, width: int | None) -> str:
    """Return how long a step takes, and what it waits for."""
    by = "by measured rates" if step.measured else "estimated"
    if step.rates_of and step.peak:
        by = f"by the rates of one {step.rates_of}"
    rows: list[Quantity] = [
        ("a step, ms", step.seconds, 1e3, three),
        ("tokens a second", step.tokens_per_second, 1, amount),
        ("MFU (llm.c)", step.mfu("llm.c"), 100, in_percent),
        ("MFU (PaLM)", step.mfu("palm"), 100, in_percent),
        ("of a step: network, ms", step.network if step.exchanges else None, 1e3, three),
        ("of a step: gaps, ms", step.gaps if step.launches else None, 1e3, three),
    ]
    table = quantities(f"how fast? ({by})", rows, width)
    peaks = "the peaks" if step.peak else "the best rates that were measured here"
    bound = f"{BOUNDS[step.bound]} At {peaks} it would be {three(1e3 * step.floor)} ms of computing."
    return f"{table}\n\n{text.wrapped(bound, width)}"


def operations_section(step: StepTime, width: int | None) -> str:
    """Return a line for each operation, and below them where the shares of the peaks come from."""
    headings = ("", "operation", "kernels", "GFLOP", "MB", "floor", "bound by", *ENDS, "of peak", "from")
    sources = {each: chr(ord("a") + at) for at, each in enumerate(dict.fromkeys(map(_source, step.operations)))}
    rows = [_operation_row(each, sources[_source(each)]) for each in step.operations]
    phases = [each.phase for each in step.operations]
    for row, phase, before in zip(rows, phases, ["", *phases], strict=False):
        row[0] = "" if phase == before else phase
    table = text.table(
        headings, rows, left=("", "operation", "bound by", "from"), width=width, optional=("kernels", "MB", "GFLOP")
    )
    legend = [text.wrapped(f"{letter}  {source}", width) for source, letter in sources.items()]
    return "\n".join(
        [table, "", "low, typical and high in ms, without the gaps between kernels; of peak from:", *legend]
    )


def _source(each: OperationTime) -> str:
    on = each.efficiency.measured_on
    return f"measured on {on}: {each.efficiency.source}" if on else f"estimate: {each.efficiency.source}"


def _operation_row(each: OperationTime, letter: str) -> Row:
    return [
        each.phase, each.operation, f"{each.launches:,}", f"{each.flops / 1e9:,.1f}" if each.flops else "",
        f"{each.bytes / 1e6:,.0f}" if each.bytes else "", in_ms(each.floor) if each.floor else "", each.bound,
        *map(in_ms, each.seconds), f"{each.efficiency.typical:.2f}", letter,
    ]  # fmt: skip


# ----- the whole run --------------------------------------------------------------------------------------------------


def course_section(found: Answer, width: int | None) -> str:
    """Return how long a run takes and what it costs."""
    heading, course = "how long, how much?", found.course
    if course is None:
        return text.wrapped(
            f"{heading} Nothing says how many steps it makes: add -x, --tokens 10e9, -i with files that are here, or "
            "--preset.",
            width,
        )
    unit, name = unit_of(course.seconds.typical)
    rows: list[Quantity] = [
        (name, course.seconds, 1 / unit, three),
        ("GPU hours", course.gpu_hours if found.setting.devices > 1 else None, 1, three),
        ("kWh", course.kwh, 1, three),
        ("USD", course.usd, 1, three),
    ]
    return "\n".join(
        [quantities(heading, rows, width), "", *(text.wrapped(line, width) for line in _course_lines(course))]
    )


def _course_lines(course: Course) -> Iterator[str]:
    length, price = course.length, course.price
    epochs = "" if length.epochs is None else f", {three(length.epochs)} epochs"
    yield f"{length.steps:,} steps, {amount(length.tokens)} tokens{epochs}; by {length.note}."
    if course.validations:
        yield f"Of that {course.validations:,} validations take {spread(course.validating)}."
    if price is not None:
        when = f" ({price.provider}, {price.date}; --price takes another)" if price.date else ""
        yield f"An hour of one GPU costs {price.usd:g} USD{when}."
    if course.kwh is not None:
        yield "Energy: of the board's power limit, with a share for the host and the data centre (docs/plan.md)."
    yield f"Left out: {', '.join(course.left_out)}."


# ----- the largest -b -------------------------------------------------------------------------------------------------


def largest_section(found: Answer, width: int | None) -> str:
    """Return the largest -b of each way of computing, those of one -z beside each other."""
    rows, setting = found.largest, found.setting
    if not rows:
        return ""
    stages = sorted({row.zero_stage for row in rows})
    heading = "the largest -b"
    headings, cells = [heading], dict[tuple[int, int], Row]()
    for stage in stages:
        headings += [f"-z {stage}: -b" if setting.devices > 1 else "-b", "tok/s"]
    for row in rows:
        cells.setdefault((row.recompute, row.recompute_blocks), []).extend(_largest_cells(row))
    table = text.table(
        headings, [[_level_text(*level), *row] for level, row in cells.items()], left=(heading,), width=width
    )
    return f"{table}\n\n{text.wrapped(_fastest_text(rows, setting), width)}"


def _level_text(recompute: int, blocks: int) -> str:
    return f"--recompute-blocks {blocks}" if blocks else f"-r {recompute}"


def _largest_cells(row: Largest) -> Row:
    if row.batch_size is None or row.tokens_per_second is None:
        return ["none", ""]
    return [str(row.batch_size), f"{amount(row.tokens_per_second.typical)}{'*' if row.fastest else ' '}"]


def _fastest_text(rows: Sequence[Largest], setting: Setting) -> str:
    best = next((row for row in rows if row.fastest), None)
    if best is None:
        least = min((row.program for row in rows if row.program is not None), default=None)
        words = "" if least is None else f": the least that a step takes is {gib(least)}"
        return f"Not even the smallest -b fits in any of them{words}."
    stage = f" -z {best.zero_stage}" if setting.devices > 1 else ""
    level = _level_text(best.recompute, best.recompute_blocks)
    return f"* the fastest of them: -b {best.batch_size} {level}{stage} ({gib(best.program or 0)}, computed)"
