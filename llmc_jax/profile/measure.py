"""The training step itself, compiled as train.py compiles it and timed, beside the machine's own rates.

Batches are random tokens and weights random numbers: neither changes what a step costs. Leaves out what the step
consists of (plan/program.py, trace.py).
"""

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import compiling
from llmc_jax.machine.device import Device, cache_bytes, memory_stats
from llmc_jax.machine.gpus import peak_flops
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters
from llmc_jax.plan.asked import checked_model
from llmc_jax.plan.efficiency import Roof, gpu
from llmc_jax.plan.fits import check_fits
from llmc_jax.plan.plan import Plan, step_numbers
from llmc_jax.run.record import slice_trace
from llmc_jax.run.resume import repeated
from llmc_jax.run.weights import first_state
from llmc_jax.training.step import train_step
from llmc_jax.trials import here

PATIENCE = 1.0  # seconds after which three runs of a product are enough
ROW = 4096  # elements that are summed to one
SCHEDULE_STEPS = 1000  # of the learning rate's course, which costs the same for any number


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
        self.numbers = jax.device_put(step_numbers(config, plan.optimizer, SCHEDULE_STEPS))
        rng = np.random.default_rng(0)
        tokens = (config.grad_accumulation, config.batch_size, config.sequence_length)  # (A, B, T)
        self.inputs = jnp.asarray(rng.integers(0, self.model.vocab_size, tokens), jnp.int32)
        self.targets = jnp.asarray(rng.integers(0, self.model.vocab_size, tokens), jnp.int32)
        self._state = first_state(random_values(plan.model), plan)
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

    @property
    def tokens(self) -> int:
        """Return the tokens of one step."""
        return self.plan.config.tokens_per_step

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

    @property
    def dtype(self) -> Any:
        """Return the dtype of the parameters that the model computes with."""
        return self._state.weights.dtype


def prepared(config: TrainConfig) -> Bench:
    """Return the compiled step of a configuration. Raises InputError as train.py does for what cannot run here."""
    model = checked_model(config)
    before = repeated(config, None)
    found = here.facts(config, here.try_kernels(config, model, before))
    plan = here.plan_with(found, config, model, before)
    check_fits(plan)
    return Bench(plan, found.device)


def random_values(model: ModelConfig) -> np.ndarray:
    """Return a flat buffer (flat_size,) of small random numbers, quickly: not the weights that a run begins with."""
    values = np.zeros(flat_size(model), np.float32)
    count = num_parameters(model)
    values[:count] = 0.02 * np.random.default_rng(0).standard_normal(count, np.float32)
    return values


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
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return Times(statistics.median(seconds), low, high, min(seconds), len(seconds))


def least_time(run: Callable[[], Any]) -> float:
    """Return the least seconds of up to nine runs, after one that compiles and one that is not counted."""
    for _ in range(2):
        jax.block_until_ready(run())
    seconds: list[float] = []
    while len(seconds) < 9 and (len(seconds) < 3 or sum(seconds) < PATIENCE):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# ----- the machine's own rates --------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """What the roofline is drawn with: the best of each."""

    flops: float  # FLOP/s of the fastest product
    products: float  # FLOP/s of all the model's products one after the other, attention's left out
    memory: float  # bytes per second to and from memory
    reading: float  # where nothing is written
    array_bytes: int = 0  # of an array that memory was measured with
    cache: int | None = None  # bytes of the caches; None: not known
    measured: bool = True  # here; otherwise peaks from the table of GPUs

    @property
    def roof(self) -> Roof:
        return Roof(self.flops, self.memory, self.reading, self.cache)


def machine_rates(bench: Bench) -> Rates:
    """Return the peaks of a GPU from its table; of anything else what its products and its memory reach at best."""
    device = bench.device
    peak = peak_flops(device.kind, bench.plan.product_precision)
    if device.platform != "cpu" and peak is not None:
        roof = gpu(device.kind, bench.plan.product_precision).roof
        return Rates(roof.flops, peak, roof.bandwidth, roof.reading, cache=roof.cache, measured=False)
    cache = cache_bytes()
    fastest, together = product_rates(bench)
    memory, reading, size = memory_rates(array_bytes(cache, device.memory_bytes))
    return Rates(fastest, together, memory, reading, size, cache if device.platform == "cpu" else None)


def better(first: Rates, second: Rates) -> Rates:
    """Return the higher of each rate of two looks at the same machine, which others may use as well."""
    return first._replace(**{name: max(getattr(first, name), getattr(second, name)) for name in Rates._fields[:4]})


def product_rates(bench: Bench) -> tuple[float, float]:
    """Return the FLOP/s of the fastest and of all products of one step, each alone, at its best.

    Of each weight matrix there are three: forward, and the gradients of the input and of the weights.
    """
    C, Vp, L = bench.model.channels, bench.model.padded_vocab_size, bench.model.num_layers
    n = bench.shape.rows
    dtype = bench.dtype
    fastest = flops = seconds = 0.0
    for inputs, outputs, count in ((C, 3 * C, L), (C, C, L), (C, 4 * C, L), (4 * C, C, L), (C, Vp, 1)):
        x, y, w = (jnp.full(shape, 0.5, dtype) for shape in ((n, inputs), (n, outputs), (outputs, inputs)))
        for form, a, b in (("ni,oi->no", x, w), ("no,oi->ni", y, w), ("no,ni->oi", y, x)):
            best = least_time(partial(_product, form, a, b))
            work = 2 * n * inputs * outputs
            fastest = max(fastest, work / best)
            flops, seconds = flops + count * work, seconds + count * best
    return fastest, flops / seconds


@partial(jax.jit, static_argnums=0)
def _product(form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(form, a, b, preferred_element_type=a.dtype)


def array_bytes(cache: int, memory: int | None) -> int:
    """Return the size of an array to measure memory with: at least four times the caches, where there is room."""
    wanted = max(4 * cache, 1 << 28)
    return wanted if memory is None else min(wanted, memory // 8)


# Arrays that each reads and writes, and a program. In place, by donation: an array that is allocated anew is mapped
# page by page, which takes longer than the copy.
WAYS = {
    "scale": (2, jax.jit(lambda x, y: x * 1.0001, donate_argnums=0)),
    "add": (3, jax.jit(lambda x, y: x + y, donate_argnums=0)),
    "read": (1, jax.jit(lambda x, y: jnp.sum(y.reshape(-1, ROW), axis=1))),
}


def memory_rates(size: int, rounds: int = 15) -> tuple[float, float, int]:
    """Measure memory with arrays of `size` bytes: scaled in place, added to in place, and only read, in turns.

    Returns the best bytes per second of all, of only reading, and an array's bytes.
    """
    count = size // 4 // ROW * ROW
    x, y = jnp.full(count, 0.5, jnp.float32), jnp.full(count, 0.5, jnp.float32)
    best = dict.fromkeys(WAYS, 0.0)
    for number in range(rounds + 2):
        for name, (arrays, run) in WAYS.items():
            start = time.perf_counter()
            result = jax.block_until_ready(run(x, y))
            seconds = time.perf_counter() - start
            x = x if name == "read" else result
            if number >= 2:  # before, it compiles and warms up
                best[name] = max(best[name], arrays * 4 * count / seconds)
    return max(best.values()), best["read"], 4 * count


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
