"""The answer to `plan` as text: a section for each question. Leaves out how it is found (answer.py)."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from llmc_jax.base import text
from llmc_jax.base.numbers import Interval
from llmc_jax.kernels import Choice
from llmc_jax.machine.device import gib
from llmc_jax.plan.answer import Answer, Setting
from llmc_jax.plan.course import Course
from llmc_jax.plan.search import Largest
from llmc_jax.plan.time import OperationTime, StepTime
from llmc_jax.plan.token import KERNEL, Token

Rows = list[list[str]]  # of a table, its headings first
WORDS, OPTIONAL = (
    ("operation", "bound by", "from"),
    ("kernels", "MB", "GFLOP"),
)  # columns of words beside the first; what may go
Section = tuple[Rows, Sequence[str]]  # a table, which may be empty, and lines below it


def as_text(found: Answer, *, operations: bool = False, width: int | None = None) -> str:
    """Return the report. operations: with a line for each operation. width: cells; None: the screen's."""
    sections: list[Section] = [
        ([], head(found)),
        ([], [summary(found)]),
        memory_section(found),
        step_section(found.step),
        *([operations_section(found.step)] if operations else []),
        course_section(found.course),
        *([tokens_section(found.tokens)] if found.tokens else []),
        *([largest_section(found)] if found.largest else []),
        ([], ["not known", *(f"- {line}" for line in found.not_known)]),
    ]
    return "\n\n".join(part for rows, lines in sections for part in _parts(rows, lines, width))


def _parts(rows: Rows, lines: Sequence[str], width: int | None) -> Iterator[str]:
    if rows:
        words = [rows[0][0], *(heading for heading in rows[0] if heading in WORDS)]
        yield text.table(rows[0], rows[1:], left=words, optional=OPTIONAL, width=width)
    if lines:
        yield "\n".join(text.wrapped(line, width) for line in lines)


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


def quantities(heading: str, rows: Sequence[Quantity]) -> Rows:
    """Return a table of the three values of each quantity that has some."""
    cells = [[name, *(shown(scale * value) for value in values)] for name, values, scale, shown in rows if values]
    return [[heading, *Interval._fields], *cells]


UNITS = ((259200, 86400, "days"), (3600, 3600, "hours"), (60, 60, "minutes"), (1, 1, "s"), (0, 1e-3, "ms"))


def unit_of(seconds: float) -> tuple[float, str]:
    """Return the unit that seconds are shown in: its own seconds, and its name."""
    return next((size, name) for least, size, name in UNITS if seconds >= least)


def spread(seconds: Interval) -> str:
    """Return an interval of seconds in short: 117 ms (104 to 134)."""
    size, name = unit_of(seconds.typical)
    low, typical, high = (three(value / size) for value in seconds)
    return f"{typical} {name} ({low} to {high})"


# ----- what is planned ------------------------------------------------------------------------------------------------


def head(found: Answer) -> list[str]:
    """Return the lines that say what is planned."""
    setting = found.setting
    count, each = (f"{setting.devices} x ", " on each device") if setting.devices > 1 else ("", "")
    parts = "1 micro-batch" if setting.micro_batches == 1 else f"{setting.micro_batches} micro-batches"
    return [
        f"{setting.model}, {setting.parameters:,} parameters, on {count}{found.place.machine.kind}",
        f"{flags_of(setting)}: {setting.tokens:,} tokens an update, {parts}{each}",
        f"{precision_of(setting)}; {kernels_text(found.kernels)}",
    ]


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
    """Return what runs which operations: cudnn (attention); xla (adamw, layernorm)."""
    by: dict[str, list[str]] = {}
    for choice in choices:
        by.setdefault(choice.by, []).append(choice.operation)
    return "kernels: " + "; ".join(f"{name} ({', '.join(operations)})" for name, operations in by.items())


def summary(found: Answer) -> str:
    """Return the answer in short."""
    step, course = found.step, found.course
    words = f"{verdict(found)} A step takes {spread(step.seconds)}: "
    words += f"{amount(step.tokens_per_second.typical)} tokens a second."
    if course is not None:
        cost = f" and costs {three(course.usd.typical)} USD" if course.usd else ""
        words += f" The run takes {spread(course.seconds)}{cost}."
    return words


def verdict(found: Answer) -> str:
    """Return whether it fits, in a sentence."""
    memory = found.memory
    takes = f"the program takes {gib(memory.program)}"
    if memory.available is None or memory.spare is None:
        return f"Whether it fits is not known: {takes}, and nothing says how much the device has."
    on_cpu, alone = found.place.machine.platform == "cpu", found.setting.devices == 1
    whose = ("this machine has" if alone else "each device has") if on_cpu else "JAX may take"
    may_take = f"the {gib(memory.available)} that {whose}"
    if memory.fits:
        return f"It fits: {takes} of {may_take}."
    if memory.spare < 0:
        return f"It does not fit: {takes}, {gib(-memory.spare)} more than {may_take}."
    return f"It does not fit: beside {may_take} there is no room for {gib(memory.beside)} more."


# ----- memory ---------------------------------------------------------------------------------------------------------

COMPILED = "The program is the compiler's; what each kind takes of it is computed, and what differs is unexplained."


def memory_section(found: Answer) -> Section:
    """Return whether it fits, and what takes how much."""
    memory, available = found.memory, found.memory.available
    parts = {**memory.kinds, "unexplained": memory.unexplained, "the program": memory.program}
    rows = [[f"fits? ({memory.source})", "GiB", f"of {gib(available)}" if available else "share"]]
    rows += [
        [name, f"{size / 2**30:,.2f}", in_percent(100 * size / available) if available else ""]
        for name, size in parts.items()
        if size
    ]
    rows += [[part.name, f"{part.bytes / 2**30:,.2f}", ""] for part in memory.outside]
    rows.append(["with all that", f"{memory.total / 2**30:,.2f}", ""])
    notes = [COMPILED] if memory.source == "compiled" else []
    return rows, [*notes, *(f"{part.name}, an estimate: {part.source}." for part in memory.outside)]


# ----- time -----------------------------------------------------------------------------------------------------------

BOUNDS = {
    "products": "Most of it is matrix products.",
    "memory": "Most of it waits for the device's memory.",
    "launches": "Most of it goes to kernels too small to keep the device busy, and the gaps between them.",
    "network": "Most of it waits for other devices.",
}


def step_section(step: StepTime) -> Section:
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
    peaks = "the peaks" if step.peak else "the best rates that were measured here"
    bound = f"{BOUNDS[step.bound]} At {peaks} it would be {three(1e3 * step.floor)} ms of computing."
    return quantities(f"how fast? ({by})", rows), [bound]


def tokens_section(tokens: Mapping[str, Token]) -> Section:
    """Return how long a generated token takes."""
    rows = [(f"a token, --kernels {name}, ms", each.seconds, 1e3, three) for name, each in tokens.items()]
    counts = " or ".join(f"{each.kernels:,}" for each in tokens.values())
    read = next(iter(tokens.values())).bytes / 1e6
    return quantities("how fast does it generate? (estimated)", rows), [
        f"One text at the model's last position: {counts} kernels of a CUDA graph, {KERNEL.typical * 1e6:g} µs each, "
        f"and {read:,.0f} MB to read."
    ]


def operations_section(step: StepTime) -> Section:
    """Return a line for each operation, and below them where the shares of the peaks come from."""
    ends = Interval._fields
    headings = ["", "operation", "kernels", "GFLOP", "MB", "floor", "bound by", *ends, "of peak", "from"]
    sources = {each: chr(ord("a") + at) for at, each in enumerate(dict.fromkeys(map(_source, step.operations)))}
    phases = ["", *(each.phase for each in step.operations)]
    rows = [
        [
            "" if each.phase == before else each.phase, each.operation, f"{each.launches:,}",
            f"{each.flops / 1e9:,.1f}" if each.flops else "", f"{each.bytes / 1e6:,.0f}" if each.bytes else "",
            in_ms(each.floor) if each.floor else "", each.bound, *map(in_ms, each.seconds),
            f"{each.efficiency.typical:.2f}", sources[_source(each)],
        ]
        for each, before in zip(step.operations, phases, strict=False)
    ]  # fmt: skip
    legend = "low, typical and high in ms, without the gaps between kernels; of peak from:"
    return [headings, *rows], [legend, *(f"{letter}  {source}" for source, letter in sources.items())]


def _source(each: OperationTime) -> str:
    on = each.efficiency.measured_on
    return f"measured on {on}: {each.efficiency.source}" if on else f"estimate: {each.efficiency.source}"


# ----- the whole run --------------------------------------------------------------------------------------------------


def course_section(course: Course | None) -> Section:
    """Return how long a run takes and what it costs."""
    heading = "how long, how much?"
    if course is None:
        return [], [
            f"{heading} Nothing says how many steps it makes: add -x, --tokens 10e9, -i with files that are here, or "
            "--preset."
        ]
    unit, name = unit_of(course.seconds.typical)
    rows: list[Quantity] = [
        (name, course.seconds, 1 / unit, three),
        ("GPU hours", course.gpu_hours, 1, three),
        ("USD", course.usd, 1, three),
    ]
    return quantities(heading, rows), list(_course_lines(course))


def _course_lines(course: Course) -> Iterator[str]:
    length, price = course.length, course.price
    epochs = "" if length.epochs is None else f", {three(length.epochs)} epochs"
    yield f"{length.steps:,} steps, {amount(length.tokens)} tokens{epochs}; by {length.note}."
    if course.validations:
        yield f"Of that {course.validations:,} validations take {spread(course.validating)}."
    if price is not None:
        when = f" ({price.provider}, {price.date}; --price takes another)" if price.date else ""
        yield f"An hour of one GPU costs {price.usd:g} USD{when}."
    yield f"Left out: {', '.join(course.left_out)}."


# ----- the largest -b -------------------------------------------------------------------------------------------------


def largest_section(found: Answer) -> Section:
    """Return the largest -b of each way of computing, those of one -z beside each other, and the fastest."""
    several = found.setting.devices > 1
    headings, cells = ["the largest -b"], dict[str, list[str]]()
    for stage in sorted({row.zero_stage for row in found.largest}):
        headings += [f"-z {stage}: -b" if several else "-b", "tok/s"]
    for row in found.largest:
        rate = row.tokens_per_second
        shown = f"{amount(rate.typical)}{'*' if row.fastest else ' '}" if rate else ""
        cells.setdefault(_level(row), []).extend([str(row.batch_size or "none"), shown])
    note = "Not even the smallest -b fits in any of them."
    for best in (row for row in found.largest if row.fastest):
        flags = f"-b {best.batch_size} {_level(best)}{f' -z {best.zero_stage}' if several else ''}"
        note = f"* the fastest of them: {flags} ({gib(best.program or 0)}, computed)"
    return [headings, *([level, *row] for level, row in cells.items())], [note]


def _level(row: Largest) -> str:
    return f"--recompute-blocks {row.recompute_blocks}" if row.recompute_blocks else f"-r {row.recompute}"
