"""The training step itself, compiled as train.py compiles it and timed.

Batches are random tokens and weights random numbers: neither changes what a step costs. Leaves out what the step
consists of (plan/program.py, trace.py).
"""

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import compiling
from llmc_jax.machine.algorithms import kept
from llmc_jax.machine.device import Device, memory_stats
from llmc_jax.machine.gpus import peak_flops
from llmc_jax.machine.jax_setup import keep_freed
from llmc_jax.plan.asked import checked_model
from llmc_jax.plan.cpu import calibration
from llmc_jax.plan.efficiency import Roof, gpu
from llmc_jax.plan.fits import check_fits
from llmc_jax.plan.plan import Plan, step_numbers
from llmc_jax.plan.separate import Say
from llmc_jax.run.fitting import step_bytes
from llmc_jax.run.record import slice_trace
from llmc_jax.run.resume import repeated
from llmc_jax.run.weights import first_state
from llmc_jax.training.step import train_step
from llmc_jax.trials import here, problems


class Bench:
    """A step that is ready to run, and its state between runs.

    compiled: the program of the step. traced: the same, in the form that is recorded: without CUDA graphs.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        config = plan.config
        self.plan = plan
        self.device = device
        self.model = plan.model
        self.shape = plan.shape
        self.tokens = config.tokens_per_step
        self.numbers = jax.device_put(step_numbers(config, plan.optimizer, steps=1000))
        rng = np.random.default_rng(0)
        tokens = (config.grad_accumulation, config.batch_size, config.sequence_length)  # (A, B, T)
        self.inputs = jnp.asarray(rng.integers(0, self.model.vocab_size, tokens), jnp.int32)
        self.targets = jnp.asarray(rng.integers(0, self.model.vocab_size, tokens), jnp.int32)
        self._state = first_state(np.asarray(problems.random_weights(plan.model)), plan)
        start = time.perf_counter()
        lowered = train_step.lower(*self._arguments, self.model, plan.step_options)
        self.lower_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self._algorithms = tempfile.TemporaryDirectory()  # both programs take their products' algorithms from there
        shared = ((compiling.ALGORITHMS, self._algorithms.name),) if device.platform == "gpu" else ()
        self._compile = partial(compiling.compiled, lowered)
        self._options: compiling.Settings = (*plan.execution.compiler_options, *shared)
        self.compiled = self.traced = self._compile(self._options)
        self.compile_seconds = time.perf_counter() - start
        keep_freed(device, step_bytes(self.compiled))

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self._state, self.inputs, self.targets, self.numbers

    def step(self, program: Any = None) -> float:
        """Make one step and return its seconds. program: None for the compiled one."""
        start = time.perf_counter()
        self._state, metrics = (program or self.compiled)(*self._arguments)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start

    def steps(self, count: int, warm_up: int) -> list[float]:
        """Return the seconds of each of `count` steps, after some that are not counted."""
        for _ in range(warm_up):
            self.step()
        return [self.step() for _ in range(count)]

    def record(self, folder: Path, count: int) -> None:
        """Make some steps of the traced program under the profiler, which writes into a folder."""
        if without := compiling.without_graphs(self.device.platform, self.plan.xla_flags):
            self.traced = self._compile((*self._options, *without))
        self.step(self.traced)
        with slice_trace(folder, 0, count) as tick:
            for number in range(count):
                tick(number)
                self.step(self.traced)


def prepared(config: TrainConfig) -> Bench:
    """Return the compiled step of a configuration. Raises InputError as train.py does for what cannot run here."""
    model, config = checked_model(config), replace(config, algorithms=kept(config.algorithms))
    before = repeated(config, None)
    found = here.facts(config, here.try_kernels(config, model, before))
    plan = here.plan_with(found, config, model, before)
    check_fits(plan)
    return Bench(plan, found.device)


# ----- times --------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of several runs, in short."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    least: float
    runs: int


def summary(seconds: Sequence[float]) -> Times:
    """Return the median, quartiles, least and number of some times."""
    low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
    return Times(median, low, high, min(seconds), len(seconds))


# ----- the machine's own rates --------------------------------------------------------------------------------------


def roof_of(bench: Bench, say: Say) -> Roof | None:
    """Return the peaks of a GPU from the table of GPUs, or the best rates of this CPU; None: not known.

    say: is told before a CPU is measured, which happens once.
    """
    device, precision = bench.device, bench.plan.product_precision
    if device.platform == "cpu":
        return calibration(bench.plan.dtype, say).roof
    known = device.platform == "gpu" and peak_flops(device.kind, precision) is not None
    return gpu(device.kind, precision).roof if known else None


# ----- memory -------------------------------------------------------------------------------------------------------


class Used(NamedTuple):
    """Bytes that a step took, as the compiler and the machine say."""

    arguments: int  # of the program: the state and the batch
    overwritten: int  # of these, what the results are written over
    temporaries: int  # of the program, at their most
    peak: int | None  # of the device (GPU), or of this process with all it has loaded (CPU); None: not known


def memory_used(bench: Bench) -> Used:
    """Return what the compiled step takes. Call it after some steps: the peak is the highest so far."""
    if bench.device.platform == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        peak: int | None = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    else:
        peak = memory_stats().get("peak_bytes_in_use")
    found: Any = bench.compiled.memory_analysis()
    return Used(found.argument_size_in_bytes, found.alias_size_in_bytes, found.temp_size_in_bytes, peak)
