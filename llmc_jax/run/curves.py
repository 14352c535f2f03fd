"""The picture of a run: loss, learning rate and gradient norm over the steps, as a PNG.

`draw_curves` draws one, `CurveDrawer` keeps it fresh while a run goes on. Leaves out comparing runs with each other.
matplotlib is imported when a picture is drawn, and used without pyplot, so that no global state and no display is
touched.
"""

import math
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.pictures import PALETTE, save_figure
from llmc_jax.logs.curves import BINS, Bins, Curve, LossRange, binned, finite, loss_range, smoothed, window_of
from llmc_jax.logs.events import Events, figures, read_events
from llmc_jax.logs.files import METRICS
from llmc_jax.logs.follow import STARTS

CURVES = "curves.png"
REDRAW_SECONDS = 20.0  # between two pictures, and at least
REDRAW_SHARE = 0.03  # of one core's time, which long runs, whose metrics are large, would exceed

TRAIN, VAL, BASELINE, RATE, NORM, SKIPPED = PALETTE[0], PALETTE[1], "#555555", PALETTE[6], "#8a5fbf", PALETTE[4]
ACCURACY = PALETTE[3]


class Drawn(NamedTuple):
    """What a picture shows of a run: curves by their fields in its events."""

    train: Curve
    val: Curve
    rate: Curve
    norm: Curve
    accuracy: Curve  # of HellaSwag
    skipped: Curve  # 0 but for steps without an update
    tokens: Curve  # seen by then, of which the last point counts
    diverged: int | None  # after so many steps, where the last start has ended so


def drawn_of(events: Events) -> Drawn:
    """Return what a picture shows of a run's events."""
    names = "train loss, val loss, train lr, train norm, eval accuracy_norm, train skipped, train tokens"
    found = [figures(events, *each.split()).curve for each in names.split(", ")]  # kinds of events, and fields
    last = (events.of(*STARTS, "end") or [{}])[-1]
    diverged = last.get("step") if last.get("outcome") == "diverged" else None
    return Drawn._make((*found, diverged))


def draw_curves(shown: Drawn, out_png: Path, title: str = "", baselines: Mapping[str, float] | None = None) -> None:
    """Draw the curves of a run into a PNG file.

    baselines: losses to compare with, in nats per token, drawn as horizontal lines under their names.
    The file appears complete or not at all. Steps count from 0, as in the log.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=110)
    margins = {"left": 0.085, "right": 0.91, "top": 0.865, "bottom": 0.085, "hspace": 0.1}  # a layout engine is slower
    heights = [3.4, 0.8, 1] if len(shown.accuracy.steps) else [3.4, 1]
    loss_axes, *middle, lower_axes = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights, gridspec_kw=margins
    )
    _draw_loss(loss_axes, shown, baselines or {})
    for axes in middle:
        _draw_accuracy(axes, shown.accuracy)
    _draw_rate_and_norm(lower_axes, shown)
    _limit_steps(lower_axes, shown)
    ended = "" if shown.diverged is None else f" (diverged after {shown.diverged} steps)"
    figure.suptitle(f"{title}{ended}", fontsize=12, fontweight="bold", y=0.985)
    save_figure(figure, out_png)


def _draw_loss(axes: Any, shown: Drawn, baselines: Mapping[str, float]) -> None:
    train, val = shown.train, shown.val
    _draw_train(axes, finite(train))
    if len(val.steps):
        good, label = finite(val), f"validation (last {val.values[-1]:.4f})"
        axes.plot(good.steps, good.values, "o-", color=VAL, markersize=4, linewidth=1.2, label=label, zorder=4)
    chosen = loss_range([train], [val.values, np.array(list(baselines.values()), np.float64)])
    if chosen is not None:
        show_range(axes, chosen)
    mark_outside(axes, train, chosen, TRAIN, "training")
    mark_outside(axes, val, chosen, VAL, "validation")
    skipped = shown.skipped.steps[shown.skipped.values != 0]
    if len(skipped):
        _mark(axes, skipped, 0.0, "|", f"update skipped: {len(skipped):,}", SKIPPED)
    _draw_baselines(axes, baselines)
    axes.set_ylabel(f"loss (nats per token{', log scale' if axes.get_yscale() == 'log' else ''})")
    axes.grid(alpha=0.25)
    axes.spines["right"].set_visible(False)
    _token_axis(axes, shown.tokens)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=9, edgecolor="none", framealpha=0.9)
    else:
        axes.text(0.5, 0.5, "no steps yet", transform=axes.transAxes, ha="center", color=BASELINE)


def _draw_train(axes: Any, train: Curve) -> None:
    if not len(train.steps):
        return
    window = window_of(len(train.steps))
    mark = "." if len(train.steps) == 1 else "-"
    look = {"linewidth": 0.7, "alpha": 0.35} if window > 1 else {"linewidth": 1.4}  # light where a smooth curve follows
    _draw_steps(axes, train, mark, color=TRAIN, label="training, each step", zorder=2, **look)
    if window > 1:
        s = binned(smoothed(train, window))
        axes.plot(s.steps, s.mean, color=TRAIN, linewidth=1.8, label=f"training, mean of {window} steps", zorder=3)


def _draw_steps(axes: Any, c: Curve, mark: str, color: str, **look: Any) -> Bins:
    """Draw a curve that hides none of its steps: a band spans the least and the greatest value of each bin."""
    b = binned(c)
    axes.plot(b.steps, b.mean, mark, color=color, **look)
    if len(b.steps) < len(c.steps):
        axes.fill_between(b.steps, b.low, b.high, color=color, alpha=0.2, linewidth=0)
    return b


def mark_outside(axes: Any, c: Curve, shown: LossRange | None, color: str, name: str) -> None:
    """Mark the points of a curve that a picture does not show, along its upper edge, and say how many.

    Triangles stand for losses above the edge, crosses for what is NaN or infinite.
    """
    good = np.isfinite(c.values)
    over, bad = c.at(good & (c.values > (shown.high if shown else np.inf))), c.at(~good)
    if len(over.steps):
        top = int(np.argmax(over.values))
        words = f"above the picture: {_counted(over)}, largest {over.values[top]:.4g} at step {over.steps[top]}"
        _mark(axes, over.steps, 0.985, "^", f"{name} {words}", color)
    if len(bad.steps):
        _mark(axes, bad.steps, 0.985, "x", f"{name} not finite: {_counted(bad)}, first at step {bad.steps[0]}", color)


def _counted(c: Curve) -> str:
    return f"{len(c.steps):,} {'point' if len(c.steps) == 1 else 'points'}"


def _mark(axes: Any, steps: np.ndarray, height: float, mark: str, label: str, color: str) -> None:
    """Draw marks at some steps at a height of the panel from 0 to 1, no more of them than can be told apart."""
    _, told = np.unique(steps * BINS // (int(steps[-1]) + 1), return_index=True)
    axes.plot(
        steps[told], np.full(len(told), height), mark, color=color, markersize=6, markeredgewidth=1.5,
        transform=axes.get_xaxis_transform(), clip_on=False, label=label, zorder=5,
    )  # fmt: skip


def _draw_baselines(axes: Any, baselines: Mapping[str, float]) -> None:
    """Draw horizontal lines with their names at the right: above the line, or below it where the next line is close."""
    height_above = 1.0
    for name, value in sorted(baselines.items(), key=lambda item: -item[1]):
        height = axes.transAxes.inverted().transform(axes.transData.transform((0, value)))[1]
        below = height_above - height < 0.05
        height_above = height
        axes.axhline(value, color=BASELINE, linestyle=(0, (5, 3)), linewidth=1.1, zorder=1)
        axes.annotate(
            f"{name} {value:.3f}",
            xy=(1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, -3 if below else 3),
            textcoords="offset points",
            ha="right",
            va="top" if below else "bottom",
            fontsize=9,
            color=BASELINE,
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


def _limit_steps(axes: Any, shown: Drawn) -> None:
    from matplotlib.ticker import MaxNLocator

    last = max((int(each.steps[-1]) for each in (shown.train, shown.val) if len(each.steps)), default=0)
    margin = 0.015 * max(1, last)
    axes.set_xlim(-margin, max(1, last) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))


def _token_axis(axes: Any, tokens: Curve) -> None:
    """Show the tokens seen, along the top; every step has the same number of them."""
    if not len(tokens.steps) or tokens.values[-1] <= 0:
        axes.spines["top"].set_visible(False)
        return
    per_step = tokens.values[-1] / (tokens.steps[-1] + 1)
    unit, name = next(
        (scale for scale in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")) if tokens.values[-1] >= scale[0]),
        (1.0, ""),
    )
    top = axes.secondary_xaxis("top", functions=(lambda s: s * per_step / unit, lambda t: t * unit / per_step))
    top.set_xlabel(f"tokens ({name})" if name else "tokens")


def _draw_accuracy(axes: Any, accuracy: Curve) -> None:
    label = f"HellaSwag, accuracy norm (last {accuracy.values[-1]:.4f})"
    axes.plot(
        accuracy.steps, accuracy.values, "o-", color=ACCURACY, markersize=4, linewidth=1.2, clip_on=False, label=label
    )
    axes.set_ylabel("accuracy")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=9, edgecolor="none", framealpha=0.9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_rate_and_norm(axes: Any, shown: Drawn) -> None:
    rate = binned(finite(shown.rate))
    axes.plot(rate.steps, rate.mean, color=RATE, linewidth=1.5)
    axes.set_ylabel("learning rate", color=RATE)
    axes.tick_params(axis="y", colors=RATE)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.spines["top"].set_visible(False)
    axes.grid(alpha=0.25)
    right = axes.twinx()
    b = _draw_steps(right, finite(shown.norm), "-", color=NORM, linewidth=0.9, alpha=0.85)
    if len(b.low) and b.low.min() > 0 and b.high.max() > 20 * float(np.median(b.mean)):
        right.set_yscale("log")
    right.set_ylabel("gradient norm", color=NORM)
    right.tick_params(axis="y", colors=NORM, which="both")
    right.spines["top"].set_visible(False)


@dataclass
class CurveDrawer:
    """Redraws the picture of the curves in a thread of its own, so that the training step does not wait for it.

    A picture that cannot be drawn is worth one warning, not the run.
    """

    folder: Path
    title: str
    baselines: Mapping[str, float]
    warn: Callable[[str], None]  # shows a warning
    is_there: Callable[[], bool]  # whether the folder is still the run's, without which nothing is drawn
    drawing: bool = True  # off in all processes of a run but the first

    def __post_init__(self) -> None:
        self.path = self.folder / CURVES
        self._warned = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmc_jax curves")
        self._next = time.monotonic() + REDRAW_SECONDS

    def _draw(self) -> None:
        """Draw the picture, in the thread, and set when the next one may begin."""
        start = time.monotonic()
        try:
            if self.drawing and self.is_there():
                draw_curves(drawn_of(read_events(self.folder / METRICS)), self.path, self.title, self.baselines)
        except Exception as error:
            if not self._warned:
                self._warned = True
                self.warn(f"{self.path}: cannot be drawn, training goes on: {type(error).__name__}: {error}")
        end = time.monotonic()
        self._next = end + max(REDRAW_SECONDS, (end - start) / REDRAW_SHARE)

    def refresh(self) -> None:
        """Begin a new picture if the last one is old enough."""
        if time.monotonic() >= self._next:
            self._next = math.inf  # until this one is drawn
            self._pool.submit(self._draw)

    def finish(self) -> None:
        """Draw the last picture, after the one in work."""
        self._pool.submit(self._draw).result()

    def close(self) -> None:
        """End the thread, after the picture in work."""
        self._pool.shutdown()
