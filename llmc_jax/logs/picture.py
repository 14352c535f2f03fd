"""The picture of a run: its losses, and below what else is known of it.

matplotlib is imported when a picture is drawn, and used without pyplot, so that no global state and no display is
touched.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.numbers import SCALES, plural
from llmc_jax.base.pictures import PALETTE, fitting, save_figure
from llmc_jax.logs.curves import BINS, Bins, Curve, LossRange, binned, finite, loss_range, smoothed, window_of
from llmc_jax.logs.reading import HELLASWAG, Log

TRAIN, VAL, BASELINE, RATE, NORM, SKIPPED = PALETTE[0], PALETTE[1], "#555555", PALETTE[6], "#8a5fbf", PALETTE[4]
ACCURACY = PALETTE[3]
FAINT: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.35}  # of each step, where a smooth curve follows
FRAME: dict[str, Any] = {"edgecolor": "none", "framealpha": 0.9}  # of a legend
LEGEND_POINTS = 9.0  # of its words


def draw_curves(log: Log, out: Path, baselines: Mapping[str, float] | None = None) -> None:
    """Draw a run, titled as its `path` says, into a PNG, SVG or PDF.

    baselines: losses to compare with, in nats per token, drawn as horizontal lines under their names. Words that are
    too long are cut: no text leaves the page. The file appears complete or not at all. Steps count from 0, as in the
    log. Raises InputError if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [3.4, 0.8, 1] if len(log.of(HELLASWAG).steps) else [3.4, 1]
    margins = {"left": 0.1, "right": 0.91, "top": 0.865, "bottom": 0.085, "hspace": 0.1}  # a layout engine is slower
    figure = Figure(figsize=(9, 6), dpi=110)
    FigureCanvasAgg(figure)  # measures words
    upper, *middle, lower = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, gridspec_kw=margins)
    _draw_losses(upper, log, baselines or {})
    for axes in middle:
        _draw_accuracy(axes, log.of(HELLASWAG))
    _draw_rate_and_norm(lower, log)
    _token_axis(upper, log)
    font = {"fontsize": 12, "fontweight": "bold"}
    ended = "" if log.diverged is None else f" (diverged after {log.diverged} steps)"
    title = fitting(figure, log.path, 0.98 * figure.bbox.width, ended, **font)
    figure.suptitle(title, y=0.985, parse_math=False, **font)
    _limit_steps(lower, log)
    lower.set_xlabel("step")
    save_figure(figure, out)


def _draw_losses(axes: Any, log: Log, baselines: Mapping[str, float]) -> None:
    _draw_run(axes, log)
    fixed = np.array(list(baselines.values()), np.float64)
    chosen = loss_range([log.train], [log.val.values, fixed])
    if chosen is not None:
        show_range(axes, chosen)
    mark_outside(axes, log.train, chosen, TRAIN, "training")
    mark_outside(axes, log.val, chosen, VAL, "validation")
    if len(skipped := log.of("skipped").steps):
        _mark(axes, skipped, 0.0, "|", f"skipped updates: {len(skipped):,}", SKIPPED)
    _draw_baselines(axes, baselines)
    axes.set_ylabel(f"loss (nats per token{', log scale' if axes.get_yscale() == 'log' else ''})")
    plain_panel(axes)
    labelled = bool(axes.get_legend_handles_labels()[0])
    if labelled:
        axes.legend(loc="best", fontsize=LEGEND_POINTS, **FRAME)
    if chosen is None:
        words = "no finite loss" if labelled else "no steps yet"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color=BASELINE)


def _draw_run(axes: Any, log: Log) -> None:
    """Draw a run's losses."""
    train, val = finite(log.train), finite(log.val)
    window, name = window_of(len(train.steps)), "training, each step"
    if window > 1:
        draw_steps(axes, train, TRAIN, band=True, label=name, **FAINT)
        name = f"training, mean of {window} steps"
    if len(train.steps):
        shape: dict[str, Any] = {"marker": "."} if len(train.steps) == 1 else {}
        draw_steps(axes, smoothed(train, window), TRAIN, label=name, linewidth=1.4, zorder=3, **shape)
    if len(log.val.steps):
        axes.plot(
            val.steps, val.values, "o-", color=VAL, linewidth=0.9, markersize=4.5 / (1 if len(val.steps) <= 60 else 2),
            zorder=4, markeredgecolor="white", markeredgewidth=0.4,
            label=f"validation (last {log.val.values[-1]:.4f})",
        )  # fmt: skip


def draw_steps(axes: Any, c: Curve, color: str, *, band: bool = False, **look: Any) -> Bins:
    """Draw a curve; with a band from the least to the greatest value of each bin it hides none of its steps."""
    b = binned(c)
    axes.plot(b.steps, b.mean, color=color, **look)
    if band and len(b.steps) < len(c.steps):
        axes.fill_between(b.steps, b.low, b.high, color=color, alpha=0.2, linewidth=0)
    return b


def mark_outside(axes: Any, c: Curve, shown: LossRange | None, color: str, name: str) -> None:
    """Mark the points of a curve that a picture does not show, along its upper edge, and say how many.

    Triangles stand for losses above the edge, crosses for what is NaN or infinite.
    """
    good = np.isfinite(c.values)
    over, bad = c.at(good & (c.values > (shown.high if shown else np.inf))), c.at(~good)
    if count := len(over.steps):
        top = int(np.argmax(over.values))
        words = f"{plural(count, 'point')} off scale, largest {over.values[top]:.4g} at step {over.steps[top]}"
        _mark(axes, over.steps, 0.985, "^", f"{name}: {words}", color)
    if count := len(bad.steps):
        words = f"{plural(count, 'point')} not finite, first at step {bad.steps[0]}"
        _mark(axes, bad.steps, 0.985, "x", f"{name}: {words}", color)


def _mark(axes: Any, steps: np.ndarray, height: float, mark: str, label: str, color: str) -> None:
    """Draw marks at some steps at a height of the panel from 0 to 1, no more of them than can be told apart."""
    _, told = np.unique(steps * BINS // (int(steps[-1]) + 1), return_index=True)
    axes.plot(
        steps[told], np.full(len(told), height), mark, color=color, markersize=6, markeredgewidth=1.5,
        transform=axes.get_xaxis_transform(), clip_on=False, label=label, zorder=5,
    )  # fmt: skip


def _draw_baselines(axes: Any, baselines: Mapping[str, float]) -> None:
    """Draw horizontal lines with their names at the right: above the line, or below it where the next line is close."""
    height_above, room = 1.0, 0.9 * axes.get_window_extent().width
    for name, value in sorted(baselines.items(), key=lambda item: -item[1]):
        height = axes.transAxes.inverted().transform(axes.transData.transform((0, value)))[1]
        below = height_above - height < 0.05
        height_above = height
        axes.axhline(value, color=BASELINE, linestyle=(0, (5, 3)), linewidth=1.1, zorder=1)
        axes.annotate(
            fitting(axes.figure, name, room, f" {value:.3f}", fontsize=9),
            xy=(1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, -3 if below else 3),
            textcoords="offset points",
            ha="right",
            va="top" if below else "bottom",
            fontsize=9,
            color=BASELINE,
            parse_math=False,
        )


def show_range(axes: Any, chosen: LossRange) -> None:
    """Set the range of a loss axis.

    A logarithmic one has ticks at round losses, written as plain numbers: by default it has them at 1 and 10 only.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if chosen.log:
        axes.set_yscale("log")
        decades = np.log10(chosen.high / chosen.low)
        narrow = (1, 1.2, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if decades > 4 else (1, 2, 5) if decades > 1.2 else narrow))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: re.sub(r"e(-?)\+?0?", r"e\1", f"{loss:.4g}")))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(chosen.low, chosen.high)


def _limit_steps(axes: Any, log: Log) -> None:
    from matplotlib.ticker import MaxNLocator

    last = max((int(each.steps[-1]) for each in (log.train, log.val) if len(each.steps)), default=0)
    margin = 0.015 * max(1, last)
    axes.set_xlim(-margin, max(1, last) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))


def _token_axis(axes: Any, log: Log) -> None:
    """Show the tokens seen, along the top; every step has the same number of them."""
    per_step = log.tokens_per_step or 0.0
    if not 0 < per_step < np.inf:
        return
    last = per_step * max((int(each.steps[-1]) + 1 for each in (log.train, log.val) if len(each.steps)), default=1)
    size, name = next(scale for scale in SCALES if last >= scale[0])
    unit = size or 1.0
    top = axes.secondary_xaxis("top", functions=(lambda s: s * per_step / unit, lambda t: t * unit / per_step))
    top.set_xlabel(f"tokens ({name})" if name else "tokens")


def _draw_accuracy(axes: Any, accuracy: Curve) -> None:
    label = f"HellaSwag, accuracy norm (last {accuracy.values[-1]:.4f})"
    axes.plot(
        accuracy.steps, accuracy.values, "o-", color=ACCURACY, markersize=4, linewidth=1.2, clip_on=False, label=label
    )
    axes.set_ylabel("accuracy")
    axes.legend(loc="lower right", fontsize=LEGEND_POINTS, **FRAME)
    plain_panel(axes)


def _draw_rate_and_norm(axes: Any, log: Log) -> None:
    rate = binned(finite(log.of("lr")))
    axes.plot(rate.steps, rate.mean, color=RATE, linewidth=1.5)
    axes.set_ylabel("learning rate", color=RATE)
    axes.tick_params(axis="y", colors=RATE)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_ylim(bottom=0)
    plain_panel(axes)
    right = axes.twinx()
    b = draw_steps(right, finite(log.of("norm")), NORM, band=True, linewidth=0.9, alpha=0.85)
    if len(b.low) and b.low.min() > 0 and b.high.max() > 20 * float(np.median(b.mean)):
        right.set_yscale("log")
    right.set_ylabel("gradient norm", color=NORM)
    right.tick_params(axis="y", colors=NORM, which="both")
    right.spines["top"].set_visible(False)


def plain_panel(axes: Any) -> None:
    """Give a panel a grid, and no frame at the top and the right."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
