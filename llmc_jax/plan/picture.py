"""A sweep as a picture: speed, memory and cost beside each other, with the ends of each estimate. Leaves out the table.

matplotlib is imported when a picture is drawn, without pyplot.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.pictures import PALETTE, drawable, save_figure
from llmc_jax.plan.interval import Interval, certain
from llmc_jax.plan.neighbours import Figures, Row

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
    limit: Callable[[Figures], int | None] = lambda each: None  # that the value may come to


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
