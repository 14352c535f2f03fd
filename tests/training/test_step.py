"""The training step: micro-batches, determinism, steps that update nothing, donation, and no second compilation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.config.model import parse_descriptor
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.layout import flat_size, num_parameters, tensor_specs, views
from llmc_jax.training.optimizer import LossScale
from llmc_jax.training.outliers import WINDOW, Outliers
from llmc_jax.training.state import TrainState, initial_state
from llmc_jax.training.step import (
    Metrics,
    StepNumbers,
    StepOptions,
    batch_gradient,
    train_step,
)
from tests import plain_model
from tests.comparisons import Batch, Run, random_batch, skewed_tokens, step_numbers, train
from tests.families import FROZEN, shape_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = parse_descriptor("L1-NH2-C32-V97-T20")
OPTIONS = StepOptions("cosine", "matrices")
T, STEPS = 12, 20


def start() -> np.ndarray:
    return random_parameters(CONFIG)


def batches(micro_batches: int, rows: int, steps: int = STEPS) -> list[Batch]:
    """The same tokens, however they are cut into micro-batches."""
    tokens = skewed_tokens(3, CONFIG.vocab_size, (steps, micro_batches, rows, T + 1))
    return [Batch(step[..., :-1], step[..., 1:]) for step in tokens]


def usual_numbers(**changed: float) -> StepNumbers:
    given: dict[str, Any] = {
        "lr": 3e-3, "warmup": 3, "total": STEPS, "final": 0.1, "weight_decay": 0.1, "grad_clip": 1.0,
    }  # fmt: skip
    return step_numbers(**(given | changed))


def constant(lr: float) -> StepNumbers:
    """The same rate throughout, by the same program as the cosine."""
    return usual_numbers(lr=lr, warmup=0, total=1, final=1.0, weight_decay=0.0)


def same_bits(found: Any, expected: Any) -> bool:
    found, expected = np.atleast_1d(found), np.atleast_1d(expected)
    return found.dtype == expected.dtype and np.array_equal(found.view(np.uint8), expected.view(np.uint8))


def same_tree(found: Any, expected: Any) -> bool:
    """Whether both have the same structure and the same bits."""
    return all(jax.tree.leaves(jax.tree.map(same_bits, found, expected)))


@pytest.fixture(scope="module")
def whole() -> Run:
    """The run whose every update is one batch of 8 rows."""
    return train(start(), batches(1, 8), usual_numbers(), CONFIG, OPTIONS)


@pytest.mark.parametrize(("micro_batches", "rows"), [(2, 4), pytest.param(8, 1, marks=pytest.mark.slow)])
def test_micro_batches_change_nothing(micro_batches: int, rows: int, whole: Run) -> None:
    run = train(start(), batches(micro_batches, rows), usual_numbers(), CONFIG, OPTIONS)
    np.testing.assert_allclose(run.losses, whole.losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(run.norms, whole.norms, rtol=1e-4)
    np.testing.assert_array_equal(run.rates, whole.rates)
    assert whole.losses[-1] < whole.losses[0] - 0.3  # and it is not a run in which nothing happens


def test_two_runs_give_the_same_bits() -> None:
    first, second = (train(start(), batches(2, 4), usual_numbers(), CONFIG, OPTIONS) for _ in range(2))
    np.testing.assert_array_equal(first.losses, second.losses)
    np.testing.assert_array_equal(first.norms, second.norms)
    for name in ("params", "m", "v"):
        assert same_bits(first.state.flat[name], second.state.flat[name]), name
    assert not same_bits(first.state.params, start())


def test_a_batch_learned_by_heart() -> None:
    batch = batches(1, 8, steps=1)
    run = train(start(), batch * 150, constant(1e-2), CONFIG, OPTIONS)
    assert run.losses[0] > 4 and run.losses[-1] < 0.05
    last = np.stack([run.losses, run.norms]).astype(np.float32)[:, -WINDOW:]
    assert same_bits(np.roll(run.state.outliers.values, -(150 % WINDOW), axis=1), last)
    assert int(run.state.outliers.count) == 150


def test_padding_stays_zero(whole: Run) -> None:
    """wte's rows beyond V and what follows the 16 tensors: no gradient, no momentum, no decay."""
    for name in ("params", "m", "v"):
        flat = np.asarray(whole.state.flat[name])
        assert not views(flat, CONFIG).wte[CONFIG.vocab_size :].any(), name
        assert not flat[num_parameters(CONFIG) :].any(), name
    assert np.asarray(views(whole.state.params, CONFIG).wte)[: CONFIG.vocab_size].any(axis=1).all()


def test_unused_positions_only_decay(whole: Run) -> None:
    """wpe's rows from T on get no gradient; they shrink by 1 - lr * decay at each step."""
    shrink = np.prod(1 - 0.1 * whole.rates)
    before, after = (np.asarray(views(flat, CONFIG).wpe)[T:] for flat in (start(), whole.state.params))
    np.testing.assert_allclose(after, before * shrink, rtol=1e-5)


# --- steps that are not finite ---


def position(name: str, index: int = 0) -> int:
    return next(spec.offset for spec in tensor_specs(CONFIG) if spec.name == name) + index


def finite_loss_infinite_gradient(flat: np.ndarray) -> None:
    """GELU gives 1e20, whose weights are zero: no trace in the loss, but the gradient's square overflows."""
    tensors = views(flat, CONFIG)
    tensors.fcb[:] = 1e20
    tensors.fcw[:] = 0
    tensors.fcprojw[:] = 0


def put(name: str, value: float) -> Any:
    def spoil(flat: np.ndarray) -> None:
        flat[position(name)] = value

    return spoil


SPOILT = {
    "NaN in a weight": put("qkvw", np.nan),
    "NaN in a layernorm": put("lnfw", np.nan),
    "infinity in a bias": put("fcprojb", np.inf),
    "a weight so large that a gradient overflows": put("lnfw", 3e38),
    "a finite loss with an infinite gradient": finite_loss_infinite_gradient,
}


@pytest.mark.parametrize("why", SPOILT)
def test_a_step_that_is_not_finite_updates_nothing(why: str) -> None:
    """Every bit of parameters, m and v stays; the step counts for the schedule, not for the bias correction."""
    flat = start()
    SPOILT[why](flat)
    rng = np.random.default_rng(0)
    m, v = rng.normal(size=(2, flat.size)).astype(np.float32)
    v = np.abs(v)
    window = np.random.default_rng(1).uniform(size=(2, WINDOW)).astype(np.float32)
    state = TrainState(jnp.asarray(flat), {"m": jnp.asarray(m), "v": jnp.asarray(v)}, jnp.int32(7), jnp.int32(5))
    state = state._replace(outliers=Outliers(jnp.asarray(window), jnp.int32(WINDOW)))
    state, metrics = train_step(state, *batches(1, 8)[0], usual_numbers(), CONFIG, OPTIONS)
    assert not bool(metrics.finite)
    assert not (np.isfinite(metrics.loss) and np.isfinite(metrics.norm))
    if why == "a finite loss with an infinite gradient":
        assert np.isfinite(metrics.loss)
    assert same_bits(state.params, flat) and same_bits(state.buffers["m"], m) and same_bits(state.buffers["v"], v)
    assert (int(state.step), int(state.updates)) == (8, 5)
    assert not bool(metrics.applied) and np.isnan(metrics.z_loss) and np.isnan(metrics.z_norm)
    assert same_tree(state.outliers, Outliers(window, np.int32(WINDOW)))


# --- outliers ---


def far_below(value: float, count: int = WINDOW) -> np.ndarray:
    """A window (128,) among whose values `value` is an outlier."""
    return (value * np.random.default_rng(count).uniform(0.79, 0.81, WINDOW)).astype(np.float32)


def z_score(window: np.ndarray, value: Any, count: int = WINDOW) -> float:
    """That of a value that takes the place of the oldest, in float64."""
    values = window.astype(np.float64)
    values[count % WINDOW] = value
    return float((value - values.mean()) / values.std())


def low_precision(outliers: Outliers | None, clean: int = 99) -> TrainState:
    """fp16 with a copy and a loss scale that the next finite step lets grow."""
    state = initial_state(jnp.asarray(start()), jnp.float16, loss_scale=1024.0)
    return state._replace(loss_scale=LossScale(jnp.float32(1024), jnp.int32(clean)), outliers=outliers)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "micro_batches"), [(None, 4), (jnp.float16, 1)])
def test_looking_for_outliers_changes_no_bit(dtype: Any, micro_batches: int) -> None:
    """Without limits a run is what it is without the detector, whatever the z-scores are."""
    found = []
    for window in (False, True):
        state = initial_state(jnp.asarray(start()), dtype, loss_scale=None if dtype is None else 1024.0)
        state = state._replace(outliers=Outliers(jnp.zeros((2, WINDOW)), jnp.int32(500)) if window else None)
        reported = []
        for batch in batches(micro_batches, 8 // micro_batches, steps=5):
            state, metrics = train_step(state, *batch, usual_numbers(), CONFIG, OPTIONS)
            reported.append(jax.device_get(metrics))
        assert (state.outliers is not None) == window
        assert all((each.z_loss > 4) == (each.z_norm > 4) == window for each in reported)  # 127 / 1 ... 124 / 4 values
        assert all(each.applied and each.finite for each in reported)
        found.append((state._replace(outliers=None), [each[:5] for each in reported]))
    assert same_tree(*found)


# Limits in units of the z-score that there is: its own sign, just below or just above; 0: none.
LIMITS = {
    "none": (0, 0, True),
    "loss": (0.999, 0, False),
    "not quite the loss": (1.001, 0, True),
    "norm": (0, 0.999, False),
    "not quite the norm": (0, 1.001, True),
    "loss alone of both": (0.999, 1.001, False),
    "norm alone of both": (1.001, 0.999, False),
    "both": (0.999, 0.999, False),
    "neither": (1.001, 1.001, True),
}


@pytest.mark.parametrize("which", LIMITS)
def test_an_outlier_updates_nothing(which: str) -> None:
    """Beyond a limit the parameters, their copy, m and v keep every bit. All else goes on: the step, AdamW's t, the
    window and the loss scale, which only an overflow lowers.
    """
    loss_limit, norm_limit, applied = LIMITS[which]
    batch, count = batches(1, 8)[0], WINDOW + 5
    _, usual = train_step(low_precision(None), *batch, usual_numbers(), CONFIG, OPTIONS)
    window = np.stack([far_below(float(usual.loss)), far_below(float(usual.norm), 7)])
    z = [z_score(row, float(value), count) for row, value in zip(window, usual[:2], strict=True)]
    assert 9 < z[0] < 11.27 and 9 < z[1] < 11.27

    state = low_precision(Outliers(jnp.asarray(window), jnp.int32(count)))
    before = jax.tree.map(np.array, state)
    numbers = usual_numbers()._replace(skip_loss_z=loss_limit * z[0], skip_norm_z=norm_limit * z[1])
    state, metrics = train_step(state, *batch, numbers, CONFIG, OPTIONS)
    np.testing.assert_allclose([metrics.z_loss, metrics.z_norm], z, rtol=1e-5)
    assert bool(metrics.finite) and bool(metrics.applied) == applied
    for name in ("params", "copy", "m", "v"):
        assert same_bits(state.flat[name], before.flat[name]) == (not applied), name
    assert (int(state.step), int(state.updates)) == (1, 1)
    assert (float(state.loss_scale.scale), int(state.loss_scale.clean)) == (2048, 0)
    window[:, count % WINDOW] = metrics.loss, metrics.norm
    assert same_tree(state.outliers, Outliers(window, np.int32(count + 1)))


# --- what a step reports and how it is compiled ---


def test_nothing_recompiles_when_numbers_change() -> None:
    train(start(), batches(1, 8, steps=2), usual_numbers(), CONFIG, OPTIONS)
    before = train_step._cache_size()
    for changed in (
        {"lr": 1e-4}, {"warmup": 0}, {"total": 7}, {"final": 1.0}, {"beta1": 0.5}, {"beta2": 0.5},
        {"eps": 1e-3}, {"weight_decay": 0.0}, {"grad_clip": 0.0}, {"step_every": 3}, {"step_factor": 0.1},
    ):  # fmt: skip
        train(start(), batches(1, 8, steps=3), usual_numbers(**changed), CONFIG, OPTIONS)
    limits = usual_numbers()._replace(skip_loss_z=7.0, skip_norm_z=6.5)
    train(start(), batches(1, 8, steps=3), limits, CONFIG, OPTIONS)
    assert train_step._cache_size() == before


def test_the_state_is_donated() -> None:
    state = initial_state(jnp.asarray(start()))
    after, _ = train_step(state, *batches(1, 8)[0], usual_numbers(), CONFIG, OPTIONS)
    assert all(array.is_deleted() for array in jax.tree.leaves(state))
    assert not any(array.is_deleted() for array in jax.tree.leaves(after))
    assert {name: array.dtype for name, array in after.flat.items()} == dict.fromkeys(("params", "m", "v"), jnp.float32)
    assert after.copy is None and after.loss_scale is None and after.weights is after.params


def one_step(options: StepOptions, numbers: StepNumbers, flat: np.ndarray, batch: Batch) -> tuple[np.ndarray, Metrics]:
    state, metrics = train_step(initial_state(jnp.asarray(flat)), *batch, numbers, CONFIG, options)
    return np.asarray(state.params), metrics


@pytest.mark.slow
def test_the_norm_is_the_one_before_clipping_and_clipping_bounds_it() -> None:
    """From the same gradient: m = (1 - beta1) * what remains of it after clipping."""
    batch = batches(1, 8)[0]
    loss, gradient = jax.jit(batch_gradient, static_argnums=(3, 4))(start(), *batch, CONFIG, PLAIN)
    norm = np.linalg.norm(np.asarray(gradient, np.float64))
    for limit in (0.0, norm / 3, norm * 3):
        state, metrics = train_step(
            initial_state(jnp.asarray(start())), *batch, usual_numbers(grad_clip=limit), CONFIG, OPTIONS
        )
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-6)
        np.testing.assert_allclose(metrics.norm, norm, rtol=1e-6)
        expected = norm if limit == 0 else min(norm, limit)
        np.testing.assert_allclose(
            np.linalg.norm(np.asarray(state.buffers["m"], np.float64)), 0.1 * expected, rtol=1e-5
        )


def test_the_rate_reported_is_the_schedule_s(whole: Run) -> None:
    expected = [plain_model.learning_rate("cosine", step, 3e-3, 3, STEPS, 0.1, 1, 1.0) for step in range(STEPS)]
    np.testing.assert_allclose(whole.rates, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rate"),
    [
        (StepOptions("constant", "all", Execution(recompute=1)), 1e-3),
        (StepOptions("step", "none", Execution(recompute=2)), 1e-3 / 3),  # step 0 of a warm-up of 3
    ],
)
def test_options_reach_the_schedule_and_the_decay(options: StepOptions, rate: float) -> None:
    """One update with and without weight decay differs by lr * decay * p where the rule says so, else not at all."""
    batch = random_batch(CONFIG.vocab_size, 1, 1, 2)
    flat = plain_model.random_flat(CONFIG, flat_size(CONFIG), seed=2).astype(np.float32)
    numbers = {"lr": 1e-3, "warmup": 3, "total": 10, "final": 0.0}
    decayed, metrics = one_step(options, step_numbers(**numbers, weight_decay=0.5), flat, batch)
    plain, _ = one_step(options, step_numbers(**numbers), flat, batch)
    np.testing.assert_allclose(metrics.learning_rate, rate, rtol=1e-6)
    mask = plain_model.decay_mask(CONFIG, options.decay)
    expected = -rate * 0.5 * mask * flat[: mask.size]
    np.testing.assert_allclose((decayed - plain)[: mask.size], expected, rtol=0, atol=1e-6)


def test_what_is_frozen_keeps_its_bits() -> None:
    """Though all decays. Nothing of it is in the optimizer's buffers, nor in the norm, which is that of all else."""
    shape, options = shape_of("L1-NH2-C16-V97-T20", FROZEN), StepOptions("cosine", "all")
    flat = plain_model.random_flat(shape, flat_size(shape), 0).astype(np.float32)
    once, run = (train(flat, batches(1, 2, n), usual_numbers(grad_clip=0.0), shape, options) for n in (1, 3))
    for name, found in run.state.flat.items():
        before = views(flat if name == "params" else np.zeros_like(flat), shape)
        same = [spec.name for spec, *pair in zip(tensor_specs(shape), views(found, shape), before, strict=True)
                if same_bits(*pair)]  # fmt: skip
        assert same == ["wpe", "fcw"], name
    assert once.norms[0] == pytest.approx(np.linalg.norm(once.state.buffers["m"]) / (1 - 0.9), rel=1e-5)
