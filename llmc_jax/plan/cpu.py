"""The time of a step on a CPU, by rates that were measured on it (calibrate.py).

Each operation of models/gpt2/work.py is one of those that were measured, at its own sizes: between the measured ones
rates are interpolated, beyond them they stay. To these come what XLA's programs for CPUs do beside the operations: the
weights sliced out of the flat buffer, and memory for temporaries, which each step takes anew.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.operations import row_of
from llmc_jax.models.gpt2.tensors import flat_size, letters
from llmc_jax.models.gpt2.work import COMPUTE_BYTES as ELEMENT
from llmc_jax.models.gpt2.work import Shape, Work, rows_at_once
from llmc_jax.models.tensors import sizes
from llmc_jax.plan.efficiency import Roof
from llmc_jax.plan.interval import Interval

LINEAR = ("linear forward", "linear backward")
ATTENTION = ("attention forward", "attention backward")
LAYERNORM = ("layernorm forward", "layernorm backward")
GELU = ("gelu forward", "gelu backward")
CLASSIFIER, EMBEDDING, COPY, NORM, UPDATE = "classifier", "embedding", "copy", "norm", "adamw"

KEPT = 32 * 2**20  # bytes up to which glibc keeps memory that has been given back (mallopt(3), M_MMAP_THRESHOLD)


class Rates(NamedTuple):
    """Amounts per second of one operation over a grid of sizes, in the order of itertools.product."""

    axes: tuple[tuple[int, ...], ...]
    rates: tuple[float, ...]

    def at(self, *sizes: float) -> float:
        """Return the rate between the sizes that were measured, straight in logarithms; beyond them the edge's."""
        found = np.log(self.rates).reshape([len(axis) for axis in self.axes])
        for axis, size in zip(self.axes, sizes, strict=True):
            found = np.apply_along_axis(partial(np.interp, math.log(size), np.log(axis)), 0, found)
        return math.exp(found)


class Calibration(NamedTuple):
    """What was measured on one CPU."""

    device: str
    cores: int
    dtype: str  # that the model computed in
    rates: dict[str, Rates]
    program: float  # seconds that it takes to start a program
    fresh: float  # seconds for each byte of memory that is taken anew
    spread: Interval  # of a time to the least one, which the rates are of: others use the machine too

    @property
    def roof(self) -> Roof:
        """Return the best rates that were measured, as floors are computed with them."""
        bandwidth = 2 * ELEMENT[self.dtype] * max(self.rates[COPY].rates)
        return Roof(2 * max(self.rates[LINEAR[0]].rates), bandwidth, bandwidth, None)


Part = tuple[str, tuple[int, ...], int]  # an operation that was measured, its sizes, and how often it runs


def seconds_of(part: Part, calibration: Calibration) -> float:
    """Return what an operation takes, all times together."""
    name, sizes, times = part
    return times * amount_of(name, sizes) / calibration.rates[name].at(*sizes)


def amount_of(name: str, sizes: tuple[int, ...]) -> float:
    """Return what the rate of an operation counts: the product of its sizes, of attention the scores B NH T T."""
    if name in ATTENTION:
        heads, T, _ = sizes
        return float(heads * T * T)
    return float(math.prod(sizes))


def parts_of(work: Work, forward: bool, model: ModelConfig, shape: Shape) -> Iterator[Part]:
    """Yield what one work of a step consists of. forward: also one that the backward computes again."""
    C, n, N = model.channels, shape.rows, flat_size(model)
    backward = work.phase == "backward" and not forward
    again = shape.recompute if backward and not shape.recompute_blocks else 0
    name, times = work.operation, work.times
    if name in ("qkv", "attproj", "fc", "fcproj", "head"):
        outputs, inputs = sizes(row_of("wte" if name == "head" else f"{name}w").shape, letters(model))
        rows = rows_at_once(shape) if name == "head" else n
        yield LINEAR[backward], (rows, inputs, outputs), times
    elif name == "attention":
        yield ATTENTION[backward], (shape.batch * model.num_heads, shape.sequence, model.head_size), times
    elif name in ("ln1", "ln2", "lnf"):
        yield LAYERNORM[backward], (n, C), times
        if again >= 2 and name != "lnf":
            yield LAYERNORM[0], (n, C), times
    elif name == "gelu":
        yield GELU[backward], (n, 4 * C), times
        if again:
            yield GELU[0], (n, 4 * C), times
    elif name == "classifier":
        yield CLASSIFIER, (rows_at_once(shape), model.padded_vocab_size), times
    elif name == "embedding":
        yield (EMBEDDING, (n, C), times) if backward else (COPY, (n * C,), times)
    elif name == "gradient":
        yield COPY, (N,), times * (2 if shape.micro_batches > 1 else 1)
    elif name == "weights":
        yield COPY, (N,), times
    elif work.phase == "update":
        yield NORM if name == "norm" else UPDATE, (N // shape.devices if shape.stage else N,), times
