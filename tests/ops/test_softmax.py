"""Causal softmax against loops and jax.vjp of another formulation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.ops.softmax import softmax_backward, softmax_forward

SHAPES = [(2, 3, 5, 5), (1, 1), (4, 7, 7)]
forward, backward = jax.jit(softmax_forward), jax.jit(softmax_backward)


def unmasked(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers, NaN beyond the diagonal: what stands there must not count."""
    return np.where(np.tri(shape[-1], dtype=bool), 3 * rng.normal(size=shape), np.nan)


def loops(scores: np.ndarray, scale: float) -> np.ndarray:
    att = np.zeros_like(scores)
    for *matrix, t in np.ndindex(scores.shape[:-1]):
        row = scores[(*matrix, t)]
        weights = [math.exp(scale * row[u]) for u in range(t + 1)]
        att[(*matrix, t)][: t + 1] = np.array(weights) / sum(weights)
    return att


def reference(scores: jax.Array, scale: float) -> jax.Array:
    return jax.nn.softmax(scale * scores, axis=-1, where=np.tri(scores.shape[-1], dtype=bool))


@jax.jit
def gradient(scores: jax.Array, datt: jax.Array) -> jax.Array:
    return jax.vjp(lambda scores: reference(scores, 0.3), scores)[1](datt)[0]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    scores = unmasked(rng, shape)
    np.testing.assert_allclose(forward(scores, 0.3), loops(scores, 0.3), rtol=1e-12, atol=0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    scores, datt = unmasked(rng, shape), unmasked(rng, shape)
    expected = gradient(np.nan_to_num(scores), np.nan_to_num(datt))
    np.testing.assert_allclose(backward(datt, forward(scores, 0.3), 0.3), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_do_not_overflow(sign: int) -> None:
    att = forward(sign * np.array([[1e4, 0.0], [1e4, 1e4 - 1]], np.float32), 1.0)
    ratio = math.exp(-sign)
    np.testing.assert_allclose(att, [[1, 0], [1 / (1 + ratio), ratio / (1 + ratio)]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype: jnp.dtype, rng: np.random.Generator) -> None:
    """Computed in float32 from the rounded input, then rounded once."""
    scores, datt = (jnp.asarray(unmasked(rng, (2, 6, 6)), dtype) for _ in range(2))
    att = forward(scores, 0.5)
    dscores = backward(datt, att, 0.5)
    assert att.dtype == dscores.dtype == dtype
    np.testing.assert_array_equal(att, forward(scores.astype(jnp.float32), 0.5).astype(dtype))
    wide = backward(datt.astype(jnp.float32), att.astype(jnp.float32), 0.5)
    np.testing.assert_array_equal(dscores, wide.astype(dtype))
