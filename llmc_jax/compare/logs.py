"""Several logs beside each other: losses by step, differences to the first log, where they part, speed.

Reading them is in logs/reading.py. Knows no JAX, and imports matplotlib when a picture is drawn.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import number, small
from llmc_jax.base.options import Option, own
from llmc_jax.base.pictures import PALETTE, short_names
from llmc_jax.base.text import table, wrapped
from llmc_jax.compare.tensors import Show
from llmc_jax.logs.curves import Curve, finite, median, moving_mean, window_of
from llmc_jax.logs.picture import BASELINE, FAINT, LETTERS, draw_curves, draw_line, draw_steps, look_of, plain_panel
from llmc_jax.logs.reading import BATCHES, HELLASWAG, SPEED, Log, read_log

TOLERANCE = 0.01  # nats per token; what llm.c's own tests allow a loss
TAIL = 0.1  # of the common steps: as many must follow the one at which two logs part
ROWS = 12
TRAIN, VAL = "training", "validation"
CURVES = {TRAIN: "train", VAL: "val"}  # and the name of a log's field
OTHERS = {"batches": BATCHES, "ms": "ms", "hellaswag": HELLASWAG}  # what JSON has of a log besides


class Unlike(NamedTuple):
    """A step at which two logs validated over another number of batches, so that their losses say nothing."""

    step: int
    first: int  # batches
    other: int


class Difference(NamedTuple):
    """A curve of one log minus that of the first, at the steps that both have.

    The averaged difference at a step is the mean of those of `window` steps, an odd number, with it in the middle.
    Beyond the tolerance means: above it, or below its negative. The logs part at the first step beyond the
    tolerance from which on most steps are, with a tenth of all common steps still to come: where curves cross they
    have not met again, and an odd step or two at the end are no parting.
    """

    letter: str  # of the log that is compared with A
    curve: str  # TRAIN or VAL
    steps: np.ndarray  # (n,) int64
    values: np.ndarray  # (n,) float64; infinite where one is finite and the other is not
    averaged: np.ndarray  # (n,) float64
    window: int  # points that it averages over
    tolerance: float  # nats per token
    rounding: float  # as much may come from the digits that the logs have
    unlike: tuple[Unlike, ...] = ()  # common steps that are left out

    @property
    def largest(self) -> tuple[float, int]:
        """Return the largest |difference|, and its step."""
        index = int(np.argmax(np.abs(self.values)))
        return float(abs(self.values[index])), int(self.steps[index])

    @property
    def mean(self) -> float:
        """Return the mean |difference| of the finite ones."""
        good = self.values[np.isfinite(self.values)]
        return float(np.abs(good).mean()) if len(good) else math.nan

    @property
    def first_beyond(self) -> int | None:
        """Return the first step whose averaged difference is beyond the tolerance."""
        return next(iter(self.steps[self.beyond].tolist()), None)

    @property
    def beyond(self) -> np.ndarray:
        """Return whether the averaged difference of each step is beyond the tolerance, (n,) bool."""
        return np.abs(self.averaged) > self.tolerance

    @property
    def parts(self) -> int | None:
        """Return the step at which the logs part; None if they do not."""
        beyond = self.beyond
        to_come = np.arange(len(beyond), 0, -1)  # the step itself included
        most = np.cumsum(beyond[::-1])[::-1] > to_come / 2
        return next(iter(self.steps[beyond & most & (to_come >= TAIL * len(beyond))].tolist()), None)


def difference(first: Curve, other: Curve) -> Curve:
    """Return other - first at the steps that both have.

    Two values that are not finite in the same way differ by nothing; two of which one is not, by infinity.
    """
    steps, mine, theirs = np.intersect1d(first.steps, other.steps, assume_unique=True, return_indices=True)
    a, b = first.values[mine], other.values[theirs]
    both = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.where(both, b - a, np.where(same, 0.0, np.inf))
    return Curve(steps, values)


def differences(logs: Sequence[Log], tolerance: float = TOLERANCE, window: int = 0) -> list[Difference]:
    """Compare every log but the first with the first. window: of training losses, 0 for one part in 50 of the steps."""
    found = []
    for letter, log in zip(LETTERS[1:], logs[1:], strict=False):
        rounding = sum(0.5 * 10.0**-each.decimals for each in (logs[0], log) if each.decimals is not None)
        for name, field in CURVES.items():
            both = difference(getattr(logs[0], field), getattr(log, field))
            apart = unlike(logs[0], log) if name == VAL else ()
            steps, values, _ = both.at(~np.isin(both.steps, [each.step for each in apart]))
            points = 1 if name == VAL else window | 1 if window else window_of(len(steps))
            mean = np.where(np.isfinite(values), moving_mean(values, points), np.inf)
            found.append(Difference(letter, name, steps, values, mean, points, tolerance, rounding, apart))
    return found


def unlike(first: Log, other: Log) -> tuple[Unlike, ...]:
    """Return the common validations that both logs say to be of another number of batches."""
    a, b = first.of(BATCHES), other.of(BATCHES)
    steps, mine, theirs = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    pairs = zip(steps.tolist(), a.values[mine].tolist(), b.values[theirs].tolist(), strict=True)
    return tuple(Unlike(step, int(x), int(y)) for step, x, y in pairs if x != y)


def steps_per_second(log: Log) -> float | None:
    """Return the median of a run's speed; None where its log has no times."""
    ms = median(log.of("ms"))
    return 1e3 / ms if ms else None


# ----- words and tables ---------------------------------------------------------------------------------------------


def verdict(each: Difference, name: str = "") -> str:
    """Return the verdict on a difference, in a sentence or two. name: what is compared, by default the two letters."""
    name = name or f"{each.letter} vs A, {each.curve}"
    if not each.unlike:
        return _verdict(each, name)
    count, one = len(each.unlike), each.unlike[0]
    words = f"{count:,} common {'step is' if count == 1 else 'steps are'} not compared"
    why = f"the first log validates over {one.first:,} batches, the other over {one.other:,}"
    return (f"{_verdict(each, name)}; " if len(each.steps) else f"{name}: ") + f"{words}: {why}"


def _verdict(each: Difference, name: str) -> str:
    if not len(each.steps):
        return f"{name}: no common step"
    largest, where = each.largest
    last, count = int(each.steps[-1]), len(each.steps)
    steps = f"all {count:,} common steps" if count > 1 else f"step {last}, the only common step"
    if largest == 0:
        return f"{name}: equal at {steps}"
    if largest <= each.rounding * (1 + 1e-9) + 1e-12:
        return f"{name}: equal at {steps}, to the logs' precision"
    at_most = f"the largest difference is {small(largest)}, at step {where}"
    what = "the difference" if each.window == 1 else f"the difference, averaged over {each.window} steps,"
    bound = f"{each.tolerance:g}"
    if each.parts is not None:
        behind = each.beyond[int(np.searchsorted(each.steps, each.parts)) :]
        beyond = f"from there to step {last} {what} is larger than {bound} at {behind.sum():,} of {len(behind):,} steps"
        return f"{name}: they part at step {each.parts}: {beyond}; {at_most}"
    if each.first_beyond is not None:
        return (
            f"{name}: they do not part: {what} is larger than {bound} at {each.beyond.sum():,} of {count:,} common "
            f"steps, first at step {each.first_beyond}; {at_most}"
        )
    return f"{name}: together: {what} is within {bound} at {steps}; {at_most}"


def chosen_steps(logs: Sequence[Log], rows: int) -> list[int]:
    """Return the steps worth a row: those with a validation, best in all logs; else those with a training loss."""
    for curves in ([log.val for log in logs], [log.train for log in logs]):
        having = [set(each.steps.tolist()) for each in curves if len(each.steps)]
        if having:
            common = set.intersection(*having)
            return spread(common if len(common) > 1 else set.union(*having), rows)
    return []


def spread(steps: Iterable[int], rows: int) -> list[int]:
    """Return at most `rows` of the steps in their order, the first and the last among them."""
    found = sorted(steps)
    places = np.unique(np.linspace(0, len(found) - 1, min(rows, len(found))).round().astype(int))
    return [found[place] for place in places]


def at_step(c: Curve, step: int) -> float | None:
    """Return the value of a curve at a step; None where it has none."""
    place = int(np.searchsorted(c.steps, step))
    return float(c.values[place]) if place < len(c.steps) and c.steps[place] == step else None


def steps_table(
    logs: Sequence[Log], steps: Sequence[int], names: Sequence[str] = LETTERS, *, with_times: bool = False
) -> str:
    """Return a table of the losses at some steps, and what each log's is more than the first's; then of its times."""
    names = names[: len(logs)]
    digits = min([6, *(log.decimals for log in logs if log.decimals is not None)])
    columns = [("step", [str(step) for step in steps])]
    for field in CURVES.values():
        losses = [[at_step(getattr(log, field), step) for step in steps] for log in logs]
        for name, log, values in zip(names, logs, losses, strict=True):
            columns.append((f"{field} {name}", [number(value, digits) for value in values]))
            if log is not logs[0]:
                apart = {each.step for each in unlike(logs[0], log)} if field == CURVES[VAL] else set()
                more = [
                    "" if a is None or b is None or step in apart else signed(b - a)
                    for a, b, step in zip(losses[0], values, steps, strict=True)
                ]
                columns.append((f"{name} - {names[0]}", more))
    # Where a screen is too narrow, the differences go, then the other logs, the last one first.
    others = [f"{field} {name}" for field in CURVES.values() for name in names[1:]]
    optional = [*(f"{name} - {names[0]}" for name in names[1:]), *reversed(others)]
    if with_times:
        optional = [f"ms {name}" for name in names]
        times = ([number(at_step(log.of("ms"), step), 2) for step in steps] for log in logs)
        columns += zip(optional, times, strict=True)
    headings, cells = zip(*columns, strict=True)
    return table(headings, list(zip(*cells, strict=True)), optional=optional)


def signed(value: float) -> str:
    """Return a difference that stands for itself, small or large: 3 digits, without a float's own noise."""
    return "0" if value == 0 else f"{value:+.3g}" if abs(value) >= 1e-9 or not math.isfinite(value) else "0"


def logs_table(logs: Sequence[Log]) -> str:
    """Return what each log is, and how its run went."""
    rows = []
    for letter, log in zip(LETTERS, logs, strict=False):
        tokens_per_second = median(log.of(SPEED))
        rows.append([
            letter, log.path, log.kind, _range(log.train), str(len(log.val.steps) or ""),
            number(last(log.train), 4), number(last(log.val), 4),
            number(median(log.of("ms")), 2), number(steps_per_second(log), 3),
            "" if tokens_per_second is None else f"{tokens_per_second:,.0f}",
        ])  # fmt: skip
    words = ["", "log", "what it is", "training steps"]
    headings = [*words, "validations", "last train", "last val", "ms/step", "steps/s", "tok/s"]
    optional = ("steps/s", "what it is", "validations", "tok/s", "training steps")
    return table(headings, rows, left=words, optional=optional)


def _range(c: Curve) -> str:
    if not len(c.steps):
        return "none"
    first, last = c.steps[0], c.steps[-1]
    gaps = f", {len(c.steps):,} of them" if len(c.steps) != last - first + 1 else ""
    return f"{first} to {last}{gaps}"


def last(c: Curve) -> float | None:
    """Return the last value of a curve; None where it has none."""
    return float(c.values[-1]) if len(c.values) else None


def differences_table(found: Sequence[Difference]) -> str:
    """Return the sizes of the differences as a table."""
    rows = []
    for each in found:
        if len(each.steps):
            largest, where = each.largest
            rows.append([
                f"{each.letter} - A, {each.curve}", f"{len(each.steps):,}", small(largest), str(where),
                small(each.mean), signed(float(each.values[-1])),
                _step(each.first_beyond), _step(each.parts), str(each.window),
            ])  # fmt: skip
    headings = ["", "steps", "largest", "at step", "mean", "last", "first beyond", "part at", "averaged over"]
    optional = ("averaged over", "steps", "mean", "part at")
    return table(headings, rows, left=("",), optional=optional) if rows else "no common step"


def _step(step: int | None) -> str:
    return "never" if step is None else str(step)


def as_text(logs: Sequence[Log], found: Sequence[Difference], rows: int) -> str:
    """Return everything for the screen."""
    notes = [f"{letter}: {note}" for letter, log in zip(LETTERS, logs, strict=False) for note in log.notes]
    parts = [
        logs_table(logs),
        *(["\n".join(notes)] if notes else []),
        steps_table(logs, chosen_steps(logs, rows)),
        f"differences in nats per token, tolerance {found[0].tolerance:g}\n{differences_table(found)}",
        "\n".join(wrapped(verdict(each)) for each in found),
    ]
    return "\n\n".join(parts)


def as_json(logs: Sequence[Log], found: Sequence[Difference], rows: int) -> dict[str, Any]:
    """Return the result as plain values; losses in nats per token."""
    steps = chosen_steps(logs, rows)
    return {
        "logs": [_log_json(letter, log) for letter, log in zip(LETTERS, logs, strict=False)],
        "table": [
            {"step": step, **{name: [at_step(getattr(log, name), step) for log in logs] for name in CURVES.values()}}
            for step in steps
        ],
        "differences": [_difference_json(each) for each in found],
    }


def _log_json(letter: str, log: Log) -> dict[str, Any]:
    curves = {"train": log.train, "val": log.val, **{name: log.of(key) for name, key in OTHERS.items()}}
    return {
        "letter": letter, "path": log.path, "kind": log.kind, "decimals": log.decimals, "notes": log.notes,
        "median_ms": median(log.of("ms")), "steps_per_second": steps_per_second(log),
        "tokens_per_second": median(log.of(SPEED)), "last_train": last(log.train), "last_val": last(log.val),
        **{name: {"steps": curve.steps, "values": curve.values} for name, curve in curves.items()},
    }  # fmt: skip


def _difference_json(each: Difference) -> dict[str, Any]:
    largest, where = each.largest if len(each.steps) else (None, None)
    return {
        "log": each.letter, "to": "A", "curve": each.curve, "steps": each.steps, "values": each.values,
        "largest": largest, "largest_at": where, "mean": each.mean if len(each.steps) else None,
        "window": each.window, "tolerance": each.tolerance, "first_beyond": each.first_beyond, "parts": each.parts,
        "not_compared": [one._asdict() for one in each.unlike], "words": verdict(each),
    }  # fmt: skip


# ----- the picture --------------------------------------------------------------------------------------------------


def draw_logs(logs: Sequence[Log], found: Sequence[Difference], out_png: Path, names: Sequence[str] = ()) -> None:
    """Draw logs over each other, and below what each differs from the first, into a PNG, complete or not at all.

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
    words = "\n".join(lines if len(lines) <= 4 else [*lines[:3], f"and {len(lines) - 3} more"])
    if words:
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        place = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
        axes.text(0.99, 0.03, words, fontsize=8, color=BASELINE, bbox=box, **place)
    if not any(len(each.steps) for each in found):
        axes.text(0.5, 0.6, "no common step", transform=axes.transAxes, ha="center")


def _averaged(each: Difference) -> Curve:
    """Return the averaged differences whose window is full, without what is not finite."""
    half = each.window // 2
    full = slice(half, max(half, len(each.steps) - half))
    return finite(Curve(each.steps, each.averaged).at(full))


def outside_words(each: Difference, low: float, high: float) -> str:
    """Say how many single differences a picture from `low` to `high` does not show; nothing where it shows all."""
    infinite = int(np.count_nonzero(~np.isfinite(each.values)))
    beyond = int(np.count_nonzero((each.values < low) | (each.values > high))) - infinite
    words = [f"{beyond:,} off scale"] if beyond else []
    words += [f"{infinite:,} infinite"] if infinite else []
    if not words:
        return ""
    largest, where = each.largest
    at = f" (largest {largest:.3g} at step {where})" if beyond and not infinite else ""
    return f"{each.letter}, {each.curve}: {', '.join(words)} of {len(each.steps):,} differences{at}"


def _mark_parting(axes: Any, each: Difference, color: str, row: int) -> None:
    """Draw a line at the step where a log parts from the first, and its words in a row of their own."""
    left = each.parts is not None and each.parts > (each.steps[0] + each.steps[-1]) / 2
    axes.axvline(each.parts, color=color, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{each.letter} parts at {each.parts} ({each.curve})", (each.parts, 0.97 - 0.1 * (row % 9)),
        xycoords=("data", "axes fraction"), xytext=(-4 if left else 4, 0), textcoords="offset points",
        ha="right" if left else "left", va="top", fontsize=8, color=color,
    )  # fmt: skip


# ----- the command --------------------------------------------------------------------------------------------------

DESCRIPTION = """\
Several logs beside each other: losses by step, differences to the first log, where they part, speed.

A log is a run folder or its metrics.jsonl, a main.log of llm.c, or a file with what a trainer printed: train.py,
llm.c's train_gpt2, train_gpt2fp32cu and train_gpt2cu, its train_gpt2.py, nanoGPT's train.py.

Exit status: 0 compared, and they stay together; 2 bad input; 4 compared, and they part."""


def difference_options(windows: str) -> tuple[Option, ...]:
    """Return the flags that `logs` and `run` have in common. windows: what special values of --window mean."""
    return (
        own("--tolerance", "X", TOLERANCE, f"nats per token by which losses may differ [{TOLERANCE}]; two logs part at "
            "the first step whose averaged difference is larger, if it is at most of the steps behind it too", 0),
        own("--window", "N", 0, f"training losses: average the differences over N steps, an odd number [{windows}]", 0),
        own("--picture", "FILE", None, "draw the curves and differences (*.png)", type=Path, writes=".png"),
    )  # fmt: skip


OPTIONS = (
    own("logs", "LOG...", None, "two or more, compared with the first", is_path=True),
    *difference_options("1 = do not; 0, the default: one part in 50 of the steps"),
    own("--rows", "N", ROWS, f"steps in the table [{ROWS}]"),
)


def run(args: argparse.Namespace, show: Show) -> tuple[bool, dict[str, Any]]:
    """Read, compare and print; return whether they stay together, and the result for JSON. Raises InputError."""
    if not 2 <= len(args.logs) <= len(LETTERS):
        raise InputError(f"{len(args.logs)} log given; two to {len(LETTERS)} are compared with each other")
    logs = [read_log(path) for path in args.logs]
    found = differences(logs, args.tolerance, args.window)
    show(as_text(logs, found, args.rows))
    if args.picture is not None:
        draw_logs(logs, found, args.picture)
        show(f"\npicture: {args.picture}")
    together = all(each.parts is None for each in found)
    return together, {"comparison": "logs", **as_json(logs, found, args.rows)}
