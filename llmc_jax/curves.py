"""The picture of a run: loss, learning rate and gradient norm over the steps, as a PNG.

`draw_curves` draws one, `CurveDrawer` keeps it fresh while a run goes on. Leaves out comparing runs with each other.
matplotlib is imported when a picture is drawn, and used without pyplot, so that no global state and no display is
touched.
"""

import io
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.runlog import METRICS, read_metrics, write_atomic

CURVES = "curves.png"
REDRAW_SECONDS = 20.0  # between two pictures, and at least
REDRAW_SHARE = 0.03  # of one core's time, which long runs, whose metrics are large, would exceed
BINS = 1000  # longer curves are drawn as this many bins with their mean, least and greatest: about one per pixel
SMOOTHING = 50  # the smooth curve averages over one part in this many of the run

TRAIN, VAL, YARDSTICK, RATE, NORM, SKIPPED = "#1f5fa8", "#d1495b", "#555555", "#2a7f62", "#8a5fbf", "#c0392b"


class Curve(NamedTuple):
    """Values over steps, each step once and in order."""

    steps: np.ndarray  # (n,) int64
    values: np.ndarray  # (n,) float64


class Bins(NamedTuple):
    """A curve for drawing: one point per bin."""

    steps: np.ndarray  # mean step of the bin
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def curve(metrics: Sequence[Mapping[str, Any]], event: str, field: str) -> Curve:
    """The values of one field of one kind of event. A step that was logged again (after a resume) counts once, last."""
    last = {row["step"]: row[field] for row in metrics if row["event"] == event and row.get(field) is not None}
    steps = np.array(sorted(last), dtype=np.int64)
    return Curve(steps, np.array([last[step] for step in steps.tolist()], dtype=np.float64))


def finite(c: Curve) -> Curve:
    """The curve without infinities and NaNs."""
    good = np.isfinite(c.values)
    return Curve(c.steps[good], c.values[good])


def binned(c: Curve, bins: int = BINS) -> Bins:
    """Runs of consecutive points gathered into at most `bins` bins of equal count; short curves stay as they are."""
    if len(c.steps) <= bins:
        return Bins(c.steps.astype(np.float64), c.values, c.values, c.values)
    edges = np.linspace(0, len(c.steps), bins + 1).astype(np.int64)
    starts, counts = edges[:-1], np.diff(edges)
    return Bins(
        steps=np.add.reduceat(c.steps.astype(np.float64), starts) / counts,
        mean=np.add.reduceat(c.values, starts) / counts,
        low=np.minimum.reduceat(c.values, starts),
        high=np.maximum.reduceat(c.values, starts),
    )


def smoothed(c: Curve, window: int) -> Curve:
    """The mean over a window centred on each point, cut short (on both sides alike) where the curve ends: no lag."""
    count = len(c.values)
    half = np.minimum(window // 2, np.minimum(np.arange(count), np.arange(count)[::-1]))
    total = np.concatenate([[0.0], np.cumsum(c.values)])
    low, high = np.arange(count) - half, np.arange(count) + half + 1
    return Curve(c.steps, (total[high] - total[low]) / (high - low))


def draw_curves(
    metrics: Sequence[Mapping[str, Any]] | Path,
    out_png: Path,
    title: str = "",
    yardsticks: Mapping[str, float] | None = None,
) -> None:
    """Draw a run's metrics (events as `read_metrics` gives them, or the metrics.jsonl) into a PNG file.

    yardsticks: losses to compare with, in nats per token, drawn as horizontal lines under their names.
    The file appears complete or not at all. Steps count from 0, as in the log.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics) if isinstance(metrics, Path) else metrics
    figure = Figure(figsize=(9, 6), dpi=110)
    canvas = FigureCanvasAgg(figure)
    margins = {"left": 0.085, "right": 0.91, "top": 0.865, "bottom": 0.085, "hspace": 0.1}  # a layout engine is slower
    loss_axes, lower_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1], gridspec_kw=margins)
    _draw_loss(loss_axes, rows, yardsticks or {})
    _draw_rate_and_norm(lower_axes, rows)
    _limit_steps(lower_axes, rows)
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", y=0.985)
    picture = io.BytesIO()
    canvas.print_png(picture)
    write_atomic(out_png, picture.getvalue())


def _draw_loss(axes: Any, rows: Sequence[Mapping[str, Any]], yardsticks: Mapping[str, float]) -> None:
    raw, val = curve(rows, "train", "loss"), finite(curve(rows, "val", "loss"))
    train = finite(raw)
    window = max(1, len(train.steps) // SMOOTHING)
    if len(train.steps):
        _draw_train(axes, train, window)
    if len(val.steps):
        label = f"validation (last {val.values[-1]:.4f})"
        axes.plot(val.steps, val.values, "o-", color=VAL, markersize=4, linewidth=1.2, label=label, zorder=4)
    _mark_skipped(axes, rows, raw)
    _limit_loss(axes, train, val, yardsticks, window)
    _draw_yardsticks(axes, yardsticks)
    axes.set_ylabel(f"loss (nats per token{', log scale' if axes.get_yscale() == 'log' else ''})")
    axes.grid(alpha=0.25)
    axes.spines["right"].set_visible(False)
    _token_axis(axes, rows)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.56, 0.99), fontsize=9, edgecolor="none", framealpha=0.9
        )  # the names of the yardsticks stand at the right, the curve begins at the left
    else:
        axes.text(0.5, 0.5, "no steps yet", transform=axes.transAxes, ha="center", color=YARDSTICK)


def _draw_train(axes: Any, train: Curve, window: int) -> None:
    b = binned(train)
    mark = "." if len(b.steps) == 1 else "-"
    look = {"linewidth": 0.7, "alpha": 0.35} if window > 1 else {"linewidth": 1.4}  # light where a smooth curve follows
    axes.plot(b.steps, b.mean, mark, color=TRAIN, label="training, each step", zorder=2, **look)
    if len(b.steps) < len(train.steps):
        # the curve hides none of its steps: the band spans the least and the greatest loss of each bin
        axes.fill_between(b.steps, b.low, b.high, color=TRAIN, alpha=0.18, linewidth=0)
    if window > 1:
        s = binned(smoothed(train, window))
        axes.plot(s.steps, s.mean, color=TRAIN, linewidth=1.8, label=f"training, mean of {window} steps", zorder=3)


def _draw_yardsticks(axes: Any, yardsticks: Mapping[str, float]) -> None:
    """Horizontal lines with their names at the right: above the line, or below it where the next line is close."""
    height_above = 1.0
    for name, value in sorted(yardsticks.items(), key=lambda item: -item[1]):
        height = axes.transAxes.inverted().transform(axes.transData.transform((0, value)))[1]
        below = height_above - height < 0.05
        height_above = height
        axes.axhline(value, color=YARDSTICK, linestyle=(0, (5, 3)), linewidth=1.1, zorder=1)
        axes.annotate(
            f"{name} {value:.3f}",
            xy=(1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, -3 if below else 3),
            textcoords="offset points",
            ha="right",
            va="top" if below else "bottom",
            fontsize=9,
            color=YARDSTICK,
        )


def _limit_loss(axes: Any, train: Curve, val: Curve, yardsticks: Mapping[str, float], window: int) -> None:
    """Choose the range so that a few spikes do not flatten the rest: at most 1 step in 200 may lie outside.

    Where the loss halves or more the axis is logarithmic, or the first steps would leave no room for the others.
    """
    shown = [np.array(list(yardsticks.values()), dtype=np.float64), val.values]
    if len(train.values):
        shown += [np.quantile(train.values, [0.0, 0.995]), smoothed(train, window).values[[0, -1]]]
    values = np.concatenate(shown)
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low >= 2:
        margin = (high / low) ** 0.06
        axes.set_yscale("log")
        axes.set_ylim(low / margin, high * margin)
        _loss_ticks(axes, decades=np.log10(high / low))
    else:
        margin = 0.06 * (high - low) or 0.5
        axes.set_ylim(low - margin, high + margin)


def _loss_ticks(axes: Any, decades: float) -> None:
    """Ticks at round losses, written as plain numbers: by default a logarithmic axis has them at 1 and 10 only."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    wide, narrow = (1, 2, 5), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)
    axes.yaxis.set_major_locator(LogLocator(subs=wide if decades > 1.1 else narrow))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _limit_steps(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    last = max((row["step"] for row in rows if row["event"] in ("train", "val")), default=0)
    margin = 0.015 * max(1, last)
    axes.set_xlim(-margin, max(1, last) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))


def _mark_skipped(axes: Any, rows: Sequence[Mapping[str, Any]], raw: Curve) -> None:
    """Steps without an update (a non-finite loss or gradient) as marks along the lower edge."""
    skipped = curve(rows, "train", "skipped")
    steps = np.union1d(skipped.steps[skipped.values != 0], raw.steps[~np.isfinite(raw.values)])
    if len(steps):
        axes.plot(
            steps,
            np.zeros(len(steps)),
            "|",
            color=SKIPPED,
            markersize=9,
            markeredgewidth=2,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            label=f"skipped: {len(steps)}",
            zorder=5,
        )


def _token_axis(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Tokens seen, along the top; every step has the same number of them."""
    tokens = curve(rows, "train", "tokens")
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


def _draw_rate_and_norm(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    rate, norm = binned(finite(curve(rows, "train", "lr"))), finite(curve(rows, "train", "norm"))
    axes.plot(rate.steps, rate.mean, color=RATE, linewidth=1.5)
    axes.set_ylabel("learning rate", color=RATE)
    axes.tick_params(axis="y", colors=RATE)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.spines["top"].set_visible(False)
    axes.grid(alpha=0.25)
    right = axes.twinx()
    b = binned(norm)
    right.plot(b.steps, b.mean, color=NORM, linewidth=0.9, alpha=0.85)
    if len(b.steps) < len(norm.steps):
        right.fill_between(b.steps, b.low, b.high, color=NORM, alpha=0.2, linewidth=0)
    if len(b.low) and b.low.min() > 0 and b.high.max() > 20 * float(np.median(b.mean)):
        right.set_yscale("log")
    right.set_ylabel("gradient norm", color=NORM)
    right.tick_params(axis="y", colors=NORM, which="both")
    right.spines["top"].set_visible(False)


class CurveDrawer:
    """Redraws the picture of the curves in a thread of its own, so that the training step does not wait for it.

    A picture that cannot be drawn is worth one warning, not the run.
    """

    def __init__(
        self,
        folder: Path,
        title: str,
        yardsticks: dict[str, float],
        warn: Callable[[str], None],
        is_there: Callable[[], bool] = lambda: True,
    ) -> None:
        """warn: shows a warning; is_there: whether the folder is still the run's, without which nothing is drawn."""
        self._is_there = is_there
        self.path = folder / CURVES
        self._metrics, self._title, self._yardsticks = folder / METRICS, title, yardsticks
        self._warn, self._warned = warn, False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmc_jax curves")
        self._drawing: Future[float] | None = None
        self._next = time.monotonic() + REDRAW_SECONDS

    def _draw(self) -> float:
        start = time.monotonic()
        if self._is_there():
            draw_curves(read_metrics(self._metrics), self.path, self._title, self._yardsticks)
        return time.monotonic() - start

    def refresh(self) -> None:
        """Begins a new picture if the last one is old enough."""
        if self._drawing is None and time.monotonic() >= self._next:
            self._drawing = self._pool.submit(self._draw)
        elif self._drawing is not None and self._drawing.done():
            self._collect()

    def _collect(self) -> None:
        """Waits for the picture in work, and says when the next one may begin."""
        if self._drawing is not None:
            error = self._drawing.exception()
            seconds = 0.0 if error else self._drawing.result()
            self._drawing = None
            self._next = time.monotonic() + max(REDRAW_SECONDS, seconds / REDRAW_SHARE)
            if error and not self._warned:
                self._warned = True
                self._warn(f"{self.path}: cannot be drawn, training goes on: {type(error).__name__}: {error}")

    def finish(self) -> None:
        """Draws the last picture."""
        self._collect()
        self._drawing = self._pool.submit(self._draw)
        self._collect()

    def __enter__(self) -> "CurveDrawer":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
