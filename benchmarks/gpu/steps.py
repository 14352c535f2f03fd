"""A training step as train.py makes it, on random weights and random text-like tokens: its time, memory and bits."""

import hashlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.solvers import target
from benchmarks.gpu.stepping import STEPS, seconds_of_a_step
from llmc_jax import kernels
from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import compiling
from llmc_jax.machine import device as hardware
from llmc_jax.machine.gpus import peak_flops
from llmc_jax.models.execution import Execution
from llmc_jax.models.layout import flat_size, num_parameters
from llmc_jax.models.work import flops_per_token
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.training.rules.adamw import AdamWNumbers
from llmc_jax.training.schedule import ScheduleNumbers
from llmc_jax.training.state import DTYPES, initial_state
from llmc_jax.training.step import StepNumbers, train_step
from llmc_jax.trials.children import Figures
from llmc_jax.trials.problems import skewed_tokens


class CompiledStep:
    """A step that is compiled and was made once, and its state."""

    def __init__(
        self,
        model: str,
        B: int,
        dtype: str,
        *,
        T: int = 1024,
        master_weights: bool = True,
        interpret: bool = False,
        options: compiling.Settings = (),
        **flags: Any,
    ) -> None:
        """options: of XLA, beside the plan's; flags: train.py's, of the execution."""
        self.config = parse_descriptor(model)
        self.plan, self.runs = choose(self.config, dtype, B, T, interpret, master_weights=master_weights, **flags)
        self.state: Any = initial_state(
            random_values(self.config), DTYPES[dtype], master_weights=master_weights,
            loss_scale=128.0 if dtype == "fp16" else None,
        )  # fmt: skip
        tokens = skewed_tokens((1, B, T + 1), self.config.vocab_size, seed=1)
        self._rest = jnp.asarray(tokens[..., :-1]), jnp.asarray(tokens[..., 1:]), step_numbers()
        start = time.perf_counter()
        lowered = train_step.lower(self.state, *self._rest, self.config, self.plan.step_options)
        self.compiled = compiling.compiled(lowered, (*self.plan.execution.compiler_options, *options))
        self.first_loss = self.run(1)
        self.first_seconds = time.perf_counter() - start

    def run(self, count: int) -> float:
        """Make so many steps, wait for the last and return its loss."""
        for _ in range(count):
            self.state, metrics = self.compiled(self.state, *self._rest)
        jax.block_until_ready(metrics)
        return float(metrics.loss)


def measure(
    model: str,
    B: int,
    dtype: str,
    *,
    T: int = 1024,
    steps: int = STEPS,
    digest_after: int = 0,
    cache: str = "",
    **flags: Any,
) -> Figures:
    """Tokens per second, both MFUs, seconds of the first call and peak memory; or, with digest_after, the bits of the
    losses and parameters after so many steps. flags: as `CompiledStep` takes them. cache: the parent's affair.
    """
    step = CompiledStep(model, B, dtype, T=T, **flags)
    if digest_after:
        return digest(step, digest_after) | {"runs": step.runs}
    seconds, spread = seconds_of_a_step(step.run, steps)
    return rates(step.config, B * T, T, seconds, dtype) | {
        "ms": 1e3 * seconds, "spread": spread, "first call s": step.first_seconds,
        "GiB": peak_gib(step.compiled), "loss": step.first_loss, "loss later": step.run(1),
        "runs": step.runs,
    }  # fmt: skip


def choose(config: ModelConfig, dtype: str, B: int, T: int, interpret: bool = False, **flags: Any) -> tuple[Plan, str]:
    """Return what train.py runs with these flags, and in words. A fallback is an error: its time would be believed.

    interpret: the kernels, simulated on a CPU.
    """
    run = TrainConfig(
        dtype=dtype, strict_kernels=not interpret, batch_size=B, sequence_length=T, weight_decay=0.1,
        **({"recompute": 0} | flags),
    )  # fmt: skip
    plan = make_plan(run, config, kernels.this_machine(), xla_flags=compiling.user_flags())
    if interpret:
        op, optimizer = kernels.assembled(kernels.pallas_functions(target(), True, dtype))
        return plan._replace(execution=Execution(op), optimizer=optimizer), "pallas, interpreted"
    names: dict[str, list[str]] = {}
    for choice in plan.choices:
        names.setdefault(choice.implementation, []).append(choice.operation)
    return plan, "; ".join(f"{text}: {', '.join(operations)}" for text, operations in names.items())


def random_values(config: ModelConfig) -> jax.Array:
    """A flat buffer (flat_size,) float32, made on the device: what a random start looks like, nearly."""
    used = jnp.arange(flat_size(config)) < num_parameters(config)
    return jnp.where(used, 0.02 * jax.random.normal(jax.random.key(0), used.shape, jnp.float32), 0.0)


def step_numbers() -> StepNumbers:
    """A schedule's numbers, all on the device."""

    def real(number: float) -> jax.Array:
        return jnp.asarray(number, jnp.float32)

    def count(number: int) -> jax.Array:
        return jnp.asarray(number, jnp.int32)

    schedule = ScheduleNumbers(real(1e-4), count(10), count(1000), real(0.0), count(1000), real(0.1))
    adamw = AdamWNumbers(real(0.9), real(0.95), real(1e-8), real(0.1))
    return jax.device_put(StepNumbers(schedule, adamw, real(1.0)))


def rates(config: ModelConfig, tokens: int, T: int, seconds: float, dtype: str) -> Figures:
    """Tokens per second, and MFU by both definitions where the peak is known."""
    found: Figures = {"tok/s": tokens / seconds}
    device = hardware.first_device()
    peak = peak_flops(device.device_kind, "tf32" if dtype == "fp32" else dtype)  # type: ignore[arg-type]
    for name, definition in (("PaLM MFU", "palm"), ("llm.c MFU", "llm.c")):
        flops = flops_per_token(config, T, definition=definition)  # type: ignore[arg-type]
        utilization = None if peak is None else flops * tokens / seconds / peak
        if utilization is not None:
            found[name] = utilization
    return found


def peak_gib(compiled: Any) -> float:
    """GiB that the device held at most; where it does not say, what the program needs."""
    peak = hardware.memory_stats().get("peak_bytes_in_use")
    if peak is None:
        memory = compiled.memory_analysis()
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return peak / 2**30


def digest(step: CompiledStep, count: int) -> Figures:
    """SHA-256 of the bits of all losses, and of parameters and AdamW's buffers, after `count` steps."""
    losses = [step.first_loss, *(step.run(1) for _ in range(count - 1))]
    hashed = hashlib.sha256()
    for array in (step.state.params, *step.state.buffers.values()):
        hashed.update(np.asarray(array).tobytes())
    return {
        "loss": losses[0],
        "loss later": losses[-1],
        "losses": hashlib.sha256(np.asarray(losses, np.float32).tobytes()).hexdigest()[:16],
        "state": hashed.hexdigest()[:16],
    }
