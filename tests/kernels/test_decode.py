"""Tokens by our kernels, simulated, beside XLA's operations: logits, cache, greedy texts past the last position."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import parse_descriptor
from llmc_jax.generate import checked
from llmc_jax.generate.engine import Drawn, Request, generate
from llmc_jax.generate.heads import attention_weights
from llmc_jax.generate.look import look
from llmc_jax.generate.model import Model, open_model
from llmc_jax.generate.sampling import Sampling
from llmc_jax.kernels import decode
from llmc_jax.kernels.choice import decoding_refusal
from llmc_jax.models.gpt2 import decode as by_xla
from llmc_jax.models.layout import flat_size, num_parameters, tensor_specs
from llmc_jax.models.packed import Packed
from llmc_jax.models.program import separated
from llmc_jax.training.state import DTYPES

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHAPE = "L2-NH2-C32-V61-T8"
CONFIG: Any = parse_descriptor(SHAPE)


@cache
def models(dtype: str = "fp32") -> tuple[Model, Model]:
    """A random model that is far from uniform: with weights for XLA, and for simulated kernels."""
    flat = 0.4 * np.random.default_rng(3).standard_normal(flat_size(CONFIG)).astype(np.float32)
    for spec in tensor_specs(CONFIG):
        if spec.name in ("ln1w", "ln2w", "lnfw"):
            flat[spec.offset :][: spec.size] += 1
    on_device = jnp.array(flat, DTYPES[dtype])
    packed = Packed(on_device[: num_parameters(CONFIG)].reshape(-1, CONFIG.channels), CONFIG, "sm_90", interpret=True)
    model = open_model(SHAPE, dtype=dtype)
    return model._replace(weights=separated(on_device, CONFIG)), model._replace(weights=packed)


def test_a_tensor_by_name_is_the_one_of_separate_weights() -> None:
    plain, packed = (each.weights for each in models())
    for name, expected in plain._asdict().items():
        np.testing.assert_array_equal(
            getattr(packed, name), np.stack(expected) if isinstance(expected, tuple) else expected
        )
    with pytest.raises(AttributeError, match="missing"):
        _ = packed.missing
    assert models()[1].dtype == "fp32"


@pytest.mark.parametrize(
    ("dtype", "texts"),
    [
        pytest.param("fp32", 1, marks=pytest.mark.slow),
        ("fp32", 3),
        ("bf16", 2),
        pytest.param("fp32", 18, marks=pytest.mark.slow),
    ],
)
def test_logits_and_cache_are_xlas(dtype: str, texts: int) -> None:
    plain, packed = models(dtype)
    rng, position = np.random.default_rng(texts), np.int32(5)
    empty = by_xla.empty_cache(CONFIG, texts, 8, DTYPES[dtype])
    before = jax.tree.map(lambda array: jnp.array(rng.standard_normal(array.shape), array.dtype), empty)
    tokens = rng.integers(0, CONFIG.vocab_size, texts).astype(np.int32)
    run: Callable[..., Any] = partial(jax.jit, static_argnames="config")
    expected, after = run(by_xla.decode)(plain.weights, tokens, position, before, config=CONFIG)
    ours = jax.jit(partial(decode.decode, shape=CONFIG))
    found, cached = ours(packed.weights, tokens, position, decode.stacked(before))
    error = {"fp32": 1e-5, "bf16": 0.05}[dtype]
    np.testing.assert_allclose(found, expected, rtol=0, atol=error * np.abs(expected).max())
    for own, xlas in zip(cached, (after.keys, after.values), strict=True):
        own, xlas = (np.asarray(each, np.float32) for each in (own[:, :, :8], jnp.stack(xlas)))
        np.testing.assert_allclose(own, xlas, rtol=0, atol=error * np.abs(xlas).max())
        np.testing.assert_array_equal(np.delete(own, 5, axis=2), np.delete(xlas, 5, axis=2))


def test_a_greedy_text_past_the_last_position_is_xlas() -> None:
    request = Request((1, 2, 3, 4, 5, 6), 4, 2, Sampling(temperature=0), ignore_end=True)
    texts = [
        [(each.sample, each.token, each.logprob) for each in generate(model, request) if isinstance(each, Drawn)]
        for model in models()
    ]
    assert [each[:2] for each in texts[0]] == [each[:2] for each in texts[1]]
    np.testing.assert_allclose([each[2] for each in texts[0]], [each[2] for each in texts[1]], atol=1e-5)


def test_other_questions_take_the_one_array_too() -> None:
    plain, packed = models()
    ids = [3, 1, 4, 1, 5]
    for expected, found in zip(look(plain, ids, 2), look(packed, ids, 2), strict=True):
        assert (found.token, found.logprob) == (expected.token, pytest.approx(expected.logprob, abs=1e-5))
    np.testing.assert_allclose(attention_weights(packed, ids, 1), attention_weights(plain, ids, 1), atol=1e-6)


def test_kernels_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = models()
    assert checked.checked(packed, {1}) is packed
    error = checked.error_of(CONFIG, packed.weights, "fp32", 1)
    assert 0 < error < 1e-5

    def wrong(*args: Any) -> Any:
        logits, after = decode.decode(*args)
        return logits * 1.01, after

    broken = replace(packed.weights, rows=packed.weights.rows.at[0, 0].set(jnp.nan))
    assert checked.error_of(CONFIG, broken, "fp32", 1) == 0  # the model's fault

    monkeypatch.setattr(checked, "kernels", lambda: SimpleNamespace(decode=wrong, stacked=decode.stacked))
    monkeypatch.setattr(checked, "error_of", lambda *given: {1: 0.0, 2: np.nan}[given[-1]])
    assert not isinstance(checked.checked(packed, [1, 2]).weights, Packed)
    monkeypatch.undo()
    monkeypatch.setattr(checked, "kernels", lambda: SimpleNamespace(decode=wrong, stacked=decode.stacked))
    found = checked.checked(packed, {1})
    assert not isinstance(found.weights, Packed)
    assert len(found.warnings) == len(packed.warnings) + 1
    np.testing.assert_array_equal(found.weights.qkvw[1], packed.weights.qkvw[1])


@pytest.mark.parametrize(
    "shape",
    [
        "L2-NH2-C48-V61-T8",
        "L2-NH13-C1664-V61-T8",
        "L2-NH1-C256-V61-T8",
        "L2-NH2-KV1-C64-V61-T8",
        "L2-NH2-C32-F64-V61-T8",
    ],
)
def test_models_that_the_kernels_do_not_know_are_refused(shape: str) -> None:
    assert decoding_refusal(parse_descriptor(shape))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--kernels pallas"):
        open_model(shape, target="sm_90")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_are_read_into_one_array(dtype: str) -> None:
    packed, plain = (open_model(SHAPE, dtype=dtype, target=target).weights for target in ("sm_80", None))
    assert len(jax.tree.leaves(packed)) == 1
    assert packed.rows.size == num_parameters(CONFIG)
    for layer in range(2):
        np.testing.assert_array_equal(packed.fcprojw[layer], plain.fcprojw[layer])
