"""Every optimizer beside PyTorch's, over 50 updates; what Muon does with matrices; what a skipped update leaves."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.config.train import OPTIMIZERS, TrainConfig
from llmc_jax.models.layout import flat_size, tensor_specs, views
from llmc_jax.training.optimizer import Optimizer, decay_ranges, numbers_of, ranges_of, update_by
from llmc_jax.training.parallel.stage import ALONE
from llmc_jax.training.rules import muon, named
from llmc_jax.training.state import initial_state
from llmc_jax.training.step import StepOptions, update_state
from tests import plain_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ModelConfig(max_seq_len=9, vocab_size=11, padded_vocab_size=16, num_layers=3, num_heads=2, channels=6)
TORCH = np.load(Path(__file__).parents[2] / "golden/torch_optimizers.npz")
MODELS = {"SMALL": SMALL, "GROUPED": parse_descriptor("L2-NH4-C8-KV1-V11-T9")}
CASES: dict[str, Any] = json.loads(str(TORCH["cases"]))
OURS = {"sgd_decay": "sgd", "muon_bf16": "muon"}  # the others have PyTorch's name
LIMITS = {"muon": 1e-9, "muon_bf16": 2e-2}
KEPT = (1, 2, 10, 50)  # updates after which the file has the parameters


def numbers(optimizer: Optimizer, arguments: dict[str, Any]) -> Any:
    """An optimizer's numbers, from what PyTorch's was given."""
    beta1, beta2 = arguments.get("betas", (0.5, arguments.get("alpha", 0.5)))
    others = {name: arguments[name] for name in ("eps", "momentum", "weight_decay") if name in arguments}
    return numbers_of(optimizer, TrainConfig(beta1=beta1, beta2=beta2, **others))


@pytest.mark.parametrize("case", CASES)
def test_fifty_updates_are_pytorchs(case: str) -> None:
    """In float64. PyTorch's Muon rounds its products to bfloat16, but in the file's `muon`."""
    optimizer, arguments = named(OURS.get(case, case)), CASES[case]["arguments"]
    rule = optimizer.rules[-1]
    with jax.enable_x64(True):
        for i in range(3):
            shape = TORCH[f"start_{i}"].shape
            params, found = jnp.asarray(TORCH[f"start_{i}"]).ravel(), []
            kept = [jnp.zeros_like(params) for _ in rule.buffers]
            by_matrix = lambda rule, u, shape=shape: rule.matrix(u.reshape(shape)).ravel()  # noqa: E731
            update = jax.jit(
                partial(
                    update_by, rules=((rule, ((0, params.size),)),), by_matrix=by_matrix, scale=jnp.float64(1),
                    apply=jnp.array(True), learning_rate=jnp.float64(arguments["lr"]),
                    numbers=numbers(optimizer, arguments), decay=((0, params.size),),
                )
            )  # fmt: skip
            for t, gradient in enumerate(TORCH[f"gradients_{i}"], 1):
                params, *kept, _ = update(params, *kept, jnp.asarray(gradient).ravel(), update=jnp.int32(t))
                found += [np.asarray(params).reshape(shape)] if t in KEPT else []
            error = plain_model.relative_error(np.asarray(found), TORCH[f"{case}_{i}"])
            assert error <= LIMITS.get(case, 1e-12), (i, error)


def updated(name: str, apply: bool = True, model: ModelConfig = SMALL, **config: float) -> tuple[Any, Any, np.ndarray]:
    """The state before and after an update of a model by random gradients, and these."""
    rng, optimizer = np.random.default_rng(2), named(name)
    flat = plain_model.random_flat(model, flat_size(model), seed=1).astype(np.float32)
    gradient = rng.normal(0, 0.1, flat.size).astype(np.float32) * (flat != 0)
    state = initial_state(jnp.asarray(flat), optimizer=optimizer)
    kept = {each: jnp.asarray(rng.uniform(0, 0.1, flat.size).astype(np.float32)) for each in state.buffers}
    state = state._replace(buffers=kept)
    if not apply:
        gradient[5:900] = np.nan
    options = StepOptions("constant", "matrices", optimizer=optimizer, parallel=ALONE)
    params, *buffers, _ = update_state(
        state, jnp.asarray(gradient), model, options, scale=jnp.float32(1), learning_rate=jnp.float32(0.1),
        update=jnp.int32(3), apply=jnp.array(apply), decay=decay_ranges(model, "matrices"),
        numbers=numbers_of(optimizer, TrainConfig(weight_decay=0.1, **config)),
    )  # fmt: skip
    return state, state._replace(params=params, buffers=dict(zip(optimizer.buffers, buffers, strict=True))), gradient


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_update_changes_no_bit(name: str) -> None:
    before, after, _ = updated(name, apply=False)
    for one, other in zip(before.flat.values(), after.flat.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint32), np.asarray(other).view(np.uint32))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_changes_all_that_it_keeps(name: str) -> None:
    before, after, gradient = updated(name)
    for each, one in before.flat.items():
        moved = (np.asarray(one) != np.asarray(after.flat[each])) | (gradient == 0)
        matrices = np.zeros(flat_size(SMALL), bool)
        for spec in tensor_specs(SMALL):
            matrices[spec.offset : spec.offset + spec.size] = spec.tensor.layer_matrix
        unused = matrices if each == "v" and name.startswith("muon") else np.zeros_like(matrices)
        assert moved[~unused].all() and not (np.asarray(one) != np.asarray(after.flat[each]))[unused].any(), each


# ----- Muon -----------------------------------------------------------------------------------------------------------


def test_all_that_is_no_matrix_of_a_layer_is_adamws_to_the_bit() -> None:
    found, expected = (views(np.asarray(updated(name)[1].params), SMALL)._asdict() for name in ("muon", "adamw"))
    alike = {name for name in found if np.array_equal(found[name], expected[name])}
    assert alike == set(found) - {"qkvw", "attprojw", "fcw", "fcprojw"}


@pytest.mark.parametrize(("model", "queries_and_keys"), [("SMALL", [6, 12]), ("GROUPED", [8, 10])])
def test_each_matrix_is_by_itself_q_k_and_v_too(model: str, queries_and_keys: list[int]) -> None:
    """The second model has fewer heads of keys, so that its K and V have fewer rows than Q."""
    shape = MODELS[model]
    before, after, gradient = updated("muon", model=shape, momentum=0.9)
    old, new, g, m = (
        views(np.asarray(each, np.float64), shape)._asdict()
        for each in (before.params, after.params, gradient, before.buffers["m"])
    )
    for name, ends in (("qkvw", queries_and_keys), ("attprojw", []), ("fcw", []), ("fcprojw", [])):
        mean = 0.9 * m[name] + 0.1 * g[name]
        u = 0.1 * g[name] + 0.9 * mean
        for layer in range(shape.num_layers):
            for part in np.split(np.arange(u.shape[1]), ends):
                sides = len(part), u.shape[2]
                change = 0.2 * max(sides) ** 0.5 * by_singular_values(u[layer, part], muon.KELLER)
                expected = old[name][layer, part] - 0.1 * (change + 0.1 * old[name][layer, part])
                np.testing.assert_allclose(new[name][layer, part], expected, rtol=0, atol=2e-6)


def by_singular_values(u: np.ndarray, steps: muon.Steps, scale: float = 1.0) -> np.ndarray:
    """What the iteration comes to, from the singular values of a matrix: a polynomial of each."""
    left, s, right = np.linalg.svd(u, full_matrices=False)
    s = s / max(np.linalg.norm(s) * scale, 1e-7)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return (left * s) @ right


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**16), st.sampled_from([1e-12, 1.0, 1e12]))
def test_products_are_a_polynomial_of_the_singular_values(rows: int, cols: int, seed: int, size: float) -> None:
    u = size * np.random.default_rng(seed).normal(size=(2, rows, cols))
    with jax.enable_x64(True):
        for steps, scale in ((muon.KELLER, 1.0), (muon.POLAR_EXPRESS, 1.01)):
            found = muon.orthogonal(jnp.asarray(u), steps, scale)
            expected = [by_singular_values(each, steps, scale) for each in u]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("name", "low", "high"), [("muon", 0.65, 1.25), ("muon-polar", 0.85, 1.15)])
def test_singular_values_become_about_one(name: str, low: float, high: float) -> None:
    """Those of a matrix whose own are from 1 to 1 / 100 of the largest."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(48, 48)))[0] for _ in range(2))
    u = (left * np.geomspace(1, 1e-2, 48)) @ right
    direction = named(name).rules[-1].matrix
    assert direction is not None
    found = np.linalg.svd(np.asarray(direction(jnp.asarray(u, jnp.float32))))[1] / (0.2 * 48**0.5)
    assert low < found.min() and found.max() < high


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert not np.asarray(muon.orthogonal(jnp.zeros((2, 3, 4)))).any()


def test_the_rules_of_a_model_are_for_all_of_it_once() -> None:
    for name in OPTIMIZERS:
        covered = np.zeros(flat_size(SMALL), int)
        for _, ranges in ranges_of(SMALL, named(name)):
            for start, stop in ranges:
                covered[start:stop] += 1
        assert set(covered[: tensor_specs(SMALL)[-1].offset]) == {1}
