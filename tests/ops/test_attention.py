"""Causal attention, softmax and relu, against loops over heads and positions and jax.vjp of another formulation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.ops.attention import (
    attention_backward,
    attention_forward,
    attention_step_forward,
    keys_and_values,
    relu_attention_backward,
    relu_attention_forward,
    relu_attention_step_forward,
)

SHAPES = [  # B, T, NH, HS
    (2, 5, 3, 4),
    (1, 1, 2, 3),  # a single token: attention is v
    (1, 7, 1, 5),  # one head
    (2, 4, 4, 1),  # heads of one channel
]
forward = jax.jit(attention_forward, static_argnums=1)
backward = jax.jit(attention_backward, static_argnums=4)
relu_forward = jax.jit(relu_attention_forward, static_argnums=1)
relu_backward = jax.jit(relu_attention_backward, static_argnums=4)


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


def reference(qkv: jax.Array, num_heads: int, kind: str) -> jax.Array:
    """out (B, T, C), head by head; jax.nn.dot_product_attention itself softmaxes in float32."""
    heads = []
    for q, k, v in zip(*(jnp.split(z, num_heads, axis=-1) for z in jnp.split(qkv, 3, axis=-1)), strict=True):
        past = np.tri(q.shape[1], dtype=bool)
        scores = q @ k.mT / np.sqrt(q.shape[-1])  # (B, T, T)
        weights = jnp.tril(jax.nn.relu(scores)) if kind == "relu" else jax.nn.softmax(scores, axis=-1, where=past)
        heads.append(weights @ v)
    return jnp.concatenate(heads, axis=-1)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("B", "T", "NH", "HS"), SHAPES)
def test_forward_by_hand(B: int, T: int, NH: int, HS: int, rng: np.random.Generator) -> None:
    qkv = 2 * rng.normal(size=(B, T, 3 * NH * HS))
    for found, expected in zip(forward(qkv, NH), loops(qkv, NH), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


KINDS = {"softmax": (forward, backward), "relu": (relu_forward, relu_backward)}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("B", "T", "NH", "HS"), SHAPES)
def test_forward_and_backward(B: int, T: int, NH: int, HS: int, kind: str, rng: np.random.Generator) -> None:
    forward, backward = KINDS[kind]
    qkv, dout = 2 * rng.normal(size=(B, T, 3 * NH * HS)), rng.normal(size=(B, T, NH * HS))
    out, pull = jax.vjp(jax.jit(lambda qkv: reference(qkv, NH, kind)), qkv)
    (dqkv,) = pull(dout)
    found_out, saved = forward(qkv, NH)
    found, dbias = backward(dout, qkv, found_out, saved, NH)
    np.testing.assert_allclose(found_out, out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found, dqkv, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(dbias, np.sum(dqkv, (0, 1)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_reaches_neither_outputs_nor_gradients(kind: str, rng: np.random.Generator) -> None:
    """To the bit: other tokens after t leave out[:t] as it is; no gradient at t comes from outputs before t."""
    forward, backward = KINDS[kind]
    qkv = rng.normal(size=(1, 6, 24)).astype(np.float32)
    changed = qkv.copy()
    changed[:, 4:] = 7 * rng.normal(size=(1, 2, 24))
    np.testing.assert_array_equal(forward(qkv, 2)[0][:, :4], forward(changed, 2)[0][:, :4])
    dout = rng.normal(size=(1, 6, 8)).astype(np.float32)
    dout[:, 4:] = 0
    dqkv = np.asarray(backward(dout, qkv, *forward(qkv, 2), 2)[0])
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
    out, saved = relu_forward(qkv, 1)
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(relu_backward(np.ones((1, 3, 4), np.float32), qkv, out, saved, 1)[0]) == 0).all()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", ["softmax", "relu"])
def test_one_position_over_a_cache_is_a_row_of_the_whole(kind: str, rng: np.random.Generator) -> None:
    B, T, NH, HS = SHAPES[0]
    qkv = jnp.asarray(rng.normal(size=(B, T, 3 * NH * HS)))
    whole, step = {
        "softmax": (forward, attention_step_forward),
        "relu": (relu_forward, relu_attention_step_forward),
    }[kind]
    expected, complete = whole(qkv, NH)[0], keys_and_values(qkv, NH, T + 2)
    one = jax.jit(step, static_argnums=4)
    keys, values = keys_and_values(qkv[:, :2], NH, T + 2)
    keys, values = keys.at[:, 2:].set(7), values.at[:, 2:].set(7)  # what was there before must not count
    for position in range(2, T):
        out, keys, values = one(qkv[:, position], keys, values, jnp.int32(position), NH)
        np.testing.assert_allclose(out, expected[:, position], rtol=1e-12, atol=1e-12)
    for found, all_of_them in zip((keys, values), complete, strict=True):
        np.testing.assert_array_equal(found[:, :T], all_of_them[:, :T])
    assert keys.shape == (B * NH, T + 2, HS)
