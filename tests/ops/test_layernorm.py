"""Layer normalisation against its definition and jax.vjp."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.ops.layernorm import (
    layernorm_backward,
    layernorm_forward,
    residual_layernorm_backward,
    residual_layernorm_forward,
)

forward = jax.jit(layernorm_forward)
backward = jax.jit(layernorm_backward)
residual_forward = jax.jit(residual_layernorm_forward)
residual_backward = jax.jit(residual_layernorm_backward)


def reference(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * w + b


@jax.jit
def value_and_gradients(x: jax.Array, w: jax.Array, b: jax.Array, dout: jax.Array) -> Any:
    value, pull = jax.vjp(reference, x, w, b)
    return value, pull(dout)


def arrays(rng: np.random.Generator, rows: tuple[int, ...], C: int) -> tuple[jax.Array, ...]:
    """x, w, b, dout; the rows of x differ in mean and spread."""
    x = rng.normal(size=(*rows, C)) * rng.uniform(0.01, 10, (*rows, 1)) + rng.normal(size=(*rows, 1))
    return tuple(jnp.asarray(a) for a in (x, rng.normal(1, 0.5, C), rng.normal(0, 0.5, C), rng.normal(size=(*rows, C))))


def test_worked_example() -> None:
    """Mean 1, variance 2.5: [2, -1, 3, 0] becomes [1, -2, 2, -1] / sqrt(2.5)."""
    x = np.array([2.0, -1.0, 3.0, 0.0], np.float32)
    out, mean, rstd = forward(x, np.ones(4, np.float32), np.zeros(4, np.float32))
    np.testing.assert_allclose(out, [0.63, -1.26, 1.26, -0.63], atol=0.005)
    np.testing.assert_allclose(mean, 1.0)
    np.testing.assert_allclose(rstd, (2.5 + 1e-5) ** -0.5, rtol=1e-6)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("rows", "C"), [((2, 3), 8), ((5,), 7), ((1, 1), 2), ((4, 1), 1)])
def test_forward_and_backward(rows: tuple[int, ...], C: int, rng: np.random.Generator) -> None:
    x, w, b, dout = arrays(rng, rows, C)
    expected, gradients = value_and_gradients(x, w, b, dout)
    out, mean, rstd = forward(x, w, b)
    np.testing.assert_allclose(out, expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(mean, np.mean(x, -1), rtol=1e-13)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(np.var(x, -1) + 1e-5), rtol=1e-12)
    dbias = jnp.sum(gradients[0], tuple(range(len(rows))))  # of a bias that was added to x
    for found, gradient in zip(backward(dout, x, w, mean, rstd), (*gradients, dbias), strict=True):
        np.testing.assert_allclose(found, gradient, rtol=1e-9, atol=1e-11)


def test_a_row_far_from_zero_keeps_its_variance(rng: np.random.Generator) -> None:
    """The variance is that of x - mean: mean(x^2) - mean(x)^2 would cancel here."""
    x = np.float32(4096) + rng.integers(-8, 9, (3, 256)).astype(np.float32) / 8  # exact in float32
    out, _, _ = forward(x, np.ones(256, np.float32), np.zeros(256, np.float32))
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


def test_a_constant_row_gives_the_bias_and_a_finite_gradient() -> None:
    x, w, b = np.full((1, 8), 3.0, np.float32), np.full(8, 2.0, np.float32), np.arange(8, dtype=np.float32)
    out, mean, rstd = forward(x, w, b)
    np.testing.assert_array_equal(out[0], b)
    assert all(np.isfinite(g).all() for g in backward(np.ones_like(x), x, w, mean, rstd))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes(dtype: jnp.dtype, rng: np.random.Generator) -> None:
    x, w, b, dout = (a.astype(dtype) for a in arrays(rng, (2, 3), 8))
    out, mean, rstd = forward(x, w, b)
    assert (out.dtype, mean.dtype, rstd.dtype) == (dtype, jnp.float32, jnp.float32)
    assert [g.dtype for g in backward(dout, x, w, mean, rstd)] == [dtype] * 4


def test_sums_are_taken_in_float32() -> None:
    """In bfloat16 a sum of ones stops growing at 256."""
    x = jnp.asarray(np.tile([1.0, -1.0], (4096, 1)), jnp.bfloat16)  # normalised, it is itself (but for eps)
    w = jnp.ones(2, jnp.bfloat16)
    _, mean, rstd = forward(x, w, 0 * w)
    _, dw, db, _ = backward(x, x, w, mean, rstd)
    np.testing.assert_allclose(dw.astype(np.float32), 4096, rtol=0.004)
    np.testing.assert_array_equal(db.astype(np.float32), [4096, -4096])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("rows", "C"), [((2, 3), 8), ((5,), 7)])
def test_with_the_residual(rows: tuple[int, ...], C: int, rng: np.random.Generator) -> None:
    x, w, b, dout = arrays(rng, rows, C)
    f, dresidual = (jnp.asarray(rng.normal(size=(*rows, C))) for _ in range(2))
    expected, pull = jax.vjp(lambda x, f, w, b: (x + f, reference(x + f, w, b)), x, f, w, b)
    dx, df, dw, db = pull((dresidual, dout))
    np.testing.assert_array_equal(dx, df)  # an addition hands its gradient to both sides
    residual, out, mean, rstd = residual_forward(x, f, w, b)
    for found, value in zip((residual, out), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-11, atol=1e-12)
    for found, value in zip((mean, rstd), forward(x + f, w, b)[1:], strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-12)
    gradients = residual_backward(dresidual, dout, residual, w, mean, rstd)
    for found, gradient in zip(gradients, (dx, dw, db, jnp.sum(df, tuple(range(len(rows))))), strict=True):
        np.testing.assert_allclose(found, gradient, rtol=1e-9, atol=1e-11)


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    """256 + 1 is 256 in bfloat16: the row is constant after rounding, and not before."""
    x, f = jnp.full((2, 4), 256, jnp.bfloat16), jnp.asarray([[0, 1, 0, 1]] * 2, jnp.bfloat16)
    residual, out, mean, _ = residual_forward(x, f, jnp.ones(4, jnp.bfloat16), jnp.zeros(4, jnp.bfloat16))
    np.testing.assert_array_equal(residual.astype(np.float32), 256)
    np.testing.assert_array_equal(mean, 256)
    np.testing.assert_array_equal(out.astype(np.float32), 0)


def test_both_gradients_of_the_stream_meet_before_rounding() -> None:
    """Through the layernorm comes 1 + 2^-8, which alone bfloat16 rounds to 1; 257 + 2^-8 it rounds to 258, 257 to 256.

    The row's mean and rstd are given such that norm = 0 and dx = rstd (dout - mean(dout)).
    """
    dout, stream = jnp.asarray([[1.0, -1.0]], jnp.bfloat16), jnp.asarray([[256.0, 0.0]], jnp.bfloat16)
    rstd = jnp.full(1, 1 + 2.0**-8)
    dx, *_ = residual_backward(stream, dout, jnp.zeros((1, 2), jnp.bfloat16), jnp.ones(2), jnp.zeros(1), rstd)
    np.testing.assert_array_equal(dx.astype(np.float32), [[258.0, -1.0]])
