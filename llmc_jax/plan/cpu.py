"""The time of a step on a CPU, by rates that were measured on it (calibrate.py).

Each operation of models/gpt2/work.py is one of those that were measured, at its own sizes: between the measured ones
rates are interpolated, beyond them they stay. To these come what XLA's programs for CPUs do beside the operations: the
weights sliced out of the flat buffer, and memory for temporaries, which each step takes anew.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

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
        places = [_place(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        total = 0.0
        for corner in itertools.product((0, 1), repeat=len(places)):
            weight, index = 1.0, 0
            for (low, share), up, axis in zip(places, corner, self.axes, strict=True):
                weight *= share if up else 1 - share
                index = index * len(axis) + min(low + up, len(axis) - 1)
            total += weight * math.log(self.rates[index])
        return math.exp(total)


def _place(axis: tuple[int, ...], size: float) -> tuple[int, float]:
    """Return where the last size of an axis stands that is not above one, and how far it is to the next, 0 to 1."""
    size = min(max(size, axis[0]), axis[-1])
    low = max(at for at, each in enumerate(axis) if each <= size)
    if low == len(axis) - 1:
        return low, 0.0
    return low, math.log(size / axis[low]) / math.log(axis[low + 1] / axis[low])


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


class Part(NamedTuple):
    """An operation that was measured, at some sizes."""

    name: str
    sizes: tuple[int, ...]
    amount: float
    times: int

    def seconds(self, calibration: Calibration) -> float:
        """Return what it takes, all times together."""
        return self.times * self.amount / calibration.rates[self.name].at(*self.sizes)


def parts_of(work: Work, forward: bool, model: ModelConfig, shape: Shape) -> Iterator[Part]:
    """Yield what one work of a step consists of. forward: also one that the backward computes again."""
    C, n, N = model.channels, shape.rows, flat_size(model)
    backward = work.phase == "backward" and not forward
    name, times = work.operation, work.times

    def part(name: str, *sizes: int, times: int = times) -> Part:
        return Part(name, sizes, float(math.prod(sizes)), times)

    if name in ("qkv", "attproj", "fc", "fcproj", "head"):
        outputs, inputs = sizes(row_of("wte" if name == "head" else f"{name}w").shape, letters(model))
        yield part(LINEAR[backward], rows_at_once(shape) if name == "head" else n, inputs, outputs)
    elif name == "attention":
        heads, T = shape.batch * model.num_heads, shape.sequence
        yield Part(ATTENTION[backward], (heads, T, model.head_size), heads * T * T, times)
    elif name in ("ln1", "ln2", "lnf"):
        yield part(LAYERNORM[backward], n, C)
        if backward and name != "lnf" and shape.recompute >= 2 and not shape.recompute_blocks:
            yield part(LAYERNORM[0], n, C)
    elif name == "gelu":
        yield part(GELU[backward], n, 4 * C)
        if backward and shape.recompute and not shape.recompute_blocks:
            yield part(GELU[0], n, 4 * C)
    elif name == "classifier":
        yield part(CLASSIFIER, rows_at_once(shape), model.padded_vocab_size)
    elif name == "embedding":
        yield part(EMBEDDING if backward else COPY, *((n, C) if backward else (n * C,)))
    elif name == "gradient":
        yield part(COPY, N, times=times * (2 if shape.micro_batches > 1 else 1))
    elif name == "weights":
        yield part(COPY, N)
    elif work.phase == "update":
        yield part(NORM if name == "norm" else UPDATE, N // shape.devices if shape.stage else N)
