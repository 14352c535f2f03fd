"""The time of a step on this CPU, by rates that are measured on it once, in some twelve seconds, and kept.

Operations of ops/ and the update are measured, each alone, in few sizes: between these rates are interpolated, beyond
them they stay. A step is made of those operations at its own sizes, and of what XLA's programs for CPUs do beside them:
the weights sliced out of the flat buffer, and memory for temporaries, which each step takes anew. The measuring is a
process of its own, with memory as train.py has it. Leaves out GPUs (efficiency.py).
"""

import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.child import Failed, answer_of
from llmc_jax.base.commands import ROOT
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, digest_of_files
from llmc_jax.base.numbers import Interval
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.config.model import ModelShape
from llmc_jax.machine.device import cpu_name, usable_cores, versions
from llmc_jax.machine.jax_setup import child_environment
from llmc_jax.models.layout import flat_size, head_spec, letters
from llmc_jax.models.tensors import sizes
from llmc_jax.models.work import COMPUTE_BYTES as ELEMENT
from llmc_jax.models.work import WHOLE, Shape, Work, row_of, rows_at_once
from llmc_jax.plan.efficiency import Roof
from llmc_jax.plan.separate import Say, kept

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
        bandwidth = 2 * ELEMENT[self.dtype] * max(self.rates["copy"].rates)
        return Roof(2 * max(self.rates["linear forward"].rates), bandwidth)


# ----- a step, made of what was measured ------------------------------------------------------------------------------

Part = tuple[str, tuple[int, ...], int]  # an operation that was measured, its sizes, and how often it runs


def seconds_of(part: Part, calibration: Calibration) -> float:
    """Return what an operation takes, all times together."""
    name, sizes, times = part
    return times * amount_of(name, sizes) / calibration.rates[name].at(*sizes)


def amount_of(name: str, sizes: tuple[int, ...]) -> float:
    """Return what the rate of an operation counts: the product of its sizes, of attention the scores B NH T T."""
    if name.startswith("attention"):
        heads, T, _ = sizes
        return float(heads * T * T)
    return float(math.prod(sizes))


def parts_of(work: Work, forward: bool, model: ModelShape, shape: Shape) -> Iterator[Part]:
    """Yield what one work of a step consists of. forward: also one that the backward computes again."""
    numbers, n, N = letters(model), shape.rows, flat_size(model)
    Vp, C = head_spec(model).shape
    backward = work.phase == "backward" and not forward
    again = shape.recompute if backward and not shape.recompute_blocks else 0
    name, times, way = work.operation, work.times, "backward" if backward else "forward"
    if name in ("qkv", "attproj", "fc", "fcproj", "head"):
        outputs, inputs = (Vp, C) if name == "head" else sizes(row_of(f"{name}w", model).shape, numbers)
        rows = rows_at_once(shape) if name == "head" else n
        yield f"linear {way}", (rows, inputs, outputs), times
    elif name == WHOLE:
        yield f"linear {way}", (n, C, max(1, work.flops // (2 * n * C * times * (2 if backward else 1)))), times
    elif name == "attention":
        yield f"attention {way}", (shape.batch * numbers["NH"], shape.sequence, C // numbers["NH"]), times
    elif name in ("ln1", "ln2", "lnf"):
        yield f"layernorm {way}", (n, C), times
        if again >= 2 and name != "lnf":
            yield "layernorm forward", (n, C), times
    elif name == "gelu":
        yield f"gelu {way}", (n, numbers["F"]), times
        if again:
            yield "gelu forward", (n, numbers["F"]), times
    elif name == "classifier":
        yield "classifier", (rows_at_once(shape), Vp), times
    elif name == "embedding":
        yield ("embedding", (n, C), times) if backward else ("copy", (n * C,), times)
    elif name == "gradient":
        yield "copy", (N,), times * (2 if shape.micro_batches > 1 else 1)
    elif name == "weights":
        yield "copy", (N,), times
    elif work.phase == "update":
        yield "norm" if name == "norm" else "adamw", (N // shape.devices if shape.stage else N,), times


# ----- what is measured -----------------------------------------------------------------------------------------------

VOCABULARY = 512  # rows of the table that an embedding's gradient is added to
ROWS, COLUMNS = (64, 256, 1024), (128, 768, 3072)
LINEAR = (ROWS, (128, 768), COLUMNS)
ATTENTION = ((4,), ROWS, (32, 128))  # B NH, T, HS
WIDTH = ((64, 1024), (128, 768))
BUFFER = ((2**16, 2**19, 2**22),)


class Case(NamedTuple):
    """An operation to be measured: over the product of some axes."""

    axes: tuple[tuple[int, ...], ...]
    make: Callable[..., tuple[Any, ...]]  # of the sizes: a function and its arguments


def _cases(dtype: str) -> dict[str, Case]:
    """Return what is measured. dtype: that the model computes in."""
    import jax.numpy as jnp

    from llmc_jax.ops import attention, classifier, embedding, gelu, layernorm, linear
    from llmc_jax.training.adamw import AdamWNumbers, adamw_update
    from llmc_jax.training.optimizer import global_norm
    from llmc_jax.training.state import DTYPES

    def full(*shape: int) -> Any:
        return jnp.full(shape, 0.5, DTYPES[dtype])

    def wide(*shape: int) -> Any:
        return jnp.full(shape, 0.5, jnp.float32)

    def attended(heads: int, T: int, size: int) -> tuple[Any, ...]:
        y, qkv, att = full(1, T, heads * size), full(1, T, 3 * heads * size), full(1, heads, T, T)
        return partial(attention.attention_backward, num_heads=heads), y, qkv, y, att

    def normed(n: int, C: int) -> tuple[Any, ...]:
        x = full(n, C)
        return layernorm.residual_layernorm_backward, x, x, x, full(C), wide(n), wide(n)

    def embedded(n: int, C: int) -> tuple[Any, ...]:
        tokens = (jnp.arange(n, dtype=jnp.int32) * 7919 % VOCABULARY).reshape(1, n)
        return embedding.embedding_backward, full(1, n, C), tokens, wide(VOCABULARY, C)

    def joined(x: Any) -> Any:
        return jnp.concatenate([x[: x.size // 2], x[x.size // 2 :]])

    def updated(params: Any, m: Any, v: Any, gradient: Any) -> Any:
        one = jnp.ones(())
        return adamw_update(
            params, m, v, gradient, scale=one, learning_rate=1e-3 * one, update=one, apply=one > 0,
            numbers=AdamWNumbers(0.9, 0.95, 1e-8, 0.1), decay=((0, params.size // 2),),
        )[:3]  # fmt: skip

    return {
        "linear forward": Case(LINEAR, lambda n, i, o: (linear.linear_forward, full(n, i), full(o, i), full(o))),
        "linear backward": Case(LINEAR, lambda n, i, o: (linear.linear_backward, full(n, o), full(n, i), full(o, i))),
        "attention forward": Case(ATTENTION, lambda heads, T, size: (
            partial(attention.attention_forward, num_heads=heads), full(1, T, 3 * heads * size))),
        "attention backward": Case(ATTENTION, attended),
        "layernorm forward": Case(WIDTH, lambda n, C: (
            layernorm.residual_layernorm_forward, full(n, C), full(n, C), full(C), full(C))),
        "layernorm backward": Case(WIDTH, normed),
        "gelu forward": Case(WIDTH, lambda n, C: (gelu.gelu_forward, full(n, C))),
        "gelu backward": Case(WIDTH, lambda n, C: (gelu.gelu_backward, full(n, C), full(n, C))),
        "classifier": Case(((64, 512), (512, 8192)), lambda n, V: (
            partial(classifier.classifier, vocab_size=V - 47), full(n, V), jnp.zeros(n, jnp.int32), wide(n))),
        "embedding": Case(WIDTH, embedded),
        "norm": Case(BUFFER, lambda size: (global_norm, wide(size))),
        "copy": Case(BUFFER, lambda size: (joined, full(size))),
        "adamw": Case(BUFFER, lambda size: (updated, *(wide(size) for _ in range(4)))),
    }  # fmt: skip


# ----- measuring ------------------------------------------------------------------------------------------------------

LONGEST = 600  # seconds that a calibration may take on a busy machine
TURNS, MOST_TURNS = 4, 10
STEADY = 1.1  # times the least time that an operation may usually take: until then there are more turns
HIGH, LOW = 1.15, 0.92  # of the least time, what a step takes: an estimate; more where the turns differ by more
PATIENCE, RUNS = 0.012, 20  # seconds and runs for one size of one operation in a turn
MORE = 16  # times of one operation in a program, to tell the operation from the program
BLOCK = 2**24  # elements of an array that is too large for memory that is there already


def measure(dtype: str) -> Calibration:
    """Measure this CPU, in about twelve seconds."""
    import jax
    import jax.numpy as jnp

    cases, runs = _cases(dtype), dict[Any, Callable[[], Any]]()
    for name, case in cases.items():
        for place in itertools.product(*case.axes):
            function, *arguments = case.make(*place)
            runs[name, place] = partial(jax.jit(function), *arguments)
    block, added = jnp.zeros(BLOCK), jax.jit(lambda x: x + 1)
    written = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = [jnp.zeros(BLOCK)]

    def in_place() -> Any:
        state[0] = written(state[0])
        return state[0]

    once, often = (partial(jax.jit(partial(_repeated, times)), jnp.ones((64, 768))) for times in (1, 1 + MORE))
    turns = _turns({**runs, "once": once, "often": often, "anew": partial(added, block), "kept": in_place})
    least = {key: min(found) for key, found in turns.items()}
    program = max(0.0, least["once"] - (least["often"] - least["once"]) / MORE)

    def rate(name: str, sizes: tuple[int, ...]) -> float:
        took = least[name, sizes]  # of it what any program takes is not its own
        return amount_of(name, sizes) / max(took - program, took / 3)

    rates = {
        name: Rates(case.axes, tuple(rate(name, sizes) for sizes in itertools.product(*case.axes)))
        for name, case in cases.items()
    }
    fresh = max(0.0, least["anew"] - least["kept"]) / (4 * BLOCK)
    spread = Interval(LOW, 1.0, max(HIGH, _usual(turns)))
    return Calibration(cpu_name(), len(usable_cores()), dtype, rates, program, fresh, spread)


def _repeated(times: int, x: Any) -> Any:
    """Return what an operation makes of its own result, some times in one program."""
    import jax

    from llmc_jax.ops.gelu import gelu_forward

    for _ in range(times):
        x = jax.lax.optimization_barrier(gelu_forward(x))
    return x


def _turns(runs: dict[Any, Callable[[], Any]]) -> dict[Any, list[float]]:
    """Return the least seconds of each of some functions in each of several turns.

    Others may use the machine meanwhile, so there are more turns until the usual times are near the least.
    """
    import jax

    for run in runs.values():
        jax.block_until_ready(run())
    found: dict[Any, list[float]] = {key: [] for key in runs}
    for turn in range(MOST_TURNS):
        if turn >= TURNS and _usual(found) <= STEADY:
            break
        for key, run in runs.items():
            found[key].append(_one_turn(lambda run=run: jax.block_until_ready(run())))  # type: ignore[misc]
    return found


def _usual(found: dict[Any, list[float]]) -> float:
    """Return how many times the least time an operation usually took."""
    return statistics.median(statistics.median(each) / min(each) for each in found.values())


def _one_turn(run: Callable[[], Any]) -> float:
    """Return the least seconds of a few runs."""
    spent, count, least = 0.0, 0, math.inf
    while count < 2 or (spent < PATIENCE and count < RUNS):
        start = time.perf_counter()
        run()
        took = time.perf_counter() - start
        spent, count, least = spent + took, count + 1, min(least, took)
    return least


# ----- kept -----------------------------------------------------------------------------------------------------------


def calibration(dtype: str = "fp32", say: Say = lambda words: None) -> Calibration:
    """Return what this CPU was measured to do; measured now, in a process of its own, if it has not been.

    say: is told before it is measured. Raises InputError where that process fails.
    """
    root = ROOT / "llmc_jax"
    sources = [Path(__file__), *(root / "ops").glob("*.py"), root / "training/adamw.py"]
    facts = [cpu_name(), len(usable_cores()), versions(), digest_of_files(sources), os.environ.get("XLA_FLAGS", "")]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "calibration" / f"{digest}_{dtype}.json"
    found: Calibration = kept(path, Calibration, lambda: measured_apart(dtype, say))
    return found


def measured_apart(dtype: str, say: Say = lambda words: None) -> Calibration:
    """Measure this CPU in a process of its own. Raises InputError where that fails."""
    say("measuring this CPU once, which takes some twelve seconds")
    environment = {**child_environment(), "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    try:
        found = answer_of("llmc_jax.plan.cpu", [dtype], limit=LONGEST, environment=environment)
    except Failed as why:
        raise InputError(
            f"calibration of this CPU failed: {why}; try again when it is less busy, or give --gpu to plan for a GPU"
        ) from None
    calibration: Calibration = from_json(Calibration, found)
    return calibration


if __name__ == "__main__":
    print(json.dumps(to_json(measure(sys.argv[1]))))
