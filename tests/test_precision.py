"""bf16 and fp16 against fp32, the weights they are kept in, stochastic rounding, loss scaling and accumulation.

u is half the distance from 1 to the next number of a dtype, the relative error of one rounding: 2^-8 in bf16, 2^-11 in
fp16. A gradient passes through some dozens of roundings whose errors are independent and add up as their root.
"""

import argparse
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.models.execution import PLAIN
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.layout import flat_size, views
from llmc_jax.training.optimizer import LossScale, LossScaleNumbers, next_loss_scale
from llmc_jax.training.rounding import round_stochastically, rounding_seed
from llmc_jax.training.state import TrainState, initial_state
from llmc_jax.training.step import Metrics, StepNumbers, StepOptions, batch_gradient, train_step
from tests import plain_model
from tests.comparisons import QUICK, Batch, gradient_errors, random_batch, skewed_tokens, step_numbers

U = {"bf16": 2.0**-8, "fp16": 2.0**-11}
DTYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
TINY = parse_descriptor("L1-NH2-C32-V97-T20")
T = 12  # of TINY's rows

loss_and_gradient = jax.jit(jax.value_and_grad(gpt2.loss_fn), static_argnums=(3, 4), compiler_options=QUICK)
gradient_of_batches = jax.jit(batch_gradient, static_argnums=(3, 4), compiler_options=QUICK)


@partial(jax.jit, static_argnums=1, compiler_options=QUICK)
def logits_of(weights: jax.Array, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    return gpt2.forward(views(weights, config), tokens, config)[0][..., : config.vocab_size]


@cache
def random_weights(config: ModelConfig) -> np.ndarray:
    """(flat_size,) float32, no bias zero and no layernorm weight one."""
    return plain_model.random_flat(config, flat_size(config), seed=0).astype(np.float32)


def tiny_batch(micro_batches: int = 1, rows: int = 8) -> Batch:
    """The same tokens, however they are cut."""
    tokens = skewed_tokens(3, TINY.vocab_size, (micro_batches, rows, T + 1))
    return Batch(tokens[..., :-1], tokens[..., 1:])


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def same_bits(found: Any, expected: Any) -> bool:
    found, expected = np.asarray(found), np.asarray(expected)
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


# --- one loss and gradient, beside fp32 ------------------------------------------------------------------------------

SMALL = parse_descriptor("L3-NH4-C128-V257-T64")


class Computed(NamedTuple):
    """What a model gives on one batch, in float64."""

    loss: float
    logits: np.ndarray  # (B, T, V)
    gradient: np.ndarray  # (flat_size,)


@cache
def computed(dtype: str) -> Computed:
    """SMALL in a dtype; fp16 with the usual loss scale."""
    weights = jnp.asarray(random_weights(SMALL), DTYPES.get(dtype, jnp.float32))
    inputs, targets = (tokens[0] for tokens in random_batch(SMALL.vocab_size, 1, 4, 64))
    scale = 128.0 if dtype == "fp16" else 1.0
    loss, gradient = loss_and_gradient(weights, inputs, targets, SMALL, PLAIN, scale)
    assert gradient.dtype == weights.dtype and loss.dtype == jnp.float32
    return Computed(float(loss) / scale, wide(logits_of(weights, SMALL, inputs)), wide(gradient) / scale)


def excess(found: Computed, expected: Computed, dtype: str) -> dict[str, float]:
    """How many times its tolerance each error is: the loss, the logits and the 16 gradients, norm-wise."""
    errors = gradient_errors((found.loss, found.gradient), (expected.loss, expected.gradient), SMALL)
    assert errors.pop("padding") == 0
    errors["logits"] = plain_model.relative_error(found.logits, expected.logits)
    tolerances = {"loss": U[dtype] / 8, "logits": 3 * U[dtype]}  # the loss is a mean over 256 positions
    return {name: error / tolerances.get(name, 4 * U[dtype]) for name, error in errors.items()}


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_loss_logits_and_gradients_are_fp32_s(dtype: str) -> None:
    """4 u is 1.6 % in bf16 and 0.2 % in fp16."""
    errors = excess(computed(dtype), computed("fp32"), dtype)
    assert len(errors) == 18 and max(errors.values()) <= 1, errors
    assert max(errors.values()) > 0.01, "this has not been computed in 16 bits"


def spoilt(name: str, change: Any) -> Computed:
    """bf16's result with one of its gradients changed."""
    found = computed("bf16")
    gradient = found.gradient.copy()
    view = plain_model.unflatten(gradient, SMALL)[name]
    view[...] = change(view)
    return found._replace(gradient=gradient)


@pytest.mark.parametrize("name", plain_model.shapes(SMALL))
def test_a_wrong_gradient_shows(name: str) -> None:
    expected = computed("fp32")
    changes = {
        "zero": lambda gradient: 0 * gradient,
        "shifted": lambda gradient: np.roll(gradient, 1, axis=-1),
        "5 % too large": lambda gradient: 1.05 * gradient,
    }
    if name == "attprojw":  # the square one
        changes["transposed"] = lambda gradient: gradient.swapaxes(1, 2).copy()
    for what, change in changes.items():
        assert excess(spoilt(name, change), expected, "bf16")[name] > 2, what


# --- the state -------------------------------------------------------------------------------------------------------


def numbers(lr: float, **given: float) -> StepNumbers:
    """A constant rate."""
    return step_numbers(lr=lr, warmup=0, total=1, final=1.0, **given)._replace(seed=np.uint32(1))


def options(rounding: str = "nearest") -> StepOptions:
    return StepOptions("constant", "matrices", PLAIN, rounding)


def run(
    state: TrainState, steps: int, numbers: StepNumbers, options: StepOptions, batch: Batch
) -> tuple[TrainState, Metrics]:
    for _ in range(steps):
        state, metrics = train_step(state, *batch, numbers, TINY, options)
    return state, metrics


def tiny_state(dtype: Any, **given: Any) -> TrainState:
    return initial_state(jnp.array(random_weights(TINY)), dtype, **given)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rounding"), [("bf16", "nearest"), ("fp16", "nearest"), ("bf16", "stochastic")])
def test_the_copy_is_the_master_weights_rounded(dtype: str, rounding: str) -> None:
    state = tiny_state(DTYPES[dtype], loss_scale=128.0 if dtype == "fp16" else None)
    assert state.params.dtype == jnp.float32 and state.weights is state.copy
    assert same_bits(state.copy, state.params.astype(DTYPES[dtype]))  # the first copy is rounded to nearest
    for step in range(4):
        state, metrics = train_step(state, *tiny_batch(), numbers(1e-3), TINY, options(rounding))
        assert bool(metrics.finite)
        nearest = state.params.astype(DTYPES[dtype])
        if rounding == "stochastic":
            noise = rounding_seed(jnp.uint32(1), jnp.int32(step))
            assert same_bits(state.copy, round_stochastically(state.params, noise))
            apart = wide(state.copy) - wide(state.params)
            spacing = 2 * U[dtype] * 2.0 ** np.floor(np.log2(np.maximum(np.abs(wide(state.params)), 1e-30)))
            assert (np.abs(apart) <= spacing).all() and 0.3 < (wide(state.copy) != wide(nearest)).mean() * 8 < 3
        else:
            assert same_bits(state.copy, nearest)
    assert not same_bits(state.params, state.copy.astype(jnp.float32))  # the masters know more


@pytest.mark.slow
@pytest.mark.parametrize("master_weights", [True, False])
def test_the_model_computes_with_the_copy(master_weights: bool) -> None:
    """What the masters know beyond bf16 has no influence on a step's loss and norm."""
    rounded = random_weights(TINY).astype(jnp.bfloat16)
    losses = []
    for flat in (random_weights(TINY), rounded.astype(np.float32)):
        state = initial_state(jnp.array(flat), jnp.bfloat16, master_weights=master_weights)
        assert (state.copy is None) == (not master_weights)
        assert state.params.dtype == (jnp.float32 if master_weights else jnp.bfloat16)
        assert state.weights.dtype == jnp.bfloat16
        assert {name: array.dtype for name, array in state.buffers.items()} == {"m": jnp.float32, "v": jnp.float32}
        _, metrics = run(state, 1, numbers(1e-3), options(), tiny_batch())
        losses.append((float(metrics.loss), float(metrics.norm)))
    assert losses[0] == losses[1]


# --- fp16's loss scale -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_overflow_halves_the_scale_and_changes_nothing_else() -> None:
    state, _ = run(tiny_state(jnp.float16, loss_scale=128.0), 2, numbers(1e-3), options(), tiny_batch())
    state = state._replace(loss_scale=LossScale(jnp.float32(2.0**30), jnp.int32(50)))
    before = jax.tree.map(np.array, state)
    state, metrics = run(state, 1, numbers(1e-3), options(), tiny_batch())
    assert not bool(metrics.finite)
    assert float(metrics.loss_scale) == 2.0**30  # that of the step, not of the next one
    assert np.isfinite(metrics.loss) and not np.isfinite(metrics.norm)
    for name in ("params", "m", "v", "copy"):
        assert same_bits(state.flat[name], before.flat[name]), name
    assert (int(state.step), int(state.updates)) == (3, int(before.updates))
    assert (float(state.loss_scale.scale), int(state.loss_scale.clean)) == (2.0**29, 0)


def test_the_scale_never_reaches_zero() -> None:
    """The loss is divided by it: at zero no step would be finite again."""
    scale = LossScale(jnp.float32(128), jnp.int32(0))
    for _ in range(300):
        scale = next_loss_scale(scale, jnp.bool_(False), LossScaleNumbers(100, 2.0))
    assert 0 < float(scale.scale) < 1e-4


@pytest.mark.parametrize(
    ("clean", "finite", "factor", "expected"),
    [
        (98, True, 2.0, (64.0, 99)),
        (99, True, 2.0, (128.0, 0)),
        (99, True, 4.0, (256.0, 0)),
        (99, False, 2.0, (32.0, 0)),
        (0, False, 4.0, (16.0, 0)),
        (99, True, 1.0, (64.0, 0)),
    ],
)
def test_how_the_scale_moves(clean: int, finite: bool, factor: float, expected: tuple[float, int]) -> None:
    scale = LossScale(jnp.float32(64), jnp.int32(clean))
    moved = next_loss_scale(scale, jnp.bool_(finite), LossScaleNumbers(100, factor))
    assert (float(moved.scale), int(moved.clean)) == expected
    assert (moved.scale.dtype, moved.clean.dtype) == (jnp.float32, jnp.int32)


@pytest.mark.slow
def test_loss_norm_and_update_are_unscaled() -> None:
    """A power of two in front of a loss changes no digit of a gradient that fp16 can hold with and without it."""
    results = []
    for scale in (1.0, 128.0, 1024.0):
        state, metrics = run(
            tiny_state(jnp.float16, loss_scale=scale), 1, numbers(1e-3, grad_clip=0.1), options(), tiny_batch()
        )
        results.append((float(metrics.loss), float(metrics.norm), wide(state.buffers["m"])))
    state = initial_state(jnp.array(random_weights(TINY).astype(np.float16).astype(np.float32)))
    state, metrics = run(state, 1, numbers(1e-3, grad_clip=0.1), options(), tiny_batch())
    assert float(metrics.norm) > 0.2  # it is clipped
    for loss, norm, m in results:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert loss == pytest.approx(float(metrics.loss), rel=U["fp16"] / 8)
        assert norm == pytest.approx(float(metrics.norm), rel=U["fp16"])
        assert plain_model.relative_error(m, wide(state.buffers["m"])) < 4 * U["fp16"]


# --- gradient accumulation -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_micro_batches_are_summed_in_float32() -> None:
    """The sum of eight bf16 gradients has the error of a float32 sum: a bf16 one would have 1000 times as much."""
    weights = jnp.asarray(random_weights(TINY), jnp.bfloat16)
    batch = tiny_batch(8, 1)
    loss, gradient = gradient_of_batches(weights, *batch, TINY, PLAIN, 8.0)  # 8 / 8: each counts as it is
    parts = [loss_and_gradient(weights, x, y, TINY, PLAIN, 1.0) for x, y in zip(*batch, strict=True)]
    exact = sum(wide(part) for _, part in parts)
    assert gradient.dtype == jnp.float32 and parts[0][1].dtype == weights.dtype
    assert float(loss) == pytest.approx(sum(float(part) for part, _ in parts), rel=1e-6)
    assert plain_model.relative_error(gradient, exact) < 1e-6
    narrow = parts[0][1]
    for _, part in parts[1:]:
        narrow = narrow + part
    assert plain_model.relative_error(wide(narrow), exact) > U["bf16"] / 4


# --- whole runs ------------------------------------------------------------------------------------------------------

RUN_B, RUN_T, RUN_STEPS = 8, 64, 100


def curve(text: np.ndarray, dtype: str, rounding: str = "nearest", **given: Any) -> np.ndarray:
    """Losses (RUN_STEPS,) of SMALL, trained on bytes from llm.c's initial weights."""
    rng = np.random.default_rng(5)
    flat = random_parameters(SMALL)
    state = initial_state(jnp.array(flat), DTYPES.get(dtype), **given)
    steps = step_numbers(lr=6e-4, warmup=20, total=RUN_STEPS, final=0.1, weight_decay=0.1, grad_clip=1.0)
    losses = []
    for _ in range(RUN_STEPS):
        starts = rng.integers(0, text.size - RUN_T - 1, RUN_B)
        rows = np.stack([text[start : start + RUN_T + 1] for start in starts])[None].astype(np.int32)
        state, metrics = train_step(
            state, rows[..., :-1], rows[..., 1:], steps, SMALL, StepOptions("cosine", "matrices", PLAIN, rounding)
        )
        losses.append(float(metrics.loss))
    return np.array(losses)


@pytest.fixture
def text() -> np.ndarray:
    """Bytes, as token ids. Not of made-up sentences in a dozen letters: with these even fp32's loss has spikes, whose
    place any rounding moves.
    """
    return np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)


@pytest.mark.slow
def test_the_losses_of_100_steps_are_fp32_s(text: np.ndarray) -> None:
    """In the mean of ten steps: a loss may leap at a single one, in fp32 too, and rounding decides how high."""

    def apart(losses: np.ndarray) -> float:
        assert np.abs(losses - fp32).max() > 1e-5  # it is another run
        return float(np.abs(losses.reshape(-1, 10).mean(1) / fp32.reshape(-1, 10).mean(1) - 1).max())

    fp32 = curve(text, "fp32")
    assert fp32[-10:].mean() < 0.6 * fp32[0]  # it learns
    assert apart(curve(text, "bf16")) < 0.005
    assert apart(curve(text, "fp16", loss_scale=128.0)) < 0.001
    assert apart(curve(text, "bf16", "stochastic", master_weights=False)) < 0.005
