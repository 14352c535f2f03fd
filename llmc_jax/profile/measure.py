"""The training step itself, compiled as train.py compiles it and timed, beside the machine's own rates.

Batches are random tokens and weights random numbers: neither changes what a step costs. Leaves out what the step
consists of (program.py, trace.py).
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax import hardware, kernels
from llmc_jax.config import ModelConfig, TrainConfig, check_model_fit
from llmc_jax.params import flat_size, num_parameters
from llmc_jax.profile.calculators import Shape, shape_of
from llmc_jax.profile.trace import recorded_step, start_recording
from llmc_jax.setup import (
    Setup,
    choose_execution,
    first_state,
    product_precision,
    resolve_dtype,
    resolve_model,
    storage_of,
)
from llmc_jax.step import batch_gradient, evaluate_loss, train_step
from llmc_jax.trainer import step_numbers, step_options

SCHEDULE_STEPS = 1000  # of the learning rate's course, which costs the same for any number


class Bench:
    """A step that is ready to run, and its state between runs."""

    def __init__(self, setup: Setup, state: Any) -> None:
        config = setup.config
        self.setup = setup
        self.model = setup.model.config
        self.shape = step_shape(setup)
        self.options = step_options(setup)
        self.numbers = jax.device_put(step_numbers(config, SCHEDULE_STEPS))
        rng = np.random.default_rng(0)
        tokens = (config.grad_accumulation, config.batch_size, config.sequence_length)  # (A, B, T)
        self.inputs = jnp.asarray(rng.integers(0, self.model.vocab_size, tokens), jnp.int32)
        self.targets = jnp.asarray(rng.integers(0, self.model.vocab_size, tokens), jnp.int32)
        self._state = state
        start = time.perf_counter()
        lowered = train_step.lower(state, self.inputs, self.targets, self.numbers, self.model, self.options)
        self.lower_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.setup.config.tokens_per_step

    def step(self) -> float:
        """Makes one step and returns its seconds."""
        start = time.perf_counter()
        self._state, metrics = self.compiled(self._state, self.inputs, self.targets, self.numbers)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start

    def steps(self, count: int, warm_up: int) -> list[float]:
        """The seconds of each of `count` steps, after some that are not counted."""
        for _ in range(warm_up):
            self.step()
        return [self.step() for _ in range(count)]

    def record(self, folder: Path, count: int) -> list[float]:
        """Makes some steps under the profiler, which writes into a folder; returns their seconds."""
        self.step()
        start_recording(folder)
        try:
            seconds = []
            for number in range(count):
                with recorded_step(number):
                    seconds.append(self.step())
        finally:
            jax.profiler.stop_trace()
        return seconds

    @property
    def weights(self) -> jax.Array:
        """The parameters that the model computes with."""
        return self._state.weights


def prepared(config: TrainConfig) -> Bench:
    """The step of a run's configuration, compiled. Raises InputError as train.py does for what cannot run here."""
    model = resolve_model(config)
    notes = check_model_fit(config, model.config)
    machine = kernels.this_machine()
    dtype = resolve_dtype(config, machine)
    execution, choices = choose_execution(config, model.config, machine, dtype)
    storage = storage_of(config, machine, dtype, execution, choices)
    hardware.check_fits(model.config, config.batch_size, config.sequence_length, storage)
    known: dict[str, Any] = {
        "config": config, "name": config.model, "model": model, "steps": SCHEDULE_STEPS,
        "device": hardware.describe_device(), "dtype": dtype, "execution": execution, "choices": choices,
        "has_tf32": machine.version >= (8, 0),
        "notes": notes, "warnings": [],
    }  # fmt: skip
    fields: dict[str, Any] = {name: known.get(name) for name in Setup._fields}  # what only a run has stays empty
    setup = Setup(**fields)
    return Bench(setup, first_state(random_values(model.config), config, dtype))


def random_values(model: ModelConfig) -> np.ndarray:
    """A flat buffer (flat_size,) of small random numbers, quickly: not the weights that a run begins with."""
    values = np.zeros(flat_size(model), np.float32)
    count = num_parameters(model)
    values[:count] = 0.02 * np.random.default_rng(0).standard_normal(count, np.float32)
    return values


def step_shape(setup: Setup) -> Shape:
    """What the calculators need of a run."""
    flash = not kernels.makes_matrix(setup.choices)
    return shape_of(setup.config, dtype=setup.dtype, flash=flash, logit_rows=setup.execution.logit_rows)


# ----- times --------------------------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of several runs, in short."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    least: float
    runs: int


def summary(seconds: Sequence[float]) -> Times:
    """Median, quartiles, least and number of some times."""
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return Times(statistics.median(seconds), low, high, min(seconds), len(seconds))


def times_of(run: Callable[[], Any], rounds: int) -> list[float]:
    """The seconds of some runs, after one that compiles and one that is not counted."""
    for _ in range(2):
        jax.block_until_ready(run())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return seconds


# ----- the machine's own rates --------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """What the roofline is drawn with."""

    flops: float  # FLOP/s of matrix products
    bandwidth: float  # bytes per second of a copy, read and write counted
    source: str  # where the two come from


def machine_rates(bench: Bench) -> Rates:
    """The peaks of a GPU from its table; of anything else what it reaches with the model's own products and a copy."""
    setup = bench.setup
    peak = hardware.peak_flops(setup.device.kind, product_precision(setup))
    if setup.device.platform != "cpu" and peak is not None:
        bandwidth = hardware.GPUS[setup.device.kind].bandwidth * 1e9
        return Rates(peak, bandwidth, f"peaks of {setup.device.kind} ({product_precision(setup)})")
    return Rates(product_rate(bench), copy_rate(), "measured here: the model's products alone, and a copy")


def product_rate(bench: Bench) -> float:
    """FLOP/s of the products of one block and of the head, forward, each alone, at its best of nine."""
    C, Vp = bench.model.channels, bench.model.padded_vocab_size
    n = bench.shape.rows
    dtype = bench.weights.dtype
    flops = seconds = 0.0
    multiply = jax.jit(lambda x, w: jnp.einsum("ni,oi->no", x, w, preferred_element_type=x.dtype))
    for inputs, outputs in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C), (C, Vp)):
        x = jnp.full((n, inputs), 0.5, dtype)
        w = jnp.full((outputs, inputs), 0.5, dtype)
        flops += 2 * n * inputs * outputs
        seconds += min(times_of(lambda x=x, w=w: multiply(x, w), 9))  # type: ignore[misc]
    return flops / seconds


def copy_rate(size: int = 1 << 28) -> float:
    """Bytes per second of reading an array of `size` bytes and writing another, at its best of nine."""
    x = jnp.ones(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x * 1.5)
    return 2 * size / min(times_of(lambda: copy(x), 9))


# ----- differences --------------------------------------------------------------------------------------------------


class Differences(NamedTuple):
    """Seconds of the parts of a step, as differences of programs that leave something out."""

    forward_layers: float
    forward_rest: float
    backward_layers: float
    backward_rest: float
    update: float


def differences(bench: Bench, rounds: int = 5) -> Differences:
    """Times of the step's parts without a trace: of the loss alone, of loss and gradient, and of the whole step, each
    with all layers and, the loss and the gradient, with half of them.

    Each time is the least of some. Each program is optimised as a whole, so a part may cost something else within the
    step; small parts may even come out negative.
    """
    L = bench.model.num_layers
    fewer = max(1, L // 2)
    loss, both = _loss_and_gradient_seconds(bench, bench.model, rounds)
    whole = min(bench.steps(rounds, 1))
    if fewer == L:
        return Differences(0.0, loss, 0.0, both - loss, whole - both)
    small = replace(bench.model, num_layers=fewer)
    small_loss, small_both = _loss_and_gradient_seconds(bench, small, rounds)
    forward = (loss - small_loss) * L / (L - fewer)
    backward = (both - small_both) * L / (L - fewer) - forward
    return Differences(forward, loss - forward, backward, both - loss - backward, whole - both)


def _loss_and_gradient_seconds(bench: Bench, model: ModelConfig, rounds: int) -> tuple[float, float]:
    weights = bench.weights[: flat_size(model)]
    execution = bench.setup.execution

    def losses() -> list[jax.Array]:
        pairs = zip(bench.inputs, bench.targets, strict=True)
        return [evaluate_loss(weights, inputs, targets, model, execution) for inputs, targets in pairs]

    gradient = jax.jit(lambda weights: batch_gradient(weights, bench.inputs, bench.targets, model, execution))
    return min(times_of(losses, rounds)), min(times_of(lambda: gradient(weights), rounds))


# ----- memory -------------------------------------------------------------------------------------------------------


class Used(NamedTuple):
    """Bytes that a step took, as the compiler and the machine say."""

    arguments: int  # of the program: the state and the batch
    overwritten: int  # of these, what the results are written over
    temporaries: int  # of the program, at their most
    peak: int | None  # of the device (GPU), or of this process with all it has loaded (CPU); None: not known


def memory_used(bench: Bench) -> Used:
    """What the compiled step takes. Call it after some steps: the peak is the highest so far."""
    analysis: Any = bench.compiled.memory_analysis()
    return Used(
        arguments=analysis.argument_size_in_bytes,
        overwritten=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        peak=_peak_bytes(bench.setup.device.platform),
    )


def _peak_bytes(platform: str) -> int | None:
    if platform != "cpu":
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
