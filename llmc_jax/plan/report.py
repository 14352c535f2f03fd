"""The answer to `plan` as text: a section for each question. Leaves out how it is found (answer.py)."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from llmc_jax.base import text
from llmc_jax.base.numbers import Interval
from llmc_jax.kernels import Choice
from llmc_jax.machine.device import gib
from llmc_jax.plan.answer import Answer, Setting
from llmc_jax.plan.course import Course
from llmc_jax.plan.search import Largest
from llmc_jax.plan.time import OperationTime, StepTime

ENDS = ("low", "typical", "high")


class Table(NamedTuple):
    """Cells under their headings; `words` are the headings of columns that hold words, `optional` what may go."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str]
    optional: Sequence[str] = ()


Section = tuple[Table | None, Sequence[str]]  # a table, and lines below it


def as_text(found: Answer, *, operations: bool = False, width: int | None = None) -> str:
    """Return the report. operations: with a line for each operation. width: cells; None: the screen's."""
    sections: list[Section] = [
        (None, head(found)),
        (None, [summary(found)]),
        memory_section(found),
        step_section(found.step),
        *([operations_section(found.step)] if operations else []),
        course_section(found),
        *([largest_section(found)] if found.largest else []),
    ]
    shown = [_shown(*section, width) for section in sections]
    not_known = _shown(None, ["not known", *(f"- {line}" for line in found.not_known)], width)
    return "\n\n".join([*shown, not_known])


def _shown(table: Table | None, lines: Sequence[str], width: int | None) -> str:
    above = []
    if table is not None:
        above = [text.table(table.headings, table.rows, left=table.words, optional=table.optional, width=width)]
    return "\n".join([*above, *([""] if above and lines else []), *(text.wrapped(line, width) for line in lines)])


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


def quantities(heading: str, rows: Sequence[Quantity]) -> Table:
    """Return a table of the three values of each quantity that has some."""
    cells = [[name, *(shown(scale * value) for value in values)] for name, values, scale, shown in rows if values]
    return Table([heading, *ENDS], cells, [heading])


# ----- what is planned ------------------------------------------------------------------------------------------------


def head(found: Answer) -> list[str]:
    """Return the lines that say what is planned."""
    setting = found.setting
    count, each = (f"{setting.devices} x ", " on each device") if setting.devices > 1 else ("", "")
    parts = "1 micro-batch" if setting.micro_batches == 1 else f"{setting.micro_batches} micro-batches"
    return [
        f"{setting.model}, {setting.parameters:,} parameters, on {count}{found.place.label}",
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


def memory_section(found: Answer) -> Section:
    """Return whether it fits, and what takes how much."""
    memory, compiled = found.memory, found.memory.source == "compiled"
    parts = {**memory.kinds, "unexplained": memory.unexplained, "the program": memory.program}
    scale, unit = (2**30, "GiB") if memory.program >= 2**30 else (2**20, "MiB")
    available = memory.available
    rows = [
        [name, f"{size / scale:,.2f}", in_percent(100 * size / available) if available else ""]
        for name, size in parts.items()
        if size
    ]
    if compiled:
        rows[-1].append(f"{found.computed.program / scale:,.2f}")
    rows += [[part.name, f"{part.bytes / scale:,.2f}"] for part in memory.outside]
    if memory.outside:
        rows.append(["with all that", f"{memory.total / scale:,.2f}"])
    heading, of = f"fits? ({memory.source})", f"of {gib(available)}" if available else "share"
    notes = [COMPILED] if compiled else []
    notes += [f"{part.name}, an estimate: {part.source}." for part in memory.outside]
    return Table([heading, unit, of, "computed"], rows, [heading]), notes


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


def operations_section(step: StepTime) -> Section:
    """Return a line for each operation, and below them where the shares of the peaks come from."""
    headings = ("", "operation", "kernels", "GFLOP", "MB", "floor", "bound by", *ENDS, "of peak", "from")
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
    return Table(headings, rows, ("", "operation", "bound by", "from"), ("kernels", "MB", "GFLOP")), [
        legend, *(f"{letter}  {source}" for source, letter in sources.items())
    ]  # fmt: skip


def _source(each: OperationTime) -> str:
    on = each.efficiency.measured_on
    return f"measured on {on}: {each.efficiency.source}" if on else f"estimate: {each.efficiency.source}"


# ----- the whole run --------------------------------------------------------------------------------------------------


def course_section(found: Answer) -> Section:
    """Return how long a run takes and what it costs."""
    heading, course = "how long, how much?", found.course
    if course is None:
        return None, [
            f"{heading} Nothing says how many steps it makes: add -x, --tokens 10e9, -i with files that are here, or "
            "--preset."
        ]
    unit, name = unit_of(course.seconds.typical)
    rows: list[Quantity] = [
        (name, course.seconds, 1 / unit, three),
        ("GPU hours", course.gpu_hours if found.setting.devices > 1 else None, 1, three),
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
    rows, several = found.largest, found.setting.devices > 1
    headings = ["the largest -b"]
    for stage in sorted({row.zero_stage for row in rows}):
        headings += [f"-z {stage}: -b" if several else "-b", "tok/s"]
    cells = dict[str, list[str]]()
    for row in rows:
        shown = ["none", ""]
        if row.batch_size is not None and row.tokens_per_second is not None:
            shown = [str(row.batch_size), f"{amount(row.tokens_per_second.typical)}{'*' if row.fastest else ' '}"]
        cells.setdefault(_level(row), []).extend(shown)
    best = next((row for row in rows if row.fastest), None)
    if best is None:
        least = min((row.program for row in rows if row.program is not None), default=None)
        words = "" if least is None else f": the least that a step takes is {gib(least)}"
        note = f"Not even the smallest -b fits in any of them{words}."
    else:
        flags = f"-b {best.batch_size} {_level(best)}{f' -z {best.zero_stage}' if several else ''}"
        note = f"* the fastest of them: {flags} ({gib(best.program or 0)}, computed)"
    return Table(headings, [[level, *row] for level, row in cells.items()], headings[:1]), [note]


def _level(row: Largest) -> str:
    return f"--recompute-blocks {row.recompute_blocks}" if row.recompute_blocks else f"-r {row.recompute}"
