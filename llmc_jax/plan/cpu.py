"""The time of a step on this CPU, by three rates that are measured on it once, in some four seconds, and kept.

    products    take their FLOPs at the rate of a linear layer, forward and backward
    streams     take their bytes at the rate of the update: what passes over whole buffers, and computes little
    all else    takes its bytes at a rate of its own, as exponentials and sums over rows do: by what the gradient of a
                small model takes beside its products

The measuring is a process of its own, with memory as train.py has it. Leaves out GPUs (efficiency.py).
"""

import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.child import Failed, answer_of
from llmc_jax.base.commands import ROOT
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, digest_of_files
from llmc_jax.base.numbers import Interval
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.config.model import parse_descriptor
from llmc_jax.machine.device import cpu_name, usable_cores, versions
from llmc_jax.machine.jax_setup import TUNABLES, child_environment
from llmc_jax.models.work import Shape, Work, step_work
from llmc_jax.plan.efficiency import Roof
from llmc_jax.plan.separate import Say, kept


class Calibration(NamedTuple):
    """What was measured on one CPU."""

    device: str
    cores: int
    dtype: str  # that the model computed in
    flops: float  # FLOP/s of products
    streaming: float  # bytes per second of what passes over whole buffers
    computing: float  # bytes per second of all else
    spread: Interval  # of a time to what the rates say: others use the machine too

    @property
    def roof(self) -> Roof:
        """Return the best rates, as floors are computed with them."""
        return Roof(self.flops, self.streaming)

    def seconds(self, work: Work) -> float:
        """Return what a work takes."""
        return work.flops / self.flops + moved(work) / (self.streaming if streams(work) else self.computing)


WEIGHTS, FRESH = "weights", "fresh memory"  # what a program does beside the model's operations: it slices, it takes


def streams(work: Work) -> bool:
    """Return whether a work passes over whole buffers. Memory that is taken anew is filled once."""
    return work.phase == "update" or work.operation in (WEIGHTS, FRESH, "gradient")


def moved(work: Work) -> int:
    """Return the bytes of a work that take time: those of a product are in its rate, but for attention's."""
    return work.bytes if not work.flops or work.operation == "attention" else 0


# ----- measuring ------------------------------------------------------------------------------------------------------

LONGEST = 600  # seconds that a calibration may take on a busy machine
TURNS, PATIENCE = 12, 0.05  # turns, and seconds of one program in each
LOW, HIGH = 0.85, 1.2  # of what the rates say, what a step takes: an estimate; more where the turns differ by more
PRODUCT = 512, 512, 512  # rows, inputs, outputs
BUFFER = 2**22  # elements
MODEL, BATCH = "L2-NH4-C128-V512-T256", 4  # half of its time are no products


def measure(dtype: str) -> Calibration:
    """Measure this CPU, in about four seconds."""
    took = _turns(_programs(dtype))
    least = {name: min(seconds) for name, seconds in took.items()}
    flops = 6 * math.prod(PRODUCT) / least["product"]
    streaming = 28 * BUFFER / least["update"]  # three buffers both ways, and the gradient
    model = parse_descriptor(MODEL)
    shape = Shape(BATCH, model.max_seq_len, recompute=0, dtype=dtype)
    works = [work for work in step_work(model, shape) if work.phase != "update"]
    left = least["model"] - sum(work.flops / flops + streams(work) * moved(work) / streaming for work in works)
    computing = sum(moved(work) for work in works if not streams(work)) / max(left, least["model"] / 10)
    usual = statistics.median(statistics.median(seconds) / min(seconds) for seconds in took.values())
    spread = Interval(LOW, 1.0, max(HIGH, usual))
    return Calibration(cpu_name(), len(usable_cores()), dtype, flops, streaming, computing, spread)


def _programs(dtype: str) -> dict[str, Callable[[], Any]]:
    """Return what is measured, as functions without arguments."""
    import jax
    import jax.numpy as jnp

    from llmc_jax.machine import compiling
    from llmc_jax.machine.gpus import this_machine
    from llmc_jax.models import program
    from llmc_jax.models.layout import flat_size
    from llmc_jax.ops.linear import linear_backward, linear_forward
    from llmc_jax.training.rules.adamw import AdamWNumbers, adamw_update
    from llmc_jax.training.state import DTYPES

    def full(*shape: int, of: Any = DTYPES[dtype]) -> Any:
        return jnp.full(shape, 0.01, of)

    def product(x: Any, w: Any, dout: Any) -> Any:
        return linear_forward(x, w, None), linear_backward(dout, x, w)

    def update(params: Any, m: Any, v: Any, gradient: Any) -> Any:
        one = jnp.ones(())
        return adamw_update(
            params, m, v, gradient, scale=one, learning_rate=1e-3 * one, update=one, apply=one > 0,
            numbers=AdamWNumbers(0.9, 0.95, 1e-8, 0.1), decay=((0, BUFFER // 2),),
        )[:3]  # fmt: skip

    (n, inputs, outputs), model = PRODUCT, parse_descriptor(MODEL)
    gradient = jax.jit(jax.value_and_grad(partial(program.loss_fn, shape=model)))
    tokens = jnp.zeros((BATCH, model.max_seq_len), int)
    operands = full(n, inputs), full(outputs, inputs), full(n, outputs)
    buffers = [full(BUFFER, of=jnp.float32) for _ in range(4)]
    options = compiling.onednn(dtype, this_machine(), compiling.user_flags())
    return {
        "product": partial(compiling.call, jax.jit(product), operands, (), options),
        "update": partial(jax.jit(update), *buffers),
        "model": partial(compiling.call, gradient, (full(flat_size(model)), tokens, tokens), (), options),
    }


def _turns(runs: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the least seconds of each of some functions in each of several turns: others may use the machine too."""
    import jax

    def once(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start

    found: dict[str, list[float]] = {name: [] for name in runs if once(runs[name])}  # compiled now
    for _ in range(TURNS):
        for name, run in runs.items():
            until = time.perf_counter() + PATIENCE
            found[name].append(once(run))
            while time.perf_counter() < until:
                found[name][-1] = min(found[name][-1], once(run))
    return found


# ----- kept -----------------------------------------------------------------------------------------------------------


def calibration(dtype: str = "fp32", say: Say = lambda words: None) -> Calibration:
    """Return what this CPU was measured to do; measured now, in a process of its own, if it has not been.

    say: is told before it is measured. Raises InputError where that process fails.
    """
    root = ROOT / "llmc_jax"
    folders = ("ops", "models", "models/gpt2", "training")
    sources = [Path(__file__), *(path for name in folders for path in (root / name).glob("*.py"))]
    facts = [cpu_name(), len(usable_cores()), versions(), digest_of_files(sources), os.environ.get("XLA_FLAGS", "")]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / "calibration" / f"{digest}_{dtype}.json"
    found: Calibration = kept(path, Calibration, lambda: measured_apart(dtype, say))
    return found


def measured_apart(dtype: str, say: Say = lambda words: None) -> Calibration:
    """Measure this CPU in a process of its own. Raises InputError where that fails."""
    say("measuring this CPU once, which takes some four seconds")
    environment = {**child_environment(), "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": TUNABLES}
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
