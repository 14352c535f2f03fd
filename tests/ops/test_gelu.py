"""GELU against jax.nn.gelu and its derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.ops.gelu import gelu_backward, gelu_forward

WIDE = np.concatenate([np.linspace(-12.0, 12.0, 1001), [0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 1e4, -1e4]])


def reference(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


@pytest.mark.usefixtures("double")
def test_forward_is_the_tanh_approximation() -> None:
    # 1 + tanh cancels far to the left, where both formulations keep an absolute error of some 1e-16 times x
    np.testing.assert_allclose(jax.jit(gelu_forward)(WIDE), jax.jit(reference)(WIDE), rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("double")
def test_backward_is_its_derivative(rng: np.random.Generator) -> None:
    dout = rng.normal(size=WIDE.shape)
    (expected,) = jax.jit(lambda x, dout: jax.vjp(reference, x)[1](dout))(WIDE, dout)
    np.testing.assert_allclose(jax.jit(gelu_backward)(dout, WIDE)[0], expected, rtol=1e-13, atol=1e-12)


@pytest.mark.usefixtures("double")
def test_backward_gives_the_gradient_of_the_bias_before_it(rng: np.random.Generator) -> None:
    x, bias, dout = rng.normal(size=(2, 3, 5)), rng.normal(size=5), rng.normal(size=(2, 3, 5))
    expected = jax.jit(lambda dout: jax.vjp(lambda b: reference(x + b), bias)[1](dout)[0])(dout)
    np.testing.assert_allclose(jax.jit(gelu_backward)(dout, x + bias)[1], expected, rtol=1e-13)


def test_far_from_zero_it_is_the_identity_or_nothing() -> None:
    x = np.array([-1e4, -50.0, 50.0, 1e4], np.float32)
    np.testing.assert_array_equal(gelu_forward(x), [0.0, 0.0, 50.0, 1e4])
    np.testing.assert_array_equal(gelu_backward(np.ones_like(x), x)[0], [0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes(dtype: jnp.dtype, rng: np.random.Generator) -> None:
    x, dout = (jnp.asarray(rng.normal(size=(3, 5)), dtype) for _ in range(2))
    out, (dx, dbias) = gelu_forward(x), gelu_backward(dout, x)
    assert out.dtype == dx.dtype == dbias.dtype == dtype
    # computed in float32 from the rounded input, then rounded once
    np.testing.assert_array_equal(out, gelu_forward(x.astype(jnp.float32)).astype(dtype))
    np.testing.assert_array_equal(dx, gelu_backward(dout.astype(jnp.float32), x.astype(jnp.float32))[0].astype(dtype))
    np.testing.assert_array_equal(dbias, jnp.sum(dx.astype(jnp.float32), 0).astype(dtype))
