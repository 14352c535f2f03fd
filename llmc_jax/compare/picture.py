"""The picture of several logs: their losses over each other, and below what each differs from the first.

matplotlib is imported when a picture is drawn, and used without pyplot.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.compare.logfiles import Log
from llmc_jax.compare.logs import LETTERS, TRAIN, Difference
from llmc_jax.curves import SMOOTHING, Curve, binned, finite, smoothed
from llmc_jax.runlog import write_atomic

COLORS = ("#1f5fa8", "#d1495b", "#2a7f62", "#8a5fbf", "#e6a532", "#5b6770")
LONGEST_NAME = 48


def draw_logs(
    logs: Sequence[Log], found: Sequence[Difference], out_png: Path, title: str = "", names: Sequence[str] = ()
) -> None:
    """Draw logs and their differences to the first into a PNG, which appears complete or not at all.

    names: of the logs, in place of letters and paths.
    Solid lines are training losses (of long runs the mean, each step lightly behind it), dots validation losses.
    Raises InputError if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=110)
    canvas = FigureCanvasAgg(figure)
    margins = {"left": 0.095, "right": 0.975, "top": 0.93 if title else 0.97, "bottom": 0.08, "hspace": 0.08}
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2.6, 1], gridspec_kw=margins)
    if not names:
        paths = short_names([log.path for log in logs])
        names = [f"{letter}  {path}" for letter, path in zip(LETTERS, paths, strict=False)]
    for index, (name, log) in enumerate(zip(names, logs, strict=True)):
        _draw_losses(upper, log, name, _color(index), wide=index == 0)
    _limit_losses(upper, logs)
    _finish(upper, "loss (nats per token)")
    if upper.get_legend_handles_labels()[0]:
        upper.legend(loc="upper right", fontsize=9, edgecolor="none", framealpha=0.9, title="dots: validation")
    _draw_differences(lower, found)
    _finish(lower, f"difference to {names[0].split()[0]}")
    lower.set_xlabel("step")
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", y=0.985)
    picture = io.BytesIO()
    canvas.print_png(picture)
    write_atomic(out_png, picture.getvalue())


def short_names(paths: Sequence[str]) -> list[str]:
    """Paths without the folders that they share, cut to the end; without characters that begin a formula."""
    try:
        shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:  # some absolute, some not
        shared = ""
    names = ["".join(c if c.isprintable() and c != "$" else "?" for c in path) for path in paths]
    names = [name[len(shared) :].lstrip("/") if shared else name for name in names]
    return [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in names]


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _draw_losses(axes: Any, log: Log, name: str, color: str, *, wide: bool) -> None:
    """wide: the first log is a wide, light line, which others on top of it do not hide."""
    train, val = finite(log.train), finite(log.val)
    window = (len(train.steps) // SMOOTHING) | 1
    look = {"linewidth": 4.0, "alpha": 0.4} if wide else {"linewidth": 1.4}
    if len(train.steps):
        if window > 1:
            each = binned(train)
            axes.plot(each.steps, each.mean, color=color, linewidth=0.6, alpha=0.3)
            name = f"{name}, mean of {window} steps"
        mean = binned(smoothed(train, window))
        axes.plot(mean.steps, mean.mean, "." if len(mean.steps) == 1 else "-", color=color, label=name, **look)
    if len(val.steps):
        axes.plot(
            val.steps, val.values, "o:", color=color, linewidth=0.9, markeredgewidth=0.4, markeredgecolor="white",
            markersize=(6 if wide else 4.5) / (1 if len(val.steps) <= 60 else 2), zorder=3.5 if wide else 4,
            label=None if len(train.steps) else f"{name}, validation only",
        )  # fmt: skip


def _limit_losses(axes: Any, logs: Sequence[Log]) -> None:
    """A range that a few spikes do not set: at most 1 step in 200 lies outside. Logarithmic where the loss halves."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    shown = [finite(log.val).values for log in logs]
    for log in logs:
        train = finite(log.train).values
        if len(train):
            shown.append(np.quantile(train, [0.0, 0.995]))
            shown.append(train[:1])
    values = np.concatenate(shown)
    if not len(values):
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center")
        return
    low, high = float(values.min()), float(values.max())
    if low <= 0 or high / low < 2:
        margin = 0.06 * (high - low) or 0.5
        axes.set_ylim(low - margin, high + margin)
        return
    margin = (high / low) ** 0.06
    axes.set_yscale("log")
    axes.set_ylim(low / margin, high * margin)
    wide, narrow = (1, 2, 5), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(LogLocator(subs=wide if high / low > 12 else narrow))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_differences(axes: Any, found: Sequence[Difference]) -> None:
    """Averaged differences of training, single ones of validation; the tolerance as a band, a parting as a line."""
    reach = [0.0]
    marked: list[str] = []  # logs with a line where they part: training's, else validation's
    for each in found:
        color = _color(LETTERS.index(each.letter))
        curve = finite(Curve(each.steps, each.averaged))
        if not len(curve.steps):
            continue
        reach += [float(value) for value in np.quantile(curve.values, [0.005, 0.995])]
        if each.curve == TRAIN:
            if each.window > 1:
                single = binned(finite(Curve(each.steps, each.values)))
                axes.plot(single.steps, single.mean, color=color, linewidth=0.6, alpha=0.3)
            mean = binned(curve)
            axes.plot(mean.steps, mean.mean, "." if len(mean.steps) == 1 else "-", color=color, linewidth=1.4)
        else:
            axes.plot(curve.steps, curve.values, "o", color=color, markersize=4, markeredgecolor="white", zorder=4)
        if each.parts is not None and each.letter not in marked:
            _mark_parting(axes, each, color, row=len(marked))
            marked.append(each.letter)
    tolerance = found[0].tolerance if found else 0.0
    if max(map(abs, reach)) > 0.1 * tolerance:  # else the band would be all there is to see
        axes.axhspan(-tolerance, tolerance, color="#888888", alpha=0.15, linewidth=0)
        reach += [-tolerance, tolerance]
    axes.axhline(0, color=COLORS[0], linewidth=0.8)
    low, high = min(reach), max(reach)
    if high > low:
        margin = 0.12 * (high - low)
        axes.set_ylim(low - margin, high + margin)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    if not any(len(each.steps) for each in found):
        axes.text(0.5, 0.6, "no step in common", transform=axes.transAxes, ha="center")


def _mark_parting(axes: Any, each: Difference, color: str, row: int) -> None:
    """A line at the step where a log parts from the first, and its words in a row of their own."""
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
