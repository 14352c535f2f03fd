"""Several logs beside each other: losses by step, differences to the first log, where they part, speed.

Reading them is in logs/reading.py, drawing them in report/. Knows no JAX.
"""

import argparse
import math
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import number, plural, small
from llmc_jax.base.options import own
from llmc_jax.base.text import table, wrapped
from llmc_jax.compare.tensors import Show
from llmc_jax.logs.curves import Curve, median, moving_mean, spread, window_of
from llmc_jax.logs.reading import BATCHES, SPEED, Log, read_log

TOLERANCE = 0.01  # nats per token; what llm.c's own tests allow a loss
TAIL = 0.1  # of the common steps: as many must follow the one at which two logs part
ROWS = 12
TRAIN, VAL = "training", "validation"
CURVES = {TRAIN: "train", VAL: "val"}  # and the name of a log's field


class Difference(NamedTuple):
    """A curve of one log minus that of the first, at the steps that both have.

    The averaged difference at a step is the mean of those of `window` steps, an odd number, with it in the middle.
    Beyond the tolerance means: above it, or below its negative. The logs part at the first step beyond the
    tolerance from which on most steps are, with a tenth of all common steps still to come: where curves cross they
    have not met again, and an odd step or two at the end are no parting.
    """

    log: str  # the letter of that which is compared with A
    curve: str  # TRAIN or VAL
    steps: np.ndarray  # (n,) int64
    values: np.ndarray  # (n,) float64; infinite where one is finite and the other is not
    averaged: np.ndarray  # (n,) float64
    window: int  # points that it averages over
    tolerance: float  # nats per token
    rounding: float  # as much may come from the digits that the logs have
    not_compared: tuple[tuple[int, int, int], ...] = ()  # common steps, and over how many batches each log validated
    largest: float | None = None  # |difference|
    largest_at: int | None = None  # step
    mean: float | None = None  # |difference| of the finite ones
    first_beyond: int | None = None  # step whose averaged difference is beyond the tolerance
    parts: int | None = None  # step at which the logs part

    @property
    def beyond(self) -> np.ndarray:
        """Return whether the averaged difference of each step is beyond the tolerance, (n,) bool."""
        return np.abs(self.averaged) > self.tolerance

    def measured(self) -> "Difference":
        """Return it with all that follows from the values."""
        if not len(self.steps):
            return self
        sizes, beyond = np.abs(self.values), self.beyond
        at, good = int(np.argmax(sizes)), sizes[np.isfinite(sizes)]
        to_come = np.arange(len(beyond), 0, -1)  # the step itself included
        most = np.cumsum(beyond[::-1])[::-1] > to_come / 2
        return self._replace(
            largest=float(sizes[at]),
            largest_at=int(self.steps[at]),
            mean=float(good.mean()) if len(good) else math.nan,
            first_beyond=next(iter(self.steps[beyond].tolist()), None),
            parts=next(iter(self.steps[beyond & most & (to_come >= TAIL * len(beyond))].tolist()), None),
        )


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
    for letter, log in zip(ascii_uppercase[1:], logs[1:], strict=False):
        rounding = sum(0.5 * 10.0**-each.decimals for each in (logs[0], log) if each.decimals is not None)
        for name, field in CURVES.items():
            both = difference(getattr(logs[0], field), getattr(log, field))
            apart = unlike(logs[0], log) if name == VAL else ()
            steps, values, _ = both.at(~np.isin(both.steps, [step for step, *_ in apart]))
            points = 1 if name == VAL else window | 1 if window else window_of(len(steps))
            mean = np.where(np.isfinite(values), moving_mean(values, points), np.inf)
            one = Difference(letter, name, steps, values, mean, points, tolerance, rounding, apart)
            found.append(one.measured())
    return found


def unlike(first: Log, other: Log) -> tuple[tuple[int, int, int], ...]:
    """Return the common validations that both logs say to be of another number of batches: step, and both numbers."""
    a, b = first.of(BATCHES), other.of(BATCHES)
    steps, mine, theirs = np.intersect1d(a.steps, b.steps, assume_unique=True, return_indices=True)
    rows = np.stack([steps, a.values[mine], b.values[theirs]], axis=1).astype(np.int64)
    return tuple((step, x, y) for step, x, y in rows.tolist() if x != y)


def figures_of(log: Log) -> dict[str, float | None]:
    """Return how a run went: its last losses, and the medians of its times without the first step."""
    ms = median(log.of("ms"))
    return {
        "last_train": last(log.train), "last_val": last(log.val), "median_ms": ms,
        "steps_per_second": 1e3 / ms if ms else None, "tokens_per_second": median(log.of(SPEED)),
    }  # fmt: skip


# ----- words and tables ---------------------------------------------------------------------------------------------


def verdict(each: Difference) -> str:
    """Return the verdict on a difference, in a sentence or two."""
    words = [_verdict(each)] if len(each.steps) or not each.not_compared else []
    if each.not_compared:
        _, first, other = each.not_compared[0]
        why = f"the first log validates over {first:,} batches, the other over {other:,}"
        words.append(f"not compared at {plural(len(each.not_compared), 'common step')}: {why}")
    return f"{each.log} vs A, {each.curve}: {'; '.join(words)}"


def _verdict(each: Difference) -> str:
    if each.largest is None:
        return "no common step"
    last, count = int(each.steps[-1]), len(each.steps)
    steps = f"all {count:,} common steps" if count > 1 else f"step {last}, the only common step"
    if each.largest <= each.rounding * (1 + 1e-9) + 1e-12:
        return f"equal at {steps}{', to the precision of the logs' if each.largest else ''}"
    at_most = f"the largest difference is {small(each.largest)}, at step {each.largest_at}"
    what = "the difference" if each.window == 1 else f"the difference, averaged over {each.window} steps,"
    bound = f"{each.tolerance:g}"
    if each.parts is not None:
        behind = each.beyond[int(np.searchsorted(each.steps, each.parts)) :]
        beyond = f"from there to step {last} {what} is larger than {bound} at {behind.sum():,} of {len(behind):,} steps"
        return f"they part at step {each.parts}: {beyond}; {at_most}"
    if each.first_beyond is not None:
        beyond = f"{what} is larger than {bound} at {each.beyond.sum():,} of {count:,} common steps"
        return f"they do not part: {beyond}, first at step {each.first_beyond}; {at_most}"
    return f"together: {what} is within {bound} at {steps}; {at_most}"


def chosen_steps(logs: Sequence[Log], rows: int) -> list[int]:
    """Return the steps worth a row: those with a validation, best in all logs; else those with a training loss."""
    for curves in ([log.val for log in logs], [log.train for log in logs]):
        having = [set(each.steps.tolist()) for each in curves if len(each.steps)]
        if having:
            common = set.intersection(*having)
            steps = sorted(common if len(common) > 1 else set.union(*having))
            return [steps[place] for place in spread(len(steps), rows)]
    return []


def at_step(c: Curve, step: int) -> float | None:
    """Return the value of a curve at a step; None where it has none."""
    place = int(np.searchsorted(c.steps, step))
    return float(c.values[place]) if place < len(c.steps) and c.steps[place] == step else None


def steps_table(logs: Sequence[Log], steps: Sequence[int]) -> str:
    """Return a table of the losses at some steps, and what each log's is more than the first's."""
    names = ascii_uppercase[: len(logs)]
    digits = min([6, *(log.decimals for log in logs if log.decimals is not None)])
    columns = [("step", [str(step) for step in steps])]
    for field in CURVES.values():
        losses = [[at_step(getattr(log, field), step) for step in steps] for log in logs]
        for name, log, values in zip(names, logs, losses, strict=True):
            columns.append((f"{field} {name}", [number(value, digits) for value in values]))
            if log is not logs[0]:
                apart = [step for step, *_ in unlike(logs[0], log)] if field == CURVES[VAL] else []
                more = [
                    "" if a is None or b is None or step in apart else signed(b - a)
                    for a, b, step in zip(losses[0], values, steps, strict=True)
                ]
                columns.append((f"{name} - {names[0]}", more))
    # Where a screen is too narrow, the differences go, then the other logs, the last one first.
    others = [f"{field} {name}" for field in CURVES.values() for name in names[1:]]
    optional = [*(f"{name} - {names[0]}" for name in names[1:]), *reversed(others)]
    headings, cells = zip(*columns, strict=True)
    return table(headings, list(zip(*cells, strict=True)), optional=optional)


def signed(value: float) -> str:
    """Return a difference that stands for itself, small or large: 3 digits, without a float's own noise."""
    return "0" if value == 0 else f"{value:+.3g}" if abs(value) >= 1e-9 or not math.isfinite(value) else "0"


def logs_table(logs: Sequence[Log]) -> str:
    """Return what each log is, and how its run went."""
    rows = []
    for letter, log in zip(ascii_uppercase, logs, strict=False):
        *losses, ms, per_second, tokens_per_second = figures_of(log).values()
        rows.append([
            letter, log.path, log.kind, _range(log.train), str(len(log.val.steps) or ""), *map(number, losses),
            number(ms, 2), number(per_second, 3), number(tokens_per_second, 0),
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
    rows = [
        [
            f"{each.log} - A, {each.curve}", f"{len(each.steps):,}", small(each.largest), str(each.largest_at),
            small(each.mean or 0), signed(float(each.values[-1])), _step(each.first_beyond), _step(each.parts),
            str(each.window),
        ]
        for each in found
        if each.largest is not None
    ]  # fmt: skip
    headings = ["", "steps", "largest", "at step", "mean", "last", "first beyond", "part at", "averaged over"]
    optional = ("averaged over", "steps", "mean", "part at")
    return table(headings, rows, left=("",), optional=optional) if rows else "no common step"


def _step(step: int | None) -> str:
    return "never" if step is None else str(step)


def as_text(logs: Sequence[Log], found: Sequence[Difference], rows: int) -> str:
    """Return everything for the screen."""
    notes = [f"{letter}: {note}" for letter, log in zip(ascii_uppercase, logs, strict=False) for note in log.notes]
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
    losses = {name: [[at_step(getattr(log, name), step) for log in logs] for step in steps] for name in CURVES.values()}
    return {
        "logs": [
            log._asdict() | {"curves": {name: each._asdict() for name, each in log.curves.items()}} | figures_of(log)
            for log in logs
        ],
        "table": {"step": steps, **losses},
        "differences": [each._asdict() | {"words": verdict(each)} for each in found],
    }


# ----- the command --------------------------------------------------------------------------------------------------

DESCRIPTION = """\
Several logs beside each other: losses by step, differences to the first log, where they part, speed.

A log is a run folder or its metrics.jsonl, a main.log of llm.c, or a file with what a trainer printed: train.py,
llm.c's train_gpt2, train_gpt2fp32cu and train_gpt2cu, its train_gpt2.py, nanoGPT's train.py.

Exit status: 0 compared, and they stay together; 2 bad input; 4 compared, and they part."""


OPTIONS = (
    own("logs", "LOG...", None, "two or more, compared with the first", is_path=True),
    own("--tolerance", "X", TOLERANCE, f"nats per token by which losses may differ [{TOLERANCE}]; two logs part at the "
        "first step whose averaged difference is larger, if it is at most of the steps behind it too", 0),
    own("--window", "N", 0, "training losses: average the differences over N steps, an odd number [1 = do not; 0, the "
        "default: one part in 50 of the steps]", 0),
    own("--rows", "N", ROWS, f"steps in the table [{ROWS}]"),
)  # fmt: skip


def run(args: argparse.Namespace, show: Show) -> tuple[bool, dict[str, Any]]:
    """Read, compare and print; return whether they stay together, and the result for JSON. Raises InputError."""
    if not 2 <= len(args.logs) <= len(ascii_uppercase):
        raise InputError(f"{len(args.logs)} log given; two to {len(ascii_uppercase)} are compared with each other")
    logs = [read_log(path) for path in args.logs]
    found = differences(logs, args.tolerance, args.window)
    show(as_text(logs, found, args.rows))
    together = all(each.parts is None for each in found)
    return together, {"comparison": "logs", **as_json(logs, found, args.rows)}
