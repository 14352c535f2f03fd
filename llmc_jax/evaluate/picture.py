"""The picture of an evaluation: the loss by position in the context, and what models differ by.

matplotlib is imported when a picture is drawn, and used without pyplot.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.pictures import PALETTE, drawable, save_figure
from llmc_jax.evaluate.figures import Mean
from llmc_jax.evaluate.report import Subject
from llmc_jax.logs.picture import MARKS, plain_panel

ERRORS = 2  # standard errors to each side of a dot
SPREAD = 0.06  # octaves between the dots of two models, so that neither hides the other


def draw_positions(subjects: Sequence[Subject], titles: Sequence[str], names: Sequence[str], path: Path) -> None:
    """Draw the loss of each text by position into a PNG, SVG or PDF, a column of panels for each text.

    titles: of the texts. names: of the models. Thin lines are single positions; dots are positions 1, 2, 3-4, 5-8, …
    with 2 standard errors to each side. Of several models the lower panel has their differences to the first, where
    they read the same tokens.
    The file appears complete or not at all. Raises InputError.
    """
    from matplotlib.figure import Figure as Drawing

    rows = 2 if len(names) > 1 else 1
    size = (max(8.0, 4.8 * len(subjects)) + 0.4, 6.4 if rows == 2 else 4.6)
    drawing = Drawing(figsize=size, dpi=110, layout="constrained")
    ratios = [2.4, 1][:rows]
    panels = drawing.subplots(rows, len(subjects), sharex=True, squeeze=False, height_ratios=ratios)
    for column, subject in enumerate(subjects):
        _draw_losses(panels[0, column], subject, names, titles[column])
        if rows == 2:
            _draw_differences(panels[1, column], subject)
        panels[-1, column].set_xlabel("tokens that the model sees")
    panels[0, 0].set_ylabel("loss (nats per token)")
    if rows == 2:
        panels[1, 0].set_ylabel("difference to A")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    words = {"title": f"bars: {ERRORS} standard errors", "fontsize": 9, "title_fontsize": 8, "edgecolor": "none"}
    drawing.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 3), **words)
    save_figure(drawing, path)


def _draw_losses(axes: Any, subject: Subject, names: Sequence[str], title: str) -> None:
    for index, (result, name) in enumerate(zip(subject.results, names, strict=True)):
        color = PALETTE[index % len(PALETTE)]
        positions = result.positions
        assert positions is not None
        seen = np.flatnonzero(np.isfinite(positions.mean))
        axes.plot(seen + 1, positions.mean[seen], color=color, linewidth=0.7, alpha=0.45)
        means = {each.name: each.mean for each in result.bins}
        _draw_dots(axes, means, index, label=drawable(name))
    _show_octaves(axes, max(len(each.positions.counts) for each in subject.results if each.positions is not None))
    axes.set_title(drawable(title), fontsize=10, parse_math=False)


def _draw_differences(axes: Any, subject: Subject) -> None:
    axes.axhline(0, color=PALETTE[0], linewidth=0.8)
    apart = subject.differences([result.bins for result in subject.results])
    for index, means in enumerate(apart):
        if means:
            _draw_dots(axes, means, index)
    if not any(apart):
        axes.text(0.5, 0.6, "the models read other tokens", transform=axes.transAxes, ha="center", fontsize=9)
    plain_panel(axes)


def _draw_dots(axes: Any, means: Mapping[str, Mean], index: int, **more: Any) -> None:
    """Draw what a model has in bins of positions, by their names, with its errors."""
    places = np.array([_middle(name) for name in means]) * 2 ** (SPREAD * index)
    values, errors = np.array(list(means.values())).T
    axes.errorbar(
        places, values, ERRORS * np.nan_to_num(errors), color=PALETTE[index % len(PALETTE)], linewidth=1.4, capsize=2,
        fmt=f"{MARKS[index % len(MARKS)]}-", markersize=5, markeredgecolor="white", markeredgewidth=0.5, **more,
    )  # fmt: skip


def _middle(positions: str) -> float:
    """Return the geometric middle of a bin of positions, such as 5-8."""
    first, _, last = positions.partition("-")
    return float(np.sqrt(int(first) * int(last or first)))


def _show_octaves(axes: Any, positions: int) -> None:
    """Count positions in powers of two, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.8, positions * 1.25)
    plain_panel(axes)
