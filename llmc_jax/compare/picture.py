"""The picture of several logs: their losses over each other, and below what each differs from the first.

matplotlib is imported when a picture is drawn, and used without pyplot.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.pictures import PALETTE, save_figure, short_names
from llmc_jax.compare.logs import LETTERS, TRAIN, Difference
from llmc_jax.logs.curves import Curve, binned, finite, loss_range, smoothed, window_of
from llmc_jax.logs.reading import Log
from llmc_jax.run.curves import BASELINE, mark_outside, show_range

STYLES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (6, 1.5, 1, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKS = ("o", "s", "^", "D", "v", "P")
WIDE = {"linewidth": 4.0, "alpha": 0.4}  # of the first log: others on top do not hide it


class Look(NamedTuple):
    """How a log is drawn: what one person cannot tell by colour differs in its dashes and dots too."""

    color: str
    style: Any  # of its line
    mark: str  # of its validations


def look_of(index: int) -> Look:
    """Return the look of a log by its place; of 26 no two have the same."""
    style = STYLES[(index - 1) % len(STYLES)] if index else STYLES[0]
    return Look(PALETTE[index % len(PALETTE)], style, MARKS[index % len(MARKS)])


def draw_logs(logs: Sequence[Log], found: Sequence[Difference], out_png: Path, names: Sequence[str] = ()) -> None:
    """Draw logs and their differences to the first into a PNG, which appears complete or not at all.

    names: of the logs, in place of letters and paths.
    Lines are training losses (of long runs the mean, each step lightly behind it), dots validation losses.
    Raises InputError if it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=110)
    margins = {"left": 0.095, "right": 0.975, "top": 0.97, "bottom": 0.08, "hspace": 0.08}
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1], gridspec_kw=margins)
    if not names:
        paths = short_names([log.path for log in logs])
        names = [f"{letter}  {path}" for letter, path in zip(LETTERS, paths, strict=False)]
    for index, (name, log) in enumerate(zip(names, logs, strict=True)):
        _draw_losses(upper, log, name, look_of(index), wide=index == 0)
    _limit_losses(upper, logs, [name.split()[0] for name in names])
    _finish(upper, "loss (nats per token)")
    if upper.get_legend_handles_labels()[0]:
        upper.legend(loc="upper right", fontsize=9, edgecolor="none", framealpha=0.9, title="dots: validation")
    _draw_differences(lower, found)
    _finish(lower, f"difference to {names[0].split()[0]}")
    lower.set_xlabel("step")
    save_figure(figure, out_png)


def _draw_losses(axes: Any, log: Log, name: str, look: Look, *, wide: bool) -> None:
    """Draw a log's losses. wide: the first log is a wide, light line, which others on top of it do not hide."""
    train, val = finite(log.train), finite(log.val)
    window = window_of(len(train.steps))
    if len(train.steps):
        if window > 1:
            each = binned(train)
            axes.plot(each.steps, each.mean, color=look.color, linewidth=0.6, alpha=0.3)
            name = f"{name}, mean of {window} steps"
        _draw_line(axes, smoothed(train, window), look, label=name, **(WIDE if wide else {"linewidth": 1.4}))
    if len(val.steps):
        axes.plot(
            val.steps, val.values, f"{look.mark}:", color=look.color, linewidth=0.9, markeredgewidth=0.4,
            markersize=(6 if wide else 4.5) / (1 if len(val.steps) <= 60 else 2), zorder=3.5 if wide else 4,
            markeredgecolor="white", label=None if len(train.steps) else f"{name}, validation only",
        )  # fmt: skip


def _draw_line(axes: Any, c: Curve, look: Look, **more: Any) -> None:
    line = binned(c)
    shape = {"marker": "."} if len(line.steps) == 1 else {"linestyle": look.style}
    axes.plot(line.steps, line.mean, color=look.color, **shape, **more)


def _limit_losses(axes: Any, logs: Sequence[Log], letters: Sequence[str]) -> None:
    """Choose the range, and mark what lies outside."""
    chosen = loss_range([log.train for log in logs], [log.val.values for log in logs])
    if chosen is None:
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center")
    else:
        show_range(axes, chosen)
    for index, (letter, log) in enumerate(zip(letters, logs, strict=True)):
        for name, each in (("training", log.train), ("validation", log.val)):
            mark_outside(axes, each, chosen, look_of(index).color, f"{letter}, {name}")


def _draw_differences(axes: Any, found: Sequence[Difference]) -> None:
    """Draw averaged differences of training, single ones of validation; the tolerance as a band, partings as lines."""
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
                single = binned(finite(Curve(each.steps, each.values)))
                axes.plot(single.steps, single.mean, color=look.color, linewidth=0.6, alpha=0.3)
            _draw_line(axes, mean, look, linewidth=1.4)
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


def _finish(axes: Any, name: str) -> None:
    axes.set_ylabel(name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
