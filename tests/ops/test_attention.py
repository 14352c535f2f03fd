"""Attention of every kind against loops over heads and positions and jax.vjp of another formulation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import CAUSAL, RELU, Attention, ModelConfig
from llmc_jax.ops.attention import (
    attention_backward,
    attention_forward,
    attention_step_forward,
    attention_weights,
    document_starts,
    keys_and_values,
    seen,
    visible,
)
from tests import plain_model

SHAPES = [  # B, T, NH, HS
    (2, 5, 3, 4),
    (1, 1, 2, 3),  # a single token: attention is v
    (1, 7, 1, 5),  # one head
    (2, 4, 4, 1),  # heads of one channel
]
forward = jax.jit(attention_forward, static_argnums=(1, 2))
backward = jax.jit(attention_backward, static_argnums=(4, 5))


def loops(qkv: np.ndarray, num_heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Attention as one would do it by hand: out (B, T, C) and weights (B, NH, T, T)."""
    B, T, C3 = qkv.shape
    C, HS = C3 // 3, C3 // 3 // num_heads
    out, att = np.zeros((B, T, C)), np.zeros((B, num_heads, T, T))
    for b, h, t in np.ndindex(B, num_heads, T):
        q, k, v = (qkv[b, :, i * C + h * HS : i * C + (h + 1) * HS] for i in range(3))
        scores = [float(q[t] @ k[u]) / math.sqrt(HS) for u in range(t + 1)]
        weights = [math.exp(score - max(scores)) for score in scores]
        att[b, h, t, : t + 1] = np.array(weights) / sum(weights)
        out[b, t, h * HS : (h + 1) * HS] = att[b, h, t] @ v
    return out, att


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("B", "T", "NH", "HS"), SHAPES)
def test_forward_by_hand(B: int, T: int, NH: int, HS: int, rng: np.random.Generator) -> None:
    qkv = 2 * rng.normal(size=(B, T, 3 * NH * HS))
    for found, expected in zip(forward(qkv, NH), loops(qkv, NH), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


BEGIN = 3  # the token that a document begins with
NEAR, OWN = Attention(window=3), Attention(documents=BEGIN)
KINDS = {
    "softmax": CAUSAL, "relu": RELU, "window": NEAR, "prefix": Attention(prefix=3), "documents": OWN,
    "reversed": Attention(mask="reversed"), "none": Attention(mask="none"), "alibi": Attention(bias="alibi"),
    "scale 1": Attention(scale=1.0), "softcap": Attention(softcap=1.5), "KV2": Attention(kv_heads=2),
    "KV1": Attention(kv_heads=1), "window of one": Attention(window=1),
    "window, documents": NEAR._replace(documents=BEGIN), "window, relu": NEAR._replace(weights="relu"),
    "window, KV2, softcap": NEAR._replace(kv_heads=2, softcap=1.5), "alibi, documents": OWN._replace(bias="alibi"),
    "window, reversed": NEAR._replace(mask="reversed"), "window, none": NEAR._replace(mask="none"),
    "alibi, relu, softcap, none": Attention("relu", "none", bias="alibi", softcap=1.5),
}  # fmt: skip
TOKENS = np.array([[0, 1, BEGIN, 2, 2, BEGIN, BEGIN, 0, 1], [BEGIN, 0, 0, 0, 0, 1, 2, 0, BEGIN]], np.int32)


def given(spec: Attention, B: int, T: int, NH: int, HS: int, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Packed qkv (B, T, Q), dout (B, T, C), and where the document of each row begins."""
    Q = (NH + 2 * (spec.kv_heads or NH)) * HS
    starts = document_starts(jnp.asarray(TOKENS[:B, :T]), BEGIN) if spec.documents == BEGIN else None
    return 2 * rng.normal(size=(B, T, Q)), rng.normal(size=(B, T, NH * HS)), starts


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_backward(kind: str, rng: np.random.Generator) -> None:
    """Op by op, so that the kinds share what is compiled."""
    check(KINDS[kind], (2, 9, 6, 3), rng)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", [CAUSAL, RELU])
@pytest.mark.parametrize("sizes", SHAPES)
def test_forward_and_backward_of_any_shape(sizes: tuple[int, ...], kind: Attention, rng: np.random.Generator) -> None:
    check(kind, sizes, rng)


def check(spec: Attention, sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    B, T, NH, _ = sizes
    qkv, dout, starts = given(spec, *sizes, rng)
    out, pull = jax.vjp(lambda qkv: plain_model.attention(qkv, TOKENS[:B, :T], NH, spec), qkv)
    (dqkv,) = pull(dout)
    found_out, saved = attention_forward(qkv, NH, spec, starts)
    found, dbias = attention_backward(dout, qkv, found_out, saved, NH, spec, starts)
    np.testing.assert_allclose(found_out, out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found, dqkv, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(dbias, np.sum(dqkv, (0, 1)), rtol=1e-11, atol=1e-11)
    np.testing.assert_array_equal(attention_weights(qkv, NH, spec, starts), saved)
    unseen = ~np.broadcast_to(plain_model.mask(spec, TOKENS[:B, :T])[:, None], saved.shape)
    assert not np.asarray(saved)[unseen].any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_row_sees(kind: str) -> None:
    """An interval of keys, and the mask of it: of all rows, and of one alone, as decoding asks."""
    spec, T = KINDS[kind], TOKENS.shape[1]
    starts = document_starts(jnp.asarray(TOKENS), BEGIN) if spec.documents == BEGIN else None
    expected = np.asarray(plain_model.mask(spec, jnp.asarray(TOKENS)))
    np.testing.assert_array_equal(np.broadcast_to(np.squeeze(seen(spec, T, starts)), expected.shape), expected)
    for b, row in np.ndindex(2, T):
        first, end = visible(spec, jnp.int32(row), T, None if starts is None else starts[b, row])
        assert np.flatnonzero(expected[b, row]).tolist() == list(range(int(first), min(int(end), T)))


def test_where_documents_begin() -> None:
    expected, found = np.zeros_like(TOKENS), document_starts(jnp.asarray(TOKENS), BEGIN)
    for b, t in np.ndindex(*TOKENS.shape):
        expected[b, t] = t if TOKENS[b, t] == BEGIN else expected[b, t - 1] if t else 0
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.int32 and len(np.unique(expected)) == 5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Attention(weights="tanh"), "weights is 'tanh'"), (Attention(mask="future"), "mask is 'future'"),
        (Attention(window=-1), "window is -1"), (Attention(prefix=2, window=3), "prefix 2 goes with neither"),
        (Attention(prefix=2, documents=0), "prefix 2 goes"), (Attention(mask="none", documents=0), "mask 'none' goes"),
        (Attention(kv_heads=3), "NH=4 heads are not a multiple of KV=3"),
    ],
)  # fmt: skip
def test_what_is_no_attention_is_refused(spec: Attention, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ModelConfig(8, 5, 128, 1, 4, 8, attention=spec)


@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_rows_that_do_not_see_their_target_count(spec: Attention) -> None:
    """All of causal attention; of a prefix the last row and those behind it; otherwise the last of all."""
    for T in (1, 2, 3, 4, 9):
        found, last = spec.counted(T), T - 1
        expected = [t for t in range(T) if t == last or not plain_model.sees(spec, t, t + 1)]
        assert list(found) == expected


@pytest.mark.parametrize("spec", [CAUSAL, RELU])
def test_the_future_reaches_neither_outputs_nor_gradients(spec: Attention, rng: np.random.Generator) -> None:
    """To the bit: other tokens after t leave out[:t] as it is; no gradient at t comes from outputs before t."""
    qkv = rng.normal(size=(1, 6, 24)).astype(np.float32)
    changed = qkv.copy()
    changed[:, 4:] = 7 * rng.normal(size=(1, 2, 24))
    np.testing.assert_array_equal(forward(qkv, 2, spec)[0][:, :4], forward(changed, 2, spec)[0][:, :4])
    dout = rng.normal(size=(1, 6, 8)).astype(np.float32)
    dout[:, 4:] = 0
    dqkv = np.asarray(backward(dout, qkv, *forward(qkv, 2, spec), 2, spec)[0])
    assert (dqkv[:, 4:] == 0).all() and (dqkv[:, :4] != 0).any()


def test_large_scores_do_not_overflow() -> None:
    """Scores of 10^8: the largest takes all, and the gradient of q and k vanishes."""
    qkv = np.zeros((1, 3, 6), np.float32)
    qkv[0, :, :2] = qkv[0, :, 2:4] = [[1e4, 0], [0, 1e4], [1e4, 1.0]]
    qkv[0, :, 4:] = [[1, 2], [3, 4], [5, 6]]
    out, att = forward(qkv, 1)
    np.testing.assert_allclose(out[0], [[1, 2], [3, 4], [3, 4]], atol=3)  # finite, a mean of earlier values
    np.testing.assert_array_equal(out[0, :2], [[1, 2], [3, 4]])
    assert all(np.isfinite(each).all() for each in backward(np.ones((1, 3, 2), np.float32), qkv, out, att, 1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes(dtype: jnp.dtype, rng: np.random.Generator) -> None:
    qkv, dout = (jnp.asarray(rng.normal(size=(2, 5, width)), dtype) for width in (24, 8))
    out, att = forward(qkv, 2)
    assert {each.dtype for each in (out, att, *backward(dout, qkv, out, att, 2))} == {jnp.dtype(dtype)}
    wide = forward(qkv.astype(jnp.float32), 2)
    np.testing.assert_array_equal(att, wide[1].astype(dtype))  # the softmax is taken in float32 and rounded once
    np.testing.assert_allclose(out.astype(np.float32), wide[0], atol=2e-2)


def test_relu_score_of_zero_has_no_gradient() -> None:
    """q = 0: all scores are 0, relu's kink; jax.nn.relu's derivative there is 0 too."""
    qkv = np.ones((1, 3, 12), np.float32)
    qkv[..., :4] = 0
    out, saved = forward(qkv, 1, RELU)
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(backward(np.ones((1, 3, 4), np.float32), qkv, out, saved, 1, RELU)[0]) == 0).all()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", [kind for kind, spec in KINDS.items() if (spec.mask, spec.prefix) == ("causal", 0)])
def test_one_position_over_a_cache_is_a_row_of_the_whole(kind: str, rng: np.random.Generator) -> None:
    (B, T, NH, HS), spec = (2, 7, 6, 3), KINDS[kind]
    qkv, _, starts = given(spec, B, T, NH, HS, rng)
    expected, complete = attention_forward(qkv, NH, spec, starts)[0], keys_and_values(qkv, NH, T + 2, spec)
    keys, values = keys_and_values(qkv[:, :2], NH, T + 2, spec)
    keys, values = keys.at[:, 2:].set(7), values.at[:, 2:].set(7)  # what was there before must not count
    for position in range(2, T):
        own = None if starts is None else starts[:, position]
        out, keys, values = attention_step_forward(qkv[:, position], keys, values, jnp.int32(position), NH, spec, own)
        np.testing.assert_allclose(out, expected[:, position], rtol=1e-12, atol=1e-12)
    for found, all_of_them in zip((keys, values), complete, strict=True):
        np.testing.assert_array_equal(found[:, :T], all_of_them[:, :T])
    assert keys.shape == (B * (spec.kv_heads or NH), T + 2, HS)
