"""The picture of several logs: their losses over each other, and below what each differs from the first.

matplotlib is imported when a picture is drawn, and used without pyplot.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.pictures import PALETTE, short_names
from llmc_jax.compare.logs import TRAIN, Difference
from llmc_jax.logs.curves import Curve, finite
from llmc_jax.logs.picture import BASELINE, FAINT, LETTERS, draw_curves, draw_line, draw_steps, look_of, plain_panel
from llmc_jax.logs.reading import Log


def draw_logs(logs: Sequence[Log], found: Sequence[Difference], out_png: Path, names: Sequence[str] = ()) -> None:
    """Draw logs and their differences to the first into a PNG, which appears complete or not at all.

    names: of the logs, in place of their paths. Raises InputError if it cannot be written.
    """
    names = names or short_names([log.path for log in logs])
    named = [log._replace(path=name) for log, name in zip(logs, names, strict=True)]
    draw_curves(named, out_png, below=partial(_draw_differences, found=found))


def _draw_differences(axes: Any, found: Sequence[Difference]) -> None:
    """Draw averaged differences of training, single ones of validation; the tolerance as a band, partings as lines."""
    axes.set_ylabel("difference to A")
    plain_panel(axes)
    reach = [0.0]
    marked: list[str] = []  # logs with a line where they part: training's, else validation's
    for each in found:
        look = look_of(LETTERS.index(each.letter))
        mean = _averaged(each)
        if not len(mean.steps):
            continue
        reach += [float(value) for value in np.quantile(mean.values, [0.005, 0.995])]
        if each.curve == TRAIN:
            if each.window > 1:
                draw_steps(axes, finite(Curve(each.steps, each.values)), look.color, **FAINT)
            draw_line(axes, mean, look)
        else:
            axes.plot(
                mean.steps, mean.values, look.mark, color=look.color, markersize=4, markeredgecolor="white", zorder=4
            )
        if each.parts is not None and each.letter not in marked:
            _mark_parting(axes, each, look.color, row=len(marked))
            marked.append(each.letter)
    tolerance = found[0].tolerance if found else 0.0
    if max(map(abs, reach)) > 0.1 * tolerance:  # else the band would be all there is to see
        axes.axhspan(-tolerance, tolerance, color="#888888", alpha=0.15, linewidth=0)
        reach += [-tolerance, tolerance]
    axes.axhline(0, color=PALETTE[0], linewidth=0.8)
    low, high = min(reach), max(reach)
    if high > low:
        margin = 0.12 * (high - low)
        axes.set_ylim(low - margin, high + margin)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    lines = [words for words in (outside_words(each, *axes.get_ylim()) for each in found) if words]
    words = "\n".join(lines if len(lines) <= 4 else [*lines[:3], f"and of {len(lines) - 3} others"])
    if words:
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        place = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
        axes.text(0.99, 0.03, words, fontsize=8, color=BASELINE, bbox=box, **place)
    if not any(len(each.steps) for each in found):
        axes.text(0.5, 0.6, "no step in common", transform=axes.transAxes, ha="center")


def _averaged(each: Difference) -> Curve:
    """Return the averaged differences whose window is full, without what is not finite."""
    half = each.window // 2
    full = slice(half, max(half, len(each.steps) - half))
    return finite(Curve(each.steps, each.averaged).at(full))


def outside_words(each: Difference, low: float, high: float) -> str:
    """Say how many single differences a picture from `low` to `high` does not show; nothing where it shows all."""
    infinite = int(np.count_nonzero(~np.isfinite(each.values)))
    beyond = int(np.count_nonzero((each.values < low) | (each.values > high))) - infinite
    words = [f"{beyond:,} beyond the edge"] if beyond else []
    words += [f"{infinite:,} infinite"] if infinite else []
    if not words:
        return ""
    largest, where = each.largest
    at = f" (largest {largest:.3g} at step {where})" if beyond and not infinite else ""
    return f"{each.letter}, {each.curve}: of {len(each.steps):,} single differences {', '.join(words)}{at}"


def _mark_parting(axes: Any, each: Difference, color: str, row: int) -> None:
    """Draw a line at the step where a log parts from the first, and its words in a row of their own."""
    left = each.parts is not None and each.parts > (each.steps[0] + each.steps[-1]) / 2
    axes.axvline(each.parts, color=color, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{each.letter} parts at {each.parts} ({each.curve})", (each.parts, 0.97 - 0.1 * (row % 9)),
        xycoords=("data", "axes fraction"), xytext=(-4 if left else 4, 0), textcoords="offset points",
        ha="right" if left else "left", va="top", fontsize=8, color=color,
    )  # fmt: skip
