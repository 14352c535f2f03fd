"""Neighbours, sweeps and reproductions as tables of text. Leaves out what stands in them (neighbours.py)."""

from collections.abc import Sequence

from llmc_jax.base import text
from llmc_jax.plan.interval import Interval
from llmc_jax.plan.neighbours import Reproduction, Row
from llmc_jax.plan.report import amount, three

HEADINGS = ("", "GPU", "GPUs", "-b", "-r", "-z", "fits", "GiB", "step ms", "tok/s", "hours", "kWh", "USD")
OPTIONAL = ("-z", "kWh", "GiB", "step ms")


def rows_table(rows: Sequence[Row], width: int | None = None) -> str:
    """Return rows as a table, what was asked marked, with what could not be and why below it."""
    cells = [_cells(row) for row in rows]
    lines = [text.table(HEADINGS, cells, left=("", "GPU", "fits"), optional=OPTIONAL, width=width)]
    notes = [f"{row.differs} {row.value}: {row.problem}" for row in rows if row.problem]
    notes.append(f"Typical values{_of_days(rows)}; --json has the low and the high ones too.")
    return "\n".join([*lines, "", *(text.wrapped(each, width) for each in notes)])


def _of_days(rows: Sequence[Row]) -> str:
    """Return from when the prices are that the rows were computed with."""
    runs = [row.figures.course for row in rows if row.figures is not None and row.figures.course is not None]
    days = sorted({run.price.date for run in runs if run.price is not None and run.price.date})
    return f", at prices of {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""


def _cells(row: Row) -> list[str]:
    what = f"{row.differs} {row.value}" if row.differs else "asked"
    begin = [what, row.gpu or "here", str(row.devices), str(row.batch_size), str(row.recompute), str(row.zero_stage)]
    found = row.figures
    if found is None:
        return [*begin, "cannot be"]
    run = found.course
    return [
        *begin, {True: "yes", False: "no", None: "?"}[found.fits], _in_gib(found.program),
        three(1e3 * found.step.typical), amount(found.tokens_per_second.typical),
        "" if run is None else three(run.seconds.typical / 3600), _typical(run and run.kwh),
        _typical(run and run.usd),
    ]  # fmt: skip


def _in_gib(size: int) -> str:
    return f"{size / 2**30:,.1f}" if size >= 2**30 else three(size / 2**30)


def _typical(value: Interval | None) -> str:
    return "" if value is None else three(value.typical)


def reproductions_table(found: Sequence[Reproduction], width: int | None = None) -> str:
    """Return llm.c's launches as a table: what it says beside what this program would take, and what says so."""
    headings = ("preset", "on", "steps", "step s", "llm.c's", "hours", "llm.c's ", "USD", "llm.c's  ", "-b", "GiB")
    table = text.table(headings, [_reproduction(each) for each in found], left=("preset", "on"), width=width)
    sources = dict.fromkeys(
        f"{each.published.preset} on {each.published.gpu}: {each.published.source}" for each in found
    )
    return "\n".join([table, "", "llm.c's figures:", *(text.wrapped(source, width) for source in sources)])


def _reproduction(each: Reproduction) -> list[str]:
    said, row = each.published, each.row
    begin = [said.preset, f"{said.devices} x {said.gpu}"]
    found = row.figures
    if found is None or found.course is None:
        return [*begin, "", "", f"{said.step:.3f}", "", three(said.hours)]
    run = found.course
    return [
        *begin, f"{run.length.steps:,}", f"{found.step.typical:.3f}", f"{said.step:.3f}",
        three(run.seconds.typical / 3600), three(said.hours), _typical(run.usd),
        "" if said.usd is None else three(said.usd), str(row.batch_size), f"{found.program / 2**30:,.1f}",
    ]  # fmt: skip
