"""The embedding against indexing and np.add.at, which adds row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.ops.embedding import embedding_backward, embedding_forward

Vp, maxT, C = 13, 9, 4
B, T = 3, 7
backward = jax.jit(embedding_backward)


def expected_gradients(dout: np.ndarray, tokens: np.ndarray, dwte: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """dwte (Vp, C) and dwpe (T, C), one addition at a time in float64."""
    dwte, dwpe = dwte.astype(np.float64), np.zeros(dout.shape[1:])
    for b, t in np.ndindex(tokens.shape):
        dwte[tokens[b, t]] += dout[b, t]
        dwpe[t] += dout[b, t]
    return dwte, dwpe


def test_forward_adds_a_row_of_each_table(rng: np.random.Generator) -> None:
    wte, wpe = rng.normal(size=(Vp, C)).astype(np.float32), rng.normal(size=(maxT, C)).astype(np.float32)
    tokens = rng.integers(0, Vp, (B, T)).astype(np.int32)
    out = embedding_forward(tokens, jnp.asarray(wte), jnp.asarray(wpe))
    for b, t in np.ndindex(B, T):
        np.testing.assert_array_equal(out[b, t], wte[tokens[b, t]] + wpe[t])


@pytest.mark.usefixtures("double")
def test_backward_is_the_derivative_of_forward(rng: np.random.Generator) -> None:
    tokens, dout = rng.integers(0, Vp, (B, T)).astype(np.int32), rng.normal(size=(B, T, C))
    tables = jnp.asarray(rng.normal(size=(Vp, C))), jnp.asarray(rng.normal(size=(maxT, C)))
    dwte, dwpe = jax.vjp(lambda wte, wpe: embedding_forward(tokens, wte, wpe), *tables)[1](jnp.asarray(dout))
    found = backward(dout, tokens, np.zeros((Vp, C)))
    np.testing.assert_allclose(found[0], dwte, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(found[1], dwpe[:T], rtol=1e-13, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, Vp - 1), min_size=B * T, max_size=B * T), st.integers(0, 2**32 - 1))
def test_backward_of_any_tokens_is_exact_on_integers(ids: list[int], seed: int) -> None:
    """Sums of small integers have no rounding, so every order of summation gives the same bits."""
    tokens = np.array(ids, np.int32).reshape(B, T)
    rng = np.random.default_rng(seed)
    dout = rng.integers(-50, 50, (B, T, C)).astype(np.float32)
    dwte = rng.integers(-50, 50, (Vp, C)).astype(np.float32)
    for found, expected in zip(backward(dout, tokens, dwte), expected_gradients(dout, tokens, dwte), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_same_input_gives_the_same_bits(rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 5, (8, 64)).astype(np.int32)  # about 100 times each: much to add in another order
    dout, dwte = rng.normal(size=(8, 64, C)).astype(np.float32), rng.normal(size=(Vp, C)).astype(np.float32)
    first = [np.asarray(gradient) for gradient in backward(dout, tokens, dwte)]
    anew = jax.jit(lambda *arrays: embedding_backward(*arrays))  # compiled once more
    for again in (backward(dout, tokens, dwte), backward(dout, tokens, dwte), anew(dout, tokens, dwte)):
        for found, expected in zip(again, first, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_token_s_sum_depends_on_its_own_rows_alone(rng: np.random.Generator) -> None:
    """To the bit: renaming the ids, or other tokens elsewhere in the batch, changes no rounding of a row's sum."""
    tokens = rng.integers(0, 5, (8, 64)).astype(np.int32)
    dout, zero = rng.normal(size=(8, 64, C)).astype(np.float32), np.zeros((Vp, C), np.float32)
    names = np.array([3, 12, 0, 7, 5], np.int32)
    plain, renamed = backward(dout, tokens, zero)[0], backward(dout, names[tokens], zero)[0]
    np.testing.assert_array_equal(renamed[names], plain[:5])
    others = np.where(tokens == 2, 2, 9).astype(np.int32)
    np.testing.assert_array_equal(backward(dout, others, zero)[0][2], plain[2])


def test_tokens_may_be_a_constant_of_the_program(rng: np.random.Generator) -> None:
    tokens = rng.integers(0, Vp, (B, T)).astype(np.int32)  # NumPy, closed over instead of passed
    dout, dwte = rng.normal(size=(B, T, C)).astype(np.float32), np.zeros((Vp, C), np.float32)
    found = jax.jit(lambda dout: embedding_backward(dout, tokens, jnp.asarray(dwte)))(dout)
    np.testing.assert_allclose(found[0], expected_gradients(dout, tokens, dwte)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_and_float32_sums(dtype: jnp.dtype) -> None:
    """In bfloat16 a sum of ones stops growing at 256."""
    tokens, dout = np.zeros((1024, 4), np.int32), jnp.ones((1024, 4, C), dtype)
    dwte, dwpe = backward(dout, tokens, jnp.zeros((Vp, C), dtype))
    assert dwte.dtype == dwpe.dtype == dtype
    assert (dwte[0] == 4096).all() and (dwte[1:] == 0).all() and (dwpe == 1024).all()
    tables = jnp.ones((Vp, C), dtype), jnp.ones((maxT, C), dtype)
    assert embedding_forward(tokens, *tables).dtype == dtype
