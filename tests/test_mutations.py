"""Proof that the comparisons with independent programs can fail: each mistake below makes one exceed its tolerance.

A mistake is put into the operations by monkeypatching and the comparison of test_gpt2.py, test_optimizer.py or
test_golden.py is run again, compiled anew or operation by operation. Without a mistake the same comparisons hold; that
is tested too.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax import kernels
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.ops import attention, layernorm
from llmc_jax.training import optimizer, step
from llmc_jax.training.rules import adamw
from tests.comparisons import (
    ADAMW_TOLERANCE,
    GRADIENT_TOLERANCE,
    GradientCase,
    adamw_errors,
    expected_gradient,
    fresh_step,
    gradient_errors,
    loss_fn_gradient,
)
from tests.test_golden import GOLDEN, load_torch, repeat_recorded, repeat_torch

CASE = GradientCase(ModelConfig(9, 13, 16, 1, 2, 8), 1, 2, 6)
Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]


def replaced(module: Any, **names: Any) -> SimpleNamespace:
    """A stand-in for a module, some of whose names are others."""
    return SimpleNamespace(**(vars(module) | names))


def with_operations(patch: Patch, **wrong: Any) -> None:
    """XLA's operations, some of them wrong, in every Execution that the comparisons use."""
    op = kernels.XLA._replace(**wrong)
    right = gpt2.loss_fn
    patch.setattr(
        gpt2,
        "loss_fn",
        lambda flat, x, y, config, execution, *weight: right(flat, x, y, config, execution._replace(op=op), *weight),
    )


def no_attention_scale(patch: Patch) -> None:
    patch.setattr(attention, "math", SimpleNamespace(sqrt=lambda _: 1.0))


def no_mask(patch: Patch) -> None:
    patch.setattr(attention, "jnp", replaced(jnp, where=lambda _mask, score, _infinity: score))


def no_scale_in_the_backward(patch: Patch) -> None:
    """The forward is right: only a gradient shows it."""
    right, HS = attention.attention_backward, CASE.config.head_size

    def wrong(dout: jax.Array, *saved: Any) -> Any:
        dqkv, dbias = right(dout, *saved)
        dqk, dv = jnp.split(dqkv, [2 * dout.shape[-1]], axis=-1)
        return jnp.concatenate([dqk * HS**0.5, dv], axis=-1), dbias

    with_operations(patch, attention_backward=wrong)


def exact_gelu(patch: Patch) -> None:
    def gelu(x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x, approximate=False)

    def backward(dout: jax.Array, x: jax.Array) -> Any:
        (dx,) = jax.vjp(gelu, x)[1](dout)
        return dx, jnp.sum(dx, (0, 1))

    with_operations(patch, gelu_forward=gelu, gelu_backward=backward)


def large_eps(patch: Patch) -> None:
    patch.setattr(layernorm, "EPS", 1e-3)


def no_path_through_the_mean(patch: Patch) -> None:
    """The last layernorm's backward without its second term, which is the mean of dnorm times rstd."""
    right = layernorm.layernorm_backward

    def wrong(dout: Any, x: Any, w: Any, mean: Any, rstd: Any) -> Any:
        dx, *sums = right(dout, x, w, mean, rstd)
        return dx + rstd[..., None] * jnp.mean(dout * w, axis=-1, keepdims=True), *sums

    with_operations(patch, layernorm_backward=wrong)


def stream_ends_at_the_layernorm(patch: Patch) -> None:
    """The gradient that goes straight down the residual stream is forgotten."""
    right = layernorm.residual_layernorm_backward
    with_operations(patch, residual_layernorm_backward=lambda dresidual, *rest: right(0 * dresidual, *rest))


def no_sum_of_gelus_gradient(patch: Patch) -> None:
    """The gradient of fcb alone is wrong, that of a single position short."""
    right = kernels.XLA.gelu_backward

    def wrong(dout: jax.Array, x: jax.Array) -> Any:
        dx, dbias = right(dout, x)
        return dx, dbias - dx[0, 0]

    with_operations(patch, gelu_backward=wrong)


def head_alone_in_dwte(patch: Patch) -> None:
    right = kernels.XLA.embedding_backward
    with_operations(patch, embedding_backward=lambda dout, tokens, dwte: (dwte, right(dout, tokens, dwte)[1]))


def padded_logits_count(patch: Patch) -> None:
    right = kernels.XLA.classifier
    with_operations(patch, classifier=lambda logits, y, dlosses, _V: right(logits, y, dlosses, logits.shape[-1]))


def no_bias_correction(patch: Patch) -> None:
    """After 10^6 updates the corrections are 1."""
    right = adamw.adamw_update

    def wrong(*args: Any, update: Any, **rest: Any) -> Any:
        return right(*args, update=update + 1_000_000, **rest)

    patch.setattr(adamw, "adamw_update", wrong)
    step_fn = step.step_fn

    def wrong_step(*args: Any) -> Any:
        return step_fn(*args[:-1], args[-1]._replace(optimizer=adamw.ADAMW._replace(update=wrong)))

    patch.setattr(step, "step_fn", wrong_step)


def no_clipping(patch: Patch) -> None:
    patch.setattr(step, "clip_scale", lambda norm, _limit: jnp.ones_like(norm))


def everything_decays(patch: Patch) -> None:
    right = optimizer.decay_ranges
    patch.setattr(optimizer, "decay_ranges", lambda config, _rule: right(config, "all"))


WRONG_GRADIENTS: list[Mistake] = [
    no_attention_scale, no_mask, no_scale_in_the_backward, exact_gelu, large_eps, no_path_through_the_mean,
    stream_ends_at_the_layernorm, no_sum_of_gelus_gradient, head_alone_in_dwte, padded_logits_count,
]  # fmt: skip
ONLY_THE_BACKWARD = {
    no_scale_in_the_backward, no_path_through_the_mean, stream_ends_at_the_layernorm, no_sum_of_gelus_gradient,
    head_alone_in_dwte,
}  # fmt: skip


def name_of(mistake: Mistake) -> str:
    return mistake.__name__


@pytest.fixture(scope="module")
def expected() -> tuple[float, np.ndarray]:
    return expected_gradient(CASE)


# --- the gradients of the plain model ---


def test_without_a_mistake_the_gradients_agree(expected: tuple[float, np.ndarray], op_by_op: None) -> None:
    errors = gradient_errors(loss_fn_gradient(CASE), expected, CASE.config)
    assert max(errors.values()) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("mistake", WRONG_GRADIENTS, ids=name_of)
def test_the_gradients_of_the_plain_model_show_it(
    mistake: Mistake, expected: tuple[float, np.ndarray], monkeypatch: Patch, op_by_op: None
) -> None:
    mistake(monkeypatch)
    errors = gradient_errors(loss_fn_gradient(CASE), expected, CASE.config)
    assert max(errors.values()) > 1000 * GRADIENT_TOLERANCE
    assert (errors["loss"] <= GRADIENT_TOLERANCE) == (mistake in ONLY_THE_BACKWARD)


# --- the plain AdamW ---


@pytest.mark.parametrize("mistake", [no_bias_correction, everything_decays], ids=name_of)
def test_the_plain_adamw_shows_it(mistake: Mistake, monkeypatch: Patch) -> None:
    assert max(adamw_errors("matrices", CASE.config, np.float64, updates=3).values()) <= ADAMW_TOLERANCE
    mistake(monkeypatch)
    assert max(adamw_errors("matrices", CASE.config, np.float64, updates=3).values()) > 1000 * ADAMW_TOLERANCE


# --- runs: losses of the first steps, float32, against the tolerance of test_golden.py ---


def recorded_difference() -> float:
    recorded = json.loads((GOLDEN / "run_small.json").read_text())
    losses = repeat_recorded(recorded["settings"], np.float32, step_function=fresh_step()).losses
    return float(np.abs(losses - recorded["losses"]).max())


def torch_difference() -> float:
    torch = load_torch("fp32")
    losses = repeat_torch(torch, step_function=fresh_step()).losses
    return float(np.abs(losses - torch["losses"]).max())


@pytest.mark.parametrize("difference", [recorded_difference, torch_difference])
def test_without_a_mistake_the_runs_agree(difference: Callable[[], float]) -> None:
    assert difference() <= 1e-5


@pytest.mark.parametrize(
    ("mistake", "difference"),
    [
        (no_attention_scale, recorded_difference),
        (no_mask, torch_difference),
        (no_bias_correction, recorded_difference),
        (no_clipping, torch_difference),
    ],
)
def test_the_runs_show_it(mistake: Mistake, difference: Callable[[], float], monkeypatch: Patch) -> None:
    mistake(monkeypatch)
    assert difference() > 2e-5
