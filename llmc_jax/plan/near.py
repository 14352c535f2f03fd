"""Neighbours, sweeps and reproductions as tables of text, and a sweep as a picture.

In the picture speed, memory and cost stand beside each other, with the ends of each estimate. matplotlib is imported
when it is drawn, without pyplot. Leaves out what stands in the rows (neighbours.py).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base import text
from llmc_jax.base.errors import InputError
from llmc_jax.base.pictures import PALETTE, drawable, save_figure
from llmc_jax.plan.interval import Interval, certain
from llmc_jax.plan.neighbours import Figures, Reproduction, Row
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


# ----- a sweep as a picture -------------------------------------------------------------------------------------------

FITS, TOO_LARGE, LIMIT = PALETTE[0], PALETTE[1], PALETTE[2]


def title_of(over: str, model: str, gpu: str | None) -> str:
    """Return what all of a sweep has in common: its model and its GPU, without the one that it is over."""
    common = {"model": model, "gpu": gpu or "the device at hand"}
    return " on ".join(value for name, value in common.items() if name != over)


def draw_sweep(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the rows of a sweep into a PNG, SVG or PDF. Raises InputError where none of them can be."""
    from matplotlib.figure import Figure

    drawn = [row for row in rows if row.figures is not None]
    if not drawn:
        raise InputError(f"--picture {path}: none of the sweep can run; {rows[0].problem}")
    panels = [panel for panel in PANELS if any(panel.value(row.figures) for row in drawn if row.figures)]
    figure = Figure(figsize=(max(7.5, 3.4 * len(panels) + 0.25 * len(drawn)), 4.4), dpi=110, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, drawn, panel)
    _legend(figure, drawn)
    figure.suptitle(drawable(title), fontsize=11, fontweight="bold")
    save_figure(figure, path)


class Panel(NamedTuple):
    """One of the pictures that stand beside each other."""

    heading: str
    value: Callable[[Figures], Interval | None]
    scale: float
    limit: Callable[[Figures], int | None] = lambda each: None  # of the value


PANELS = (
    Panel("tokens a second, thousands", lambda each: each.tokens_per_second, 1e-3),
    Panel("memory of a step, GiB", lambda each: certain(each.program), 2**-30, lambda each: each.available),
    Panel("the run, hours", lambda each: each.course and each.course.seconds, 1 / 3600),
    Panel("the run, USD", lambda each: each.course and each.course.usd, 1),
)


def _draw_panel(axes: Any, rows: Sequence[Row], panel: Panel) -> None:
    for at, row in enumerate(rows):
        assert row.figures is not None
        found, limit = panel.value(row.figures), panel.limit(row.figures)
        if found is None:
            continue
        color = TOO_LARGE if row.figures.fits is False else FITS
        low, typical, high = found.times(panel.scale)
        axes.bar(at, typical, width=0.62, color=color)
        if low < high:
            ends = [[typical - low], [high - typical]]
            axes.errorbar(at, typical, yerr=ends, color=LIMIT, capsize=3.5, lw=1.1)
        if limit is not None:
            axes.hlines(panel.scale * limit, at - 0.42, at + 0.42, color=LIMIT, lw=1.6)
    axes.set_title(panel.heading, fontsize=10)
    tilted = max(len(row.value) for row in rows) * len(rows) > 24
    axes.set_xticks(
        range(len(rows)), [drawable(row.value) for row in rows], rotation=45 if tilted else 0,
        ha="right" if tilted else "center", fontsize=8.5,
    )  # fmt: skip
    axes.set_xlabel(rows[0].differs)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=FITS, label="typical")]
    if any(row.figures and row.figures.fits is False for row in rows):
        handles.append(Patch(color=TOO_LARGE, label="does not fit"))
    handles.append(Line2D([], [], color=LIMIT, marker="|", ms=9, lw=0, label="from low to high"))
    handles.append(Line2D([], [], color=LIMIT, lw=1.6, label="memory that JAX may take"))
    figure.legend(handles=handles, loc="outside lower center", ncol=len(handles), frameon=False, fontsize=8.5)
