"""The causal softmax kernels in interpret mode, with race detection, against float64 formulas.

Interpret mode fills what a kernel allocates with NaN, so a zero that is not written fails. What stands beyond the
diagonal of the inputs is NaN here, so a block or an element that is read without being masked fails too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import softmax, tuning
from tests.comparisons import interpreted

# Bounds in units of the dtype's rounding of the largest element: rounded once from fp32, itself right to 2^-20.
ROUNDING = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11, jnp.float32: 2.0**-19}

# T, what it tries. A block of columns is the largest power of two up to 512 that divides T rounded up to 32.
SHAPES = [
    ((2, 1, 1), jnp.float32),  # one element a row; 3 rows and 31 columns of padding
    ((1, 2, 63, 63), jnp.bfloat16),  # both padded by one; one block
    ((3, 96, 96), jnp.float16),  # three blocks of 32, several matrices
    pytest.param((1, 1000, 1000), jnp.bfloat16, marks=pytest.mark.slow),  # padded to 1024, two blocks of 512
    ((1, 130, 130), jnp.float32),  # padded to 160 = 5 blocks of 32
]
every_shape = pytest.mark.parametrize(("shape", "dtype"), SHAPES)


def matrices(shape: tuple[int, ...], dtype: jnp.dtype, size: float) -> jax.Array:
    """Random rows, each of its own mean, NaN beyond the diagonal."""
    rng = np.random.default_rng(shape[-1])
    values = size * (rng.normal(size=shape) + rng.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(np.where(np.tri(shape[-1], dtype=bool), values, np.nan), dtype)


def att_of(scores: jax.Array, scale: float) -> np.ndarray:
    wide = scale * np.asarray(scores, np.float64)
    wide = np.where(np.isnan(wide), -np.inf, wide)
    weight = np.exp(wide - wide.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def check(found: jax.Array, expected: np.ndarray, dtype: jnp.dtype) -> None:
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    values = np.asarray(found, np.float64)
    largest = np.abs(expected).max(-1, keepdims=True)  # of each row: the rows of large T are small
    assert (np.abs(values - expected) <= ROUNDING[dtype] * largest).all()
    assert (values[..., ~np.tri(expected.shape[-1], dtype=bool)] == 0).all()


@every_shape
def test_forward(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    scores = matrices(shape, dtype, 8.0)
    check(interpreted(softmax.softmax_forward, "scale")(scores, 0.3), att_of(scores, 0.3), dtype)


@pytest.mark.slow
@every_shape
def test_backward(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    datt, att = matrices(shape, dtype, 1.0), jnp.asarray(att_of(matrices(shape, dtype, 8.0), 0.3), dtype)
    wide, weight = np.nan_to_num(np.asarray(datt, np.float64)), np.asarray(att, np.float64)
    expected = 0.3 * weight * (wide - (weight * wide).sum(-1, keepdims=True))
    found = interpreted(softmax.softmax_backward, "scale")(datt, att, 0.3)
    # The difference of two numbers of datt's size: its rounding in fp32 stays where att is large, whatever dtype.
    assert (found.shape, found.dtype) == (shape, dtype)
    values = np.asarray(found, np.float64)
    atol = 2.0**-20 * np.abs(wide).max()
    np.testing.assert_allclose(values, expected, rtol=ROUNDING[dtype], atol=max(atol, np.finfo(np.float16).tiny))
    assert (values[..., ~np.tri(shape[-1], dtype=bool)] == 0).all()
    if shape[-1] > 1:
        assert np.abs(expected).max() > 1000 * atol


def test_backward_is_the_gradient_of_the_forward() -> None:
    """Through the kernels' own forward, against jax.vjp in float64."""
    T, scale = 40, 0.7
    scores, datt = (jnp.nan_to_num(matrices((2, T, T), jnp.float32, size)) for size in (3.0, 1.0))
    with jax.enable_x64(True):
        wide, cotangent = (jnp.asarray(np.asarray(a, np.float64)) for a in (scores, datt))

        def reference(scores: jax.Array) -> jax.Array:
            return jax.nn.softmax(scale * scores, axis=-1, where=np.tri(T, dtype=bool))

        expected = np.asarray(jax.vjp(reference, wide)[1](cotangent)[0])
    att = interpreted(softmax.softmax_forward, "scale")(scores, scale)
    found = interpreted(softmax.softmax_backward, "scale")(datt, att, scale)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.slow
def test_far_from_zero_nothing_overflows() -> None:
    """The maximum comes in the last visible column of one row and in the first of the other; blocks of 32."""
    scores = np.zeros((1, 96, 96), np.float32)
    scores[0, 90, :91] = np.linspace(-3e4, 3e4, 91)
    scores[0, 91, :92] = np.linspace(3e4, -3e4, 92)
    att = np.asarray(interpreted(softmax.softmax_forward, "scale")(jnp.asarray(scores), 1.0))[0]
    assert (att[90, 90], att[91, 0]) == (1, 1)
    assert np.count_nonzero(att[90:92]) == 2


@pytest.mark.slow
def test_rows_with_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 where there would be one of 128: the running maximum grows and falls from block to block."""
    sizes = tuning.sizes("sm_90")._replace(softmax_block=32)
    monkeypatch.setattr(softmax, "sizes", lambda target: sizes)
    scores = matrices((1, 128, 128), jnp.float32, 8.0)
    inner = softmax.softmax_forward.__wrapped__
    check(inner(scores, 0.3, interpret=True), att_of(scores, 0.3), jnp.float32)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3, 4\): the last two axes must be T x T"):
        softmax.softmax_forward(jnp.zeros((2, 3, 4)), 1.0, interpret=True)
