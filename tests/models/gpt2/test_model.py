"""The model: its gradients against jax.grad of the plain model, and what must hold of any GPT-2."""

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.config.model import RELU, Attention, ModelConfig, parse_descriptor
from llmc_jax.models import gradients
from llmc_jax.models.execution import PLAIN, Execution
from llmc_jax.models.gpt2 import model as gpt2
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.models.layout import flat_size, num_parameters, views
from llmc_jax.models.program import mean_loss, token_losses
from llmc_jax.training.step import evaluate_loss
from tests import plain_model
from tests.comparisons import (
    GRADIENT_TOLERANCE,
    QUICK,
    GradientCase,
    batch_gradient,
    expected_gradient,
    gradient_errors,
    gradient_of,
    random_batch,
)

GELU_AGAIN, BOTH_AGAIN = Execution(recompute=1), Execution(recompute=2)
slow = partial(pytest.param, marks=pytest.mark.slow)
CASES = [  # config: maxT, V, Vp, L, NH, C; then A, B, T
    pytest.param(GradientCase(ModelConfig(16, 61, 64, 2, 3, 12), 2, 2, 7), id="T=7 is no power of two; V < Vp"),
    slow(GradientCase(ModelConfig(5, 23, 128, 1, 25, 1600), 1, 1, 3, GELU_AGAIN), id="25 heads of 64, as GPT-2 1558M"),
    slow(GradientCase(ModelConfig(8, 32, 128, 3, 2, 8), 2, 1, 8, BOTH_AGAIN), id="B=1, T=maxT, three layers"),
    slow(GradientCase(ModelConfig(4, 19, 32, 1, 2, 8), 1, 3, 1), id="T=1: every token sees itself alone"),
    slow(
        GradientCase(ModelConfig(8, 32, 128, 3, 2, 8), 2, 1, 8, Execution(recompute_blocks=2, logit_rows=4)),
        id="blocks of two out of three layers again; logits of 4 tokens at a time",
    ),
    slow(GradientCase(ModelConfig(12, 16, 16, 1, 1, 5), 3, 1, 6, GELU_AGAIN), id="V=Vp: no padding; one head of 5"),
    slow(GradientCase(ModelConfig(13, 3, 4, 1, 2, 6), 1, 3, 13, BOTH_AGAIN), id="V=3 in 39 positions: each many times"),
]


def kind(attention: Attention, **change: Any) -> ModelConfig:
    """A model of two layers with an attention, of so few tokens that documents begin often; F is not 4 C."""
    return replace(ModelConfig(9, 5, 16, 2, 4, 8, mlp_channels=20, attention=attention), **change)


ALL = Attention(window=3, documents=2, bias="alibi", softcap=1.5, kv_heads=2)
ATTENTIONS = [
    pytest.param(GradientCase(kind(ALL, num_layers=1), 1, 3, 8), id="window, documents, alibi, softcap, KV2"),
    slow(GradientCase(kind(Attention(window=3)), 1, 3, 8, BOTH_AGAIN), id="window"),
    slow(GradientCase(kind(Attention(documents=2)), 2, 3, 9, Execution(recompute_blocks=2)), id="documents"),
    slow(GradientCase(kind(Attention(prefix=3)), 2, 2, 7, Execution(logit_rows=4)), id="prefix"),
    slow(GradientCase(kind(ALL._replace(window=0, documents=-1)), 1, 2, 7, BOTH_AGAIN), id="alibi, softcap, KV2"),
    slow(GradientCase(kind(RELU, num_heads=2), 1, 2, 7, Execution(recompute_blocks=1)), id="relu"),
    slow(GradientCase(kind(Attention(mask="reversed", window=4)), 1, 4, 8), id="reversed, window"),
    slow(GradientCase(kind(Attention(mask="none")), 1, 4, 8, BOTH_AGAIN), id="no mask"),
]
SMALL = ModelConfig(max_seq_len=12, vocab_size=29, padded_vocab_size=128, num_layers=1, num_heads=2, channels=16)
B, T = 2, 10


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_all_16_tensors(case: GradientCase) -> None:
    """Each level of recomputation is among the cases."""
    errors = gradient_errors(batch_gradient(case), expected_gradient(case), case.config)
    assert max(errors.values()) <= GRADIENT_TOLERANCE, errors


@pytest.mark.parametrize("case", ATTENTIONS)
def test_gradients_of_each_attention(case: GradientCase) -> None:
    """Against the plain model, and against JAX's own of our forward."""
    found = batch_gradient(case)
    by_jax = gradient_of(case, lambda *given: mean_loss(*given, case.config))
    for expected in (expected_gradient(case), by_jax):
        errors = gradient_errors(found, expected, case.config)
        assert np.max(list(errors.values())) <= GRADIENT_TOLERANCE, errors  # NaN is none


@cache
def small_flat() -> np.ndarray:
    return plain_model.random_flat(SMALL, flat_size(SMALL), seed=11).astype(np.float32)


@partial(jax.jit, static_argnums=1, compiler_options=QUICK)
def logits_of(flat: jax.Array, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    return gpt2.forward(views(flat, config), tokens, config)[0]


@partial(jax.jit, static_argnums=(3, 4), compiler_options=QUICK)
def loss_and_gradient(flat: Any, tokens: Any, targets: Any, config: ModelConfig, execution: Execution = PLAIN) -> Any:
    return jax.value_and_grad(gpt2.loss_fn)(flat, tokens, targets, config, execution)


def test_logits_are_the_plain_model_s() -> None:
    tokens = random_batch(SMALL.vocab_size, 1, B, T).inputs[0]
    flat = small_flat()
    found = logits_of(flat, SMALL, tokens)
    assert found.shape == (B, T, SMALL.padded_vocab_size) and found.dtype == jnp.float32
    with jax.enable_x64(True):
        expected = jax.jit(plain_model.logits, static_argnums=2)(flat.astype(np.float64), tokens, SMALL)
        np.testing.assert_allclose(found[..., : SMALL.vocab_size], expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_recomputing_saves_memory() -> None:
    """What the compiled program allocates beside its inputs and outputs."""
    config = parse_descriptor("L6-NH2-C32-V97-T64")
    flat = jax.ShapeDtypeStruct((flat_size(config),), np.float32)
    tokens = jax.ShapeDtypeStruct((8, 64), np.int32)

    def needed(execution: Execution) -> int:
        compiled = loss_and_gradient.lower(flat, tokens, tokens, config, execution).compile(QUICK)
        return compiled.memory_analysis().temp_size_in_bytes

    everything, gelu, both = (needed(execution) for execution in (PLAIN, GELU_AGAIN, BOTH_AGAIN))
    assert gelu < 0.9 * everything and both < 0.93 * gelu
    assert needed(Execution(recompute_blocks=1)) < 0.6 * both


@pytest.mark.slow
@pytest.mark.parametrize(
    ("again", "dtype"),
    [
        slow(GELU_AGAIN, jnp.bfloat16, id="GELU"),
        pytest.param(BOTH_AGAIN, jnp.float32, id="GELU and layernorms"),
        slow(Execution(recompute_blocks=1), jnp.float32, id="every block"),
        slow(Execution(recompute_blocks=2), jnp.bfloat16, id="two blocks, of three"),
    ],
)
def test_recomputing_changes_no_bit(again: Execution, dtype: Any) -> None:
    config = parse_descriptor("L3-NH2-C32-V97-T64")
    flat = jnp.asarray(plain_model.random_flat(config, flat_size(config), seed=1), dtype)
    batch = random_batch(config.vocab_size, 1, 4, 48)
    rows = (batch.inputs[0], batch.targets[0])
    loss, gradient = loss_and_gradient(flat, *rows, config, again._replace(recompute=0, recompute_blocks=0))
    found_loss, found = loss_and_gradient(flat, *rows, config, again)
    assert float(found_loss) == float(loss)
    np.testing.assert_array_equal(found, gradient)


def test_recomputing_drops_the_activations_it_names() -> None:
    tokens = np.zeros((B, T), np.int32)

    def dropped(level: int) -> set[str]:
        activations = jax.eval_shape(
            lambda flat: gpt2.forward(views(flat, SMALL), tokens, SMALL, Execution(recompute=level))[1], small_flat()
        )
        return {name for name, value in activations.blocks[0]._asdict().items() if value is None}

    assert {level: dropped(level) for level in (0, 1, 2)} == {0: set(), 1: {"fch_gelu"}, 2: {"fch_gelu", "ln1", "ln2"}}


@pytest.mark.parametrize("changed_at", [1, 5, T - 1])
def test_changing_a_token_changes_no_logit_before_it(changed_at: int) -> None:
    tokens = random_batch(SMALL.vocab_size, 1, B, T).inputs[0]
    changed = tokens.copy()
    changed[:, changed_at] = (changed[:, changed_at] + 7) % SMALL.vocab_size
    before, after = logits_of(small_flat(), SMALL, tokens), logits_of(small_flat(), SMALL, changed)
    np.testing.assert_array_equal(before[:, :changed_at], after[:, :changed_at])
    real = np.asarray(before != after)[..., : SMALL.vocab_size]
    assert real[:, changed_at:].any(axis=-1).all()  # it reaches every later position


APART = replace(SMALL, num_layers=2, attention=Attention(documents=0))


@partial(jax.jit, compiler_options=QUICK)
def losses_of(flat: jax.Array, tokens: jax.Array) -> jax.Array:
    """The loss of each token of a text (T,) but the first."""
    return token_losses(flat, tokens[None, :-1], tokens[None, 1:], APART)


@cache
def apart_flat() -> np.ndarray:
    return plain_model.random_flat(APART, flat_size(APART), seed=12).astype(np.float32)


@given(st.lists(st.integers(0, 7), min_size=T + 1, max_size=T + 1), st.integers(0, T - 1), st.integers(0, 99))
@settings(max_examples=40)
def test_a_document_s_losses_do_not_depend_on_its_neighbours(text: list[int], place: int, seed: int) -> None:
    """To the bit, in a model of two layers: the other documents have other tokens, and begin where they began."""
    tokens = np.array(text, np.int32)
    document = np.cumsum(tokens == 0)
    own = document == document[place]
    others = np.random.default_rng(seed).integers(1, SMALL.vocab_size, T + 1)
    changed = np.where(own | (tokens == 0), tokens, others).astype(np.int32)
    before, after = losses_of(apart_flat(), tokens), losses_of(apart_flat(), changed)
    np.testing.assert_array_equal(before[own[:-1]], after[own[:-1]])


def test_a_document_elsewhere_has_other_losses_by_its_positions_alone() -> None:
    """Positions are absolute: without them the same document has the same losses wherever it stands."""
    document, flat = [0, 5, 9, 3, 0], apart_flat().copy()
    texts = [np.array(text, np.int32) for text in ([*document, 1, 1, 1, 1, 1, 1], [0, 8, 8, 8, *document, 1, 1])]
    first, later = (losses_of(flat, text)[at : at + 4] for text, at in zip(texts, (0, 4), strict=True))
    assert np.abs(first - later).min() > 1e-3
    views(flat, APART).wpe[:] = 0
    first, later = (losses_of(flat, text)[at : at + 4] for text, at in zip(texts, (0, 4), strict=True))
    np.testing.assert_allclose(first, later, rtol=1e-5)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    tokens = random_batch(SMALL.vocab_size, 1, B, T).inputs[0]
    changed = tokens.copy()
    changed[1] = (changed[1] + 3) % SMALL.vocab_size
    np.testing.assert_array_equal(logits_of(small_flat(), SMALL, tokens)[0], logits_of(small_flat(), SMALL, changed)[0])


def test_padded_rows_of_wte_take_no_part() -> None:
    """To the bit: whatever they hold, loss and gradients are the same, and their own gradient is zero."""
    batch = random_batch(SMALL.vocab_size, 1, B, T)
    flat = small_flat()
    expected_loss, expected = loss_and_gradient(flat, batch.inputs[0], batch.targets[0], SMALL)
    other = flat.copy()
    views(other, SMALL).wte[SMALL.vocab_size :] = 100 * np.random.default_rng(1).normal(
        size=(SMALL.padded_vocab_size - SMALL.vocab_size, SMALL.channels)
    )
    loss, gradient = loss_and_gradient(other, batch.inputs[0], batch.targets[0], SMALL)
    assert float(loss) == float(expected_loss)
    np.testing.assert_array_equal(gradient, expected)
    wte = np.asarray(views(gradient, SMALL).wte)
    assert not wte[SMALL.vocab_size :].any()
    assert wte[: SMALL.vocab_size].any(axis=1).all()


def test_positions_beyond_t_and_the_padding_of_the_buffer_have_no_gradient() -> None:
    batch = random_batch(SMALL.vocab_size, 1, B, T)
    _, gradient = loss_and_gradient(small_flat(), batch.inputs[0], batch.targets[0], SMALL)
    wpe = np.asarray(views(gradient, SMALL).wpe)
    assert wpe[:T].any(axis=1).all() and not wpe[T:].any()
    assert not np.asarray(gradient)[sum(tensor.size for tensor in views(gradient, SMALL)) :].any()


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), min_size=1), st.sampled_from([jnp.float32, jnp.bfloat16]))
@settings(max_examples=20)
def test_pieces_of_any_size_stand_one_after_the_other(sizes: list[int], dtype: Any) -> None:
    pieces = [jnp.arange(size, dtype=jnp.float32).reshape(1, size) + 16 * number for number, size in enumerate(sizes)]
    expected = np.concatenate([np.asarray(piece).reshape(-1) for piece in pieces]).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "LARGE_PIECE", 4)
        as_on_a_gpu = gradients.written_in_place(*[jnp.ravel(piece).astype(dtype) for piece in pieces])
    for found in (gradients.put_together(pieces, dtype), as_on_a_gpu):
        assert found.dtype == dtype and np.asarray(found).tobytes() == expected.tobytes()


def test_the_gradient_is_linear_in_what_reaches_the_loss() -> None:
    """loss_fn's backward multiplies by the gradient that arrives; batch_gradient counts on it."""
    batch = random_batch(SMALL.vocab_size, 1, B, T)
    rows = (batch.inputs[0], batch.targets[0])
    half = jax.jit(jax.grad(lambda flat, *rows: -0.5 * gpt2.loss_fn(flat, *rows, SMALL)), compiler_options=QUICK)
    scaled = half(small_flat(), *rows)
    _, gradient = loss_and_gradient(small_flat(), *rows, SMALL)
    np.testing.assert_allclose(scaled, -0.5 * np.asarray(gradient), rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("descriptor", ["L2-NH2-C32-V257-T16", "L1-NH1-C16-V2000-T16"])
def test_at_initialisation_the_loss_is_ln_v(descriptor: str) -> None:
    config = parse_descriptor(descriptor)
    batch = random_batch(config.vocab_size, 1, 4, 16)
    loss = evaluate_loss(random_parameters(config), batch.inputs[0], batch.targets[0], config)
    np.testing.assert_allclose(loss, math.log(config.vocab_size), atol=0.05)


@pytest.mark.parametrize("function", [gpt2.loss_fn, jax.grad(gpt2.loss_fn), evaluate_loss])
def test_parameters_without_their_padding_are_refused(function: Any) -> None:
    batch = random_batch(29, 1, 2, 12)
    with pytest.raises(ValueError, match=r"\(65536,\); layout\.padded"):
        function(jnp.array(small_flat()[: num_parameters(SMALL)]), batch.inputs[0], batch.targets[0], SMALL)


def test_evaluate_loss_is_the_loss_that_training_sees() -> None:
    batch = random_batch(SMALL.vocab_size, 1, B, T)
    rows = (batch.inputs[0], batch.targets[0])
    np.testing.assert_allclose(
        evaluate_loss(small_flat(), *rows, SMALL), loss_and_gradient(small_flat(), *rows, SMALL)[0], rtol=1e-6
    )
