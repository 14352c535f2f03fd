"""The fully connected layer against NumPy and jax.vjp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.ops.linear import bias_backward, linear_backward, linear_forward, linear_rows_forward


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("rows", [(2, 3), (1, 1), (7,)])
def test_forward(rows: tuple[int, ...], rng: np.random.Generator) -> None:
    x, w, b = rng.normal(size=(*rows, 5)), rng.normal(size=(4, 5)), rng.normal(size=4)
    product = np.array([[row @ column for column in w] for row in x.reshape(-1, 5)]).reshape(*rows, 4)
    np.testing.assert_allclose(linear_forward(x, w, b), product + b, rtol=1e-13)
    np.testing.assert_allclose(linear_forward(x, w, None), product, rtol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_few_rows(rows: int, dtype: jnp.dtype, rng: np.random.Generator) -> None:
    """Small whole numbers, so that every dtype holds every sum."""
    x, w, b = (jnp.asarray(rng.integers(-3, 4, size=shape), dtype) for shape in ((rows, 5), (4, 5), (4,)))
    for bias in (None, b):
        found, expected = linear_rows_forward(x, w, bias), linear_forward(x, w, bias)
        assert (found.shape, found.dtype) == ((rows, 4), dtype)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("rows", [(2, 3), (1, 1), (7,)])
def test_backward(rows: tuple[int, ...], rng: np.random.Generator) -> None:
    x, w, b = (jnp.asarray(rng.normal(size=shape)) for shape in ((*rows, 5), (4, 5), (4,)))
    dout = jnp.asarray(rng.normal(size=(*rows, 4)))
    expected = jax.vjp(lambda x, w, b: x @ w.T + b, x, w, b)[1](dout)
    for found, gradient in zip((*linear_backward(dout, x, w), bias_backward(dout)), expected, strict=True):
        np.testing.assert_allclose(found, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes(dtype: jnp.dtype, rng: np.random.Generator) -> None:
    x, w, b, dout = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((2, 3, 5), (4, 5), (4,), (2, 3, 4)))
    results = (linear_forward(x, w, b), linear_forward(x, w, None), *linear_backward(dout, x, w), bias_backward(dout))
    assert [result.dtype for result in results] == [dtype] * 5


def test_sums_are_taken_in_float32() -> None:
    """In bfloat16 a sum of ones stops growing at 256, where the next number is 258."""
    many = jnp.ones((1, 4096), jnp.bfloat16)
    assert float(linear_forward(many, many, None)[0, 0]) == 4096
    column = many.reshape(4096, 1)
    assert float(linear_backward(column, column, jnp.ones((1, 1), jnp.bfloat16))[1][0, 0]) == 4096
    assert float(linear_backward(many, jnp.ones((1, 1), jnp.bfloat16), column)[0][0, 0]) == 4096
    assert float(bias_backward(column)[0]) == 4096
