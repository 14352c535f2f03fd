"""How fast this CPU is, by twelve seconds of measuring: operations of ops/ and the update, each alone, in few sizes.

A CPU's rates depend on its clocks, its memory and its neighbours, so no table has them. What was measured is kept in
the cache folder for this CPU, these versions and these sources. It runs as a process of its own, with memory as
train.py has it. Leaves out what a step makes of the rates (cpu.py), and GPUs (efficiency.py).
"""

import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.child import Failed, answer_of
from llmc_jax.base.commands import ROOT
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, digest_of_files
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.machine.device import cpu_name, usable_cores
from llmc_jax.machine.jax_setup import child_environment
from llmc_jax.machine.versions import versions
from llmc_jax.plan import cpu
from llmc_jax.plan.cpu import Calibration, Rates
from llmc_jax.plan.interval import Interval
from llmc_jax.plan.separate import Say, kept

LONGEST = 600  # seconds that a calibration may take on a busy machine
VOCABULARY = 512  # rows of the table that an embedding's gradient is added to
TURNS, MOST_TURNS = 4, 10
STEADY = 1.1  # times the least time that an operation may usually take
CALM, FASTER = 0.05, 0.93  # a turn is calm where so few of all are so much faster than before
LOW, HIGH = 0.92, 1.15  # of the least time, what a step takes: an estimate; more where the turns differ by more
PATIENCE, RUNS = 0.012, 20  # seconds and runs for one size of one operation in a turn
MORE = 16  # times of one operation in a program, to tell the operation from the program
BLOCK = 2**24  # elements of an array that is too large for memory that is there already

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

    return {
        cpu.LINEAR[0]: Case(LINEAR, lambda n, i, o: (linear.linear_forward, full(n, i), full(o, i), full(o))),
        cpu.LINEAR[1]: Case(LINEAR, lambda n, i, o: (linear.linear_backward, full(n, o), full(n, i), full(o, i))),
        cpu.ATTENTION[0]: Case(ATTENTION, lambda heads, T, size: (
            partial(attention.attention_forward, num_heads=heads), full(1, T, 3 * heads * size))),
        cpu.ATTENTION[1]: Case(ATTENTION, attended),
        cpu.LAYERNORM[0]: Case(WIDTH, lambda n, C: (
            layernorm.residual_layernorm_forward, full(n, C), full(n, C), full(C), full(C))),
        cpu.LAYERNORM[1]: Case(WIDTH, normed),
        cpu.GELU[0]: Case(WIDTH, lambda n, C: (gelu.gelu_forward, full(n, C))),
        cpu.GELU[1]: Case(WIDTH, lambda n, C: (gelu.gelu_backward, full(n, C), full(n, C))),
        cpu.CLASSIFIER: Case(((64, 512), (512, 8192)), lambda n, V: (
            partial(classifier.classifier, vocab_size=V - 47), full(n, V), jnp.zeros(n, jnp.int32), wide(n))),
        cpu.EMBEDDING: Case(WIDTH, embedded),
        cpu.NORM: Case(BUFFER, lambda size: (global_norm, wide(size))),
        cpu.COPY: Case(BUFFER, lambda size: (_joined, full(size))),
        cpu.UPDATE: Case(BUFFER, lambda size: (_updated, *(wide(size) for _ in range(4)))),
    }  # fmt: skip


def _joined(x: Any) -> Any:
    """Return an array as its two halves, joined again: a copy."""
    import jax.numpy as jnp

    return jnp.concatenate([x[: x.size // 2], x[x.size // 2 :]])


def _updated(params: Any, m: Any, v: Any, gradient: Any) -> Any:
    """Return the parameters, m and v after an update."""
    import jax.numpy as jnp

    from llmc_jax.training.adamw import AdamWNumbers, adamw_update

    one = jnp.ones(())
    return adamw_update(
        params, m, v, gradient, scale=one, learning_rate=1e-3 * one, update=one, apply=one > 0,
        numbers=AdamWNumbers(0.9, 0.95, 1e-8, 0.1), decay=((0, params.size // 2),),
    )[:3]  # fmt: skip


# ----- measuring ------------------------------------------------------------------------------------------------------


def measure(dtype: str) -> Calibration:
    """Measure this CPU, in about twelve seconds."""
    import jax
    import jax.numpy as jnp

    cases, runs = _cases(dtype), dict[Any, Callable[[], Any]]()
    for name, case in cases.items():
        for sizes in itertools.product(*case.axes):
            function, *arguments = case.make(*sizes)
            runs[name, sizes] = partial(jax.jit(function), *arguments)
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
        return cpu.amount_of(name, sizes) / max(took - program, took / 3)

    rates = {
        name: Rates(case.axes, tuple(rate(name, sizes) for sizes in itertools.product(*case.axes)))
        for name, case in cases.items()
    }
    fresh = max(0.0, least["anew"] - least["kept"]) / (4 * BLOCK)
    spread = Interval(LOW, 1.0, max(HIGH, _usual(turns)))
    return Calibration(cpu_name(), len(usable_cores()), dtype, rates, program, fresh, spread)


def _repeated(times: int, x: Any) -> Any:
    """Return what an operation makes of its own result, some times in one program: of x its first."""
    import jax

    from llmc_jax.ops.gelu import gelu_forward

    for _ in range(times):
        x = jax.lax.optimization_barrier(gelu_forward(x))
    return x


def _turns(runs: dict[Any, Callable[[], Any]]) -> dict[Any, list[float]]:
    """Return the least seconds of each of some functions in each of several turns.

    Others may use the machine meanwhile. So there are turns until one has found few faster times than those before, and
    the usual times are near the least.
    """
    import jax

    for run in runs.values():
        jax.block_until_ready(run())
    found: dict[Any, list[float]] = {key: [] for key in runs}
    better = len(runs)
    while len(found["once"]) < TURNS or (
        len(found["once"]) < MOST_TURNS and (better > CALM * len(runs) or _usual(found) > STEADY)
    ):
        better = 0
        for key, run in runs.items():
            took = _one_turn(lambda run=run: jax.block_until_ready(run()))  # type: ignore[misc]
            better += bool(found[key]) and took < FASTER * min(found[key])
            found[key].append(took)
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


def calibration(dtype: str = "fp32", say: Say = lambda words: None, *, again: bool = False) -> Calibration:
    """Return what this CPU was measured to do; measured now, in a process of its own, if it has not been, or again.

    say: is told before it is measured. Raises InputError where that process fails.
    """
    root = ROOT / "llmc_jax"
    sources = [Path(__file__), Path(cpu.__file__), *(root / "ops").glob("*.py"), root / "training/adamw.py"]
    facts = [cpu_name(), len(usable_cores()), versions(), digest_of_files(sources), os.environ.get("XLA_FLAGS", "")]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "calibration" / f"{digest}_{dtype}.json"
    if again:
        with suppress(OSError):
            path.unlink()
    found: Calibration = kept(path, Calibration, lambda: _measured_apart(dtype, say))
    return found


def _measured_apart(dtype: str, say: Say) -> Calibration:
    say("measuring this CPU once, which takes some twelve seconds")
    environment = {**child_environment(), "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    try:
        found = answer_of("llmc_jax.plan.calibrate", [dtype], limit=LONGEST, environment=environment)
    except Failed as why:
        raise InputError(
            f"calibration of this CPU failed: {why}; try again when it is less busy, or give --gpu to plan for a GPU"
        ) from None
    calibration: Calibration = from_json(Calibration, found)
    return calibration


if __name__ == "__main__":
    print(json.dumps(to_json(measure(sys.argv[1]))))
