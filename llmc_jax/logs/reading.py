"""The logs of a training run, whoever wrote them: ours, llm.c's, those of its PyTorch script, nanoGPT's.

Steps count from 0, and a validation at step s comes before the update of step s, as in llm.c's main.log.
Leaves out comparing them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import refusing
from llmc_jax.logs.curves import NONE, Curve
from llmc_jax.logs.events import TORN, Events, figures, read_events
from llmc_jax.logs.files import MAIN_LOG, METRICS
from llmc_jax.logs.follow import STARTS

LONGEST_TEXT = 1 << 12  # a longer line of text is none of a log's

# What a log tells of a run's steps, by the names that all rooms have for it: the kind of our event, and its field.
TRAIN, VAL, ESTIMATE, HELLASWAG = "train.loss", "val.loss", "train.estimate", "accuracy_norm"
SPEED, BATCHES = "tokens_per_second", "val.batches"
FIGURES = {
    TRAIN: ("train", "loss"),
    VAL: ("val", "loss"),
    **{name: ("train", name) for name in ("norm", "lr", SPEED, "ms", "memory")},
    **{name: ("eval", name) for name in (HELLASWAG, "accuracy")},
    **{name: ("train", name) for name in ("loss_scale", "z_loss", "z_norm", "tokens", "skipped")},
    BATCHES: ("val", "batches"),  # that a validation is the mean of
    "gpu.clock": ("gpu", "clock_mhz"),
    "gpu.power": ("gpu", "power_watts"),
    "gpu.temperature": ("gpu", "temperature_celsius"),
    "gpu.compute": ("gpu", "compute_percent"),
    "gpu.memory_busy": ("gpu", "memory_busy_percent"),
}

NUMBER = r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|(?i:nan(?:\(\w*\))?|inf(?:inity)?))"
MAIN_LINE = re.compile(rf"s:(\d{{1,12}}) (tel|trl|eval):({NUMBER})((?: \w+:{NUMBER})*)")
MAIN_FIGURE = re.compile(rf" (lr|norm):({NUMBER})")
# 'step    1/40 | loss 5.3 (+nanz)| …', 'step    1/40 | train loss 5.3 | …', 'step    1/74: train loss 4.3 (…)' count
# from 1; 'step 0: train loss 4.6 (took 3.2 ms)', without a total, from 0.
STEP_LINE = re.compile(rf"step\s+(\d{{1,12}})(/\d{{1,12}})?(?:: | \| )(?:train )?loss ({NUMBER})(?![\w.])(.*)")
VAL_LINE = re.compile(rf"val loss ({NUMBER})")
HELLASWAG_LINE = re.compile(rf"HellaSwag: \d+/\d+ = ({NUMBER})")
OF_STEP = {  # what else a step's line has
    "ms": re.compile(rf"({NUMBER}) ms\b"),
    SPEED: re.compile(rf"({NUMBER}) tok/s"),
    "norm": re.compile(rf"\bnorm ({NUMBER})"),
    "lr": re.compile(rf"\blr ({NUMBER})"),
    "mfu": re.compile(rf"({NUMBER})% (?:\w+ )?MFU"),
}
# nanoGPT counts from 0. Its step line is an evaluation before that step's update, of training and validation data; its
# iter line has the loss of the step's last micro-batch, and the seconds since the step before, an evaluation included.
NANOGPT_STEP = re.compile(rf"step (\d{{1,12}}): train loss ({NUMBER}), val loss ({NUMBER})")
NANOGPT_ITER = re.compile(rf"iter (\d{{1,12}}): loss ({NUMBER}), time ({NUMBER})ms(?:, mfu ({NUMBER})%)?")
# What a program prints when it begins: in a file of several starts, the steps may go back there.
START = re.compile(r"\| Parameter +\| Value.*|\[GPT-2\]|Running pytorch .*")
VAL_EVERY = re.compile(r"\| val_loss_every +\| (\d{1,12}) +\|")  # of the same start-up table
VAL_BATCHES = re.compile(r"\| val_num_batches +\| (\d{1,12}) +\|")
PROCESSES = re.compile(r"\| num_processes +\| (\d{1,6}) +\|")  # of llm.c's alone, whose batches are those of each
# Tokens of a step: rows of llm.c's and our table, and what llm.c's PyTorch script and nanoGPT print.
TOKENS = re.compile(
    r"\| total batch size +\| (\d{1,15}) +\||total desired batch size: ([\d,]{1,18})"
    r"|tokens per iteration will be: ([\d,]{1,18})"
)
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

PRINTED_BY = "output of a trainer"


class Log(NamedTuple):
    """What a log tells of a run. Losses in nats per token."""

    path: str  # as it was given
    kind: str  # what it is, in words
    curves: Mapping[str, Curve]  # that it has, by the names of FIGURES; others' also `mfu` in percent, and ESTIMATE:
    # the loss of training data at validations, which is nanoGPT's
    decimals: int | None = None  # of the losses in the file (training's where it has any); None: all there are
    notes: tuple[str, ...] = ()
    tokens_per_step: float | None = None  # where the log says it
    diverged: int | None = None  # after so many steps, where the last start has ended so

    def of(self, name: str) -> Curve:
        """Return a curve; an empty one where the log lacks it."""
        return self.curves.get(name, NONE)

    @property
    def train(self) -> Curve:
        return self.of(TRAIN)

    @property
    def val(self) -> Curve:
        return self.of(VAL)


def read_log(path: str | Path) -> Log:
    """Return the log at `path`: a run folder, metrics.jsonl, main.log, or a file with what a program printed.

    A last line without its end is left out: it may still be growing. Raises InputError where nothing can be read,
    FormatError where it is no log.
    """
    path = Path(path)
    file = _file_in(path) if path.is_dir() else path
    with refusing(f"{file}: cannot read it"), file.open("rb") as opened:
        head = opened.peek(4096)[:4096]
        if b"\0" in head:
            raise FormatError(f"{file}: binary data; expected a log, which is text in UTF-8")
        if head.lstrip()[:1] == b"{":
            return _read_metrics(path, file)
        return _read_text(path, file, opened)


def _file_in(folder: Path) -> Path:
    """Return the log of a run folder: ours, which has every digit, before main.log."""
    for name in (METRICS, MAIN_LOG):
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder}: no {METRICS} and no {MAIN_LOG} in this folder; expected a run folder or a log")


# ----- ours ---------------------------------------------------------------------------------------------------------


def _read_metrics(path: Path, file: Path) -> Log:
    events = read_events(file)
    if events.first_bad:
        raise FormatError(f"{file}: line {events.first_bad} is not an event; expected one per line")
    log = log_of(events, str(path), f"{'run folder' if file != path else METRICS} of ours")
    if not len(log.train.steps) and not len(log.val.steps):
        raise FormatError(f"{file}: no losses found; expected events 'train' or 'val', one per line")
    return log


def log_of(events: Events, path: str = "", kind: str = "") -> Log:
    """Return what a run's events tell of it, which may be nothing yet."""
    curves = {name: curve for name, at in FIGURES.items() if len((curve := figures(events, *at)).steps)}
    tokens, skipped = curves.get("tokens", NONE), curves.get("skipped", NONE)
    known = [each["tokens_per_step"] for each in events.of(*STARTS) if type(each.get("tokens_per_step")) is int]
    per_step = tokens.values[-1:] / (tokens.steps[-1:] + 1)
    last = (events.of(*STARTS, "end") or [{}])[-1]
    return Log(
        path,
        kind,
        curves | {"skipped": skipped.at(skipped.values != 0)},
        notes=tuple(events.notes),
        tokens_per_step=next(iter([*per_step.tolist(), *known[::-1]]), None),
        diverged=last.get("step") if last.get("outcome") == "diverged" else None,
    )


# ----- llm.c's, and what programs print -----------------------------------------------------------------------------


@dataclass
class Printed:
    """The curves read from an output so far. A step that stands there again counts as it stands there last."""

    curves: defaultdict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))  # values by step
    decimals: dict[str, int] = field(default_factory=dict)  # of the losses
    kind: str = PRINTED_BY
    notes: list[str] = field(default_factory=list)
    tokens_per_step: int | None = None
    # Where we are. A validation line names no step.
    last: int | None = None  # the last step seen since the program began
    total: int | None = None  # steps that there will be
    every: int | None = None  # steps between validations
    batches: int | None = None  # of a validation
    placed: int | None = None  # step of the last validation, once it is known
    val: float | None = None  # one whose step is not known yet
    hellaswag: float | None = None  # the same of an accuracy
    unsure: bool = False  # steps were left out between two lines, with a validation among them

    def put(self, step: int, values: Mapping[str, float | None]) -> None:
        """Take values of a step, or None, by the names of the curves, in the place of earlier ones."""
        for name, value in values.items():
            self.curves[name].pop(step, None)
            if value is not None:
                self.curves[name][step] = value

    def take(self, line: str) -> None:
        """Take a line, which may say nothing of a run."""
        if match := MAIN_LINE.fullmatch(line):
            self.kind = MAIN_LOG
            step, what, value, rest = int(match[1]), *match.groups()[1:]
            if what == "eval":
                self.put(step, {HELLASWAG: float_of(value)})
            elif what == "trl":
                others = {name: float_of(number) for name, number in MAIN_FIGURE.findall(rest)}
                self.put(step, {TRAIN: self._loss(TRAIN, value), "norm": None, "lr": None, **others})
            else:
                self.put(step, {VAL: self._loss(VAL, value), BATCHES: None})
        elif match := VAL_LINE.fullmatch(line):
            self._take_val(self._loss(VAL, match[1]))
        elif match := HELLASWAG_LINE.fullmatch(line):
            if self.val is None and self.placed is not None:
                self.put(self.placed, {HELLASWAG: float_of(match[1])})
            else:
                self.hellaswag = float_of(match[1])
        elif match := VAL_EVERY.fullmatch(line):
            self.every = int(match[1]) or None
        elif match := VAL_BATCHES.fullmatch(line):
            self.batches = int(match[1])
        elif (match := PROCESSES.fullmatch(line)) and self.batches is not None:
            self.batches *= int(match[1])
        elif START.fullmatch(line):
            self.place(None)
            self.last = self.total = self.every = self.batches = self.placed = None
        elif match := TOKENS.match(line):
            self.tokens_per_step = int("".join(filter(None, match.groups())).replace(",", "") or 0) or None
        elif match := NANOGPT_STEP.fullmatch(line):
            losses = {name: self._loss(name, text) for name, text in ((ESTIMATE, match[2]), (VAL, match[3]))}
            self.put(int(match[1]), {**losses, BATCHES: None})
        elif match := NANOGPT_ITER.fullmatch(line):
            self._take_iteration(match)
        elif match := STEP_LINE.fullmatch(line):
            self._take_step(match)

    def _take_iteration(self, match: re.Match[str]) -> None:
        ms, mfu = float_of(match[3]), known_mfu(match[4])
        speed = 1e3 * self.tokens_per_step / ms if self.tokens_per_step and ms > 0 else None
        self.put(int(match[1]), {TRAIN: self._loss(TRAIN, match[2]), "ms": ms, SPEED: speed, "mfu": mfu})

    def _take_step(self, match: re.Match[str]) -> None:
        number, total, loss, rest = match.groups()
        step = int(number) - (total is not None)
        if step < 0:
            return
        self.place(step)
        texts = {name: shown[1] if (shown := pattern.search(rest)) else None for name, pattern in OF_STEP.items()}
        values = {name: None if text is None else float_of(text) for name, text in texts.items()}
        self.put(step, {TRAIN: self._loss(TRAIN, loss), **values, "mfu": known_mfu(texts["mfu"])})
        self.last, self.placed = step, None
        self.total = int(total[1:]) if total else None

    def _loss(self, curve: str, text: str) -> float:
        """Return a loss, and take note of its decimals."""
        if digits := re.fullmatch(r"[+-]?\d*\.(\d+)", text):
            self.decimals[curve] = max(self.decimals.get(curve, 0), len(digits[1]))
        return float_of(text)

    def _take_val(self, loss: float) -> None:
        """Give a validation its step at once, where the start-up table says how often there is one."""
        if self.every is None or self.last is None:
            self.val = loss
            return
        step = self.last + 1
        if step != self.total:  # that is where the last one stands
            least = step if self.placed is None else max(step, self.placed + 1)
            step = -(-least // self.every) * self.every
        self.put(step, {VAL: loss, BATCHES: self.batches})
        self.placed = step

    def place(self, next_step: int | None) -> None:
        """Give the validation read last its step: right behind the last step seen, else that of the one that follows.

        next_step: the step whose line follows; None: none does in this start of the program.
        """
        if self.last is None or (next_step is not None and next_step <= self.last):
            step = next_step or 0
        else:
            step = self.last + 1
            if next_step is not None and next_step != step and self.val is not None:
                self.unsure = True
        if self.val is not None:
            self.put(step, {VAL: self.val, BATCHES: self.batches})
        if self.hellaswag is not None:
            self.put(step, {HELLASWAG: self.hellaswag})
        self.val = self.hellaswag = None


def _read_text(path: Path, file: Path, opened: BinaryIO) -> Log:
    found, text = Printed(), b"\n"
    for text in iter(partial(opened.readline, LONGEST_TEXT), b""):  # of a longer line the end is one
        if text.endswith(b"\n"):
            for part in text.decode("utf-8", "replace").split("\r"):  # a progress line is overwritten in place
                found.take(COLOURS.sub("", part).strip())
    if not text.endswith(b"\n"):
        found.notes.append(TORN)
    found.place(None)
    curves = {name: _curve(values) for name, values in found.curves.items() if values}
    if not curves.keys() & {TRAIN, VAL}:
        raise FormatError(
            f"{file}: no losses found; expected {METRICS}, {MAIN_LOG} or what train.py or a trainer of llm.c printed"
        )
    if found.unsure:
        found.notes.append("steps are missing: each validation is placed right after the last step shown")
    decimals = found.decimals.get(TRAIN, found.decimals.get(VAL))
    return Log(str(path), found.kind, curves, decimals, tuple(found.notes), found.tokens_per_step)


def _curve(values: dict[int, float]) -> Curve:
    steps = sorted(values)
    return Curve(np.array(steps, np.int64), np.array([values[step] for step in steps], np.float64))


def known_mfu(text: str | None) -> float | None:
    """Return a printed utilization in percent; None for the negative one that stands for an unknown card or time."""
    value = None if text is None else float_of(text)
    return None if value is None or value < 0 else value


def float_of(text: str) -> float:
    """Return a number as C prints it; Python does not know `nan(ind)`."""
    return math.nan if "nan" in text.lower() else float(text)
