"""What several test files share: small batches, our gradients and runs beside those of the plain model.

The functions look the operations up when they are called and trace anew, so that test_mutations.py can spoil one of
them and see the same comparison fail.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.models.layout import flat_size
from llmc_jax.training import optimizer, state, step
from llmc_jax.training.rules import adamw
from llmc_jax.training.rules.adamw import AdamWNumbers
from llmc_jax.training.schedule import ScheduleNumbers
from llmc_jax.training.step import StepNumbers, StepOptions
from tests import plain_model

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # half the time to compile
GRADIENT_TOLERANCE = 1e-9  # relative, per tensor, in float64
ADAMW_TOLERANCE = 1e-12


@cache
def interpreted(kernel: Callable[..., Any], *static: str) -> Callable[..., Any]:
    """Return a kernel in interpret mode, as one program for each shape; static: its arguments that are no arrays."""
    return jax.jit(partial(kernel, interpret=True), static_argnames=static, compiler_options=QUICK)


class Batch(NamedTuple):
    """Tokens of one update, int32."""

    inputs: np.ndarray  # (A, B, T)
    targets: np.ndarray  # (A, B, T)


class GradientCase(NamedTuple):
    """A model and a batch whose gradients are compared."""

    config: ModelConfig
    A: int
    B: int
    T: int
    execution: Execution = PLAIN


def random_batch(vocab_size: int, A: int, B: int, T: int, seed: int = 0) -> Batch:
    """Uniformly random tokens; the last row begins with the first and the last id."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (A, B, T + 1)).astype(np.int32)
    tokens[-1, -1, :2] = (0, vocab_size - 1)
    return Batch(tokens[..., :-1], tokens[..., 1:])


@lru_cache(maxsize=1)  # the largest takes a second
def case_inputs(case: GradientCase) -> tuple[np.ndarray, Batch]:
    """Random parameters (flat_size,) float64 and a batch."""
    flat = plain_model.random_flat(case.config, flat_size(case.config), seed=case.T)
    return flat, random_batch(case.config.vocab_size, case.A, case.B, case.T)


def gradient_of(case: GradientCase, loss: Callable[..., jax.Array]) -> tuple[float, np.ndarray]:
    """A loss of (flat, tokens, targets) and its flat gradient by `jax.grad`, all rows in one batch, float64."""
    flat, batch = case_inputs(case)
    rows = (batch.inputs.reshape(-1, case.T), batch.targets.reshape(-1, case.T))
    with jax.enable_x64(True):
        value, gradient = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(flat, *rows)
        return float(value), np.asarray(gradient)


def expected_gradient(case: GradientCase) -> tuple[float, np.ndarray]:
    """The plain model's."""
    return gradient_of(case, lambda *given: plain_model.loss(*given, case.config))


def loss_fn_gradient(case: GradientCase) -> tuple[float, np.ndarray]:
    """Ours."""
    return gradient_of(case, lambda *given: gpt2.loss_fn(*given, case.config, case.execution))


def batch_gradient(case: GradientCase) -> tuple[float, np.ndarray]:
    """Ours through `step.batch_gradient`, A micro-batches, float64."""
    flat, batch = case_inputs(case)
    with jax.enable_x64(True):
        compiled = jax.jit(step.batch_gradient, static_argnums=(3, 4), compiler_options=QUICK)
        value, gradient = compiled(flat, *batch, case.config, case.execution)
        return float(value), np.asarray(gradient)


def gradient_errors(
    found: tuple[float, np.ndarray], expected: tuple[float, np.ndarray], config: ModelConfig
) -> dict[str, float]:
    """Relative error of the loss and, norm-wise, of each of the 16 gradients; 'padding' of what follows them."""
    errors = {"loss": abs(found[0] - expected[0]) / abs(expected[0])}
    ours, theirs = plain_model.unflatten(found[1], config), plain_model.unflatten(expected[1], config)
    for name, gradient in theirs.items():
        errors[name] = plain_model.relative_error(ours[name], gradient)
    used = sum(gradient.size for gradient in theirs.values())
    errors["padding"] = float(np.abs(found[1][used:]).max(initial=0.0))
    return errors


def adamw_errors(decay_rule: str, config: ModelConfig, dtype: Any, updates: int = 6) -> dict[str, float]:
    """Relative errors of params, m and v after several updates by random gradients, beside the plain AdamW."""
    rng = np.random.default_rng(3)
    size = flat_size(config)
    start = plain_model.random_flat(config, size, seed=1).astype(dtype)
    plain = (start.astype(np.float64), np.zeros(size), np.zeros(size))
    mask = plain_model.decay_mask(config, decay_rule)
    mask = np.pad(mask, (0, size - mask.size))
    numbers = AdamWNumbers(beta1=0.9, beta2=0.98, eps=1e-6, weight_decay=0.3)
    ranges = () if decay_rule == "none" else optimizer.decay_ranges(config, decay_rule)
    adamw_update = adamw.adamw_update

    @jax.jit
    def ours_next(ours: tuple[jax.Array, ...], gradient: jax.Array, update: jax.Array, rate: jax.Array) -> Any:
        return adamw_update(
            *ours, gradient, scale=jnp.asarray(0.5, dtype), learning_rate=rate, update=update,
            apply=jnp.array(True), numbers=numbers, decay=ranges,
        )[:3]  # fmt: skip

    with jax.enable_x64(dtype == np.float64):
        ours = tuple(jnp.asarray(array, dtype) for array in plain)
        for update in range(1, updates + 1):
            gradient = rng.normal(0.0, 10.0 ** rng.uniform(-3, 1, size), size).astype(dtype)
            rate = 0.01 / update
            ours = ours_next(ours, gradient, np.int32(update), np.asarray(rate, dtype))
            plain = plain_model.adamw(
                *plain, 0.5 * gradient.astype(np.float64), update=update, learning_rate=rate,
                beta1=0.9, beta2=0.98, eps=1e-6, decay=0.3 * mask,
            )  # fmt: skip
        found = [np.asarray(array) for array in ours]
    return {name: plain_model.relative_error(*pair) for name, *pair in zip("pmv", found, plain, strict=True)}


class Run(NamedTuple):
    """What a training run reports."""

    losses: np.ndarray  # (S,)
    norms: np.ndarray  # (S,)
    rates: np.ndarray  # (S,)
    state: state.TrainState


def step_numbers(
    *, lr: float, warmup: int, total: int, final: float, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8,
    weight_decay: float = 0.0, grad_clip: float = 0.0, step_every: int = 1, step_factor: float = 1.0,
) -> StepNumbers:  # fmt: skip
    """The numbers of a run as the arrays that a trainer would pass, in the precision that is in force."""

    def real(value: float) -> jax.Array:
        return jnp.asarray(value, jnp.result_type(float))

    schedule = ScheduleNumbers(real(lr), warmup, total, real(final), step_every, real(step_factor))
    numbers = AdamWNumbers(real(beta1), real(beta2), real(eps), real(weight_decay))
    return StepNumbers(schedule, numbers, real(grad_clip))


def train(
    flat: np.ndarray, batches: list[Batch], numbers: StepNumbers, config: ModelConfig, options: StepOptions,
    step_function: Any = None,
) -> Run:  # fmt: skip
    """One step per batch from flat parameters (flat_size,), with `train_step` or another of its signature."""
    step_function = step_function or step.train_step
    now, metrics = state.initial_state(jnp.asarray(flat)), []
    for batch in batches:
        now, reported = step_function(now, *batch, numbers, config, options)
        metrics.append(reported)
    columns = [np.array([float(value) for value in column]) for column in zip(*metrics, strict=True)]
    return Run(columns[0], columns[1], columns[2], now)


def fresh_step() -> Any:
    """The step compiled anew, quickly: what a mutation test calls instead of `train_step`."""
    return jax.jit(lambda *args: step.step_fn(*args), static_argnums=(4, 5), compiler_options=QUICK)


def skewed_tokens(seed: int, vocab_size: int, shape: tuple[int, ...]) -> np.ndarray:
    """Tokens (*shape) int32 that can be learned: frequencies fall as 1/rank, ranks in random order.

    From numpy.random.RandomState, whose stream NumPy promises never to change.
    """
    rng = np.random.RandomState(seed)
    order = rng.permutation(vocab_size)
    share = np.cumsum(1.0 / np.arange(1, vocab_size + 1))
    ranks = np.searchsorted(share / share[-1], rng.random_sample(shape), side="right")
    return order[np.minimum(ranks, vocab_size - 1)].astype(np.int32)
