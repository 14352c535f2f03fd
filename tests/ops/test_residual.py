"""The residual connection."""

import jax
import numpy as np

from llmc_jax.ops.residual import residual_backward, residual_forward


def test_adds_and_hands_the_gradient_to_both(rng: np.random.Generator) -> None:
    x, f, dout = rng.normal(size=(3, 2, 3, 4)).astype(np.float32)
    np.testing.assert_array_equal(residual_forward(x, f), x + f)
    expected = jax.vjp(lambda x, f: x + f, x, f)[1](dout)
    for found, gradient in zip(residual_backward(dout), expected, strict=True):
        np.testing.assert_array_equal(found, gradient)
