"""The GELU kernels in interpret mode against float64 formulas, and what the hardware's exponential does to them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gelu
from tests.comparisons import interpreted

# Where GELU bends, where exp2 overflows, and what is far away.
WIDE = np.concatenate([np.linspace(-12.0, 12.0, 1501), [0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 1e4, -1e4]])
# Rounded once; besides, fp32's own error, which 1 - s of the slope multiplies by x du/dx, some 40 where 1 - s counts.
ROUNDING = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11, jnp.float32: 2.0**-22}
IN_FP32 = 40 * 2.0**-23


def expected_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """GELU and its derivative in float64."""
    u, du = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    tanh = np.tanh(u)
    return x / 2 * (1 + tanh), (1 + tanh) / 2 + x / 2 * (1 - tanh**2) * du


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *[((1509,), dtype) for dtype in ROUNDING],
        ((3, 1024), jnp.bfloat16),
        ((1,), jnp.float32),
        ((2, 4096), jnp.float16),
        ((5, 7), jnp.bfloat16),
    ],
)
def test_forward_and_backward(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    """Sizes: not a multiple of anything, of 1024, one, several blocks of 2048, and less than one."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(WIDE if shape == WIDE.shape else 3 * rng.normal(size=shape), dtype)
    dout = jnp.asarray(rng.normal(size=shape), dtype)
    wide, cotangent = np.asarray(x, np.float64), np.asarray(dout, np.float64)
    value, slope = expected_of(wide)
    out, (dx, dbias) = interpreted(gelu.gelu_forward)(x), interpreted(gelu.gelu_backward)(dout, x)
    assert out.shape == dx.shape == shape
    assert out.dtype == dx.dtype == dbias.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), value, rtol=ROUNDING[dtype], atol=IN_FP32)
    np.testing.assert_allclose(np.asarray(dx, np.float64), cotangent * slope, rtol=ROUNDING[dtype], atol=IN_FP32 * 4)
    sums = (cotangent * slope).reshape(-1, shape[-1])
    allowed = ROUNDING[dtype] * np.abs(sums.sum(0)) + IN_FP32 * 4 * len(sums)  # summed before dx is rounded
    assert (np.abs(np.asarray(dbias, np.float64) - sums.sum(0)) <= allowed).all()


@pytest.mark.parametrize(("rows", "C"), [(61, 200), (21, 1000)])
def test_a_block_adds_up_several_rows(rows: int, C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two shares: strips of 256 and 1024 columns, in which one and four warps hold a row."""
    monkeypatch.setattr(gelu, "shares_of", lambda *_: 2)
    dtype = jnp.bfloat16
    rng = np.random.default_rng(C)
    x, dout = (jnp.asarray(rng.normal(size=(rows, C)), dtype) for _ in range(2))
    dx, dbias = interpreted(gelu.gelu_backward)(dout, x)
    expected = np.asarray(dout, np.float64) * expected_of(np.asarray(x, np.float64))[1]
    np.testing.assert_allclose(np.asarray(dx, np.float64), expected, rtol=ROUNDING[dtype], atol=IN_FP32 * 4)
    sums = expected.sum(0)
    np.testing.assert_allclose(np.asarray(dbias, np.float64), sums, rtol=ROUNDING[dtype], atol=IN_FP32 * 4 * rows)


def test_far_from_zero_it_is_the_identity_or_nothing() -> None:
    x = jnp.asarray([-1e4, -50.0, 50.0, 1e4], jnp.float32)
    np.testing.assert_array_equal(interpreted(gelu.gelu_forward)(x), [0.0, 0.0, 50.0, 1e4])
    np.testing.assert_array_equal(interpreted(gelu.gelu_backward)(jnp.ones(4), x)[0], [0.0, 0.0, 1.0, 1.0])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("direction", [-1.0, 1.0])
def test_the_hardware_s_functions_are_exact_enough(
    direction: float, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ex2.approx is off by up to 2 units in the last place, 2^-22: always up or always down, the worst it may do.

    Everything else in float64: the results move by less than 2^-22 of 1 or of |x|, as fp32's own rounding moves them.
    For 16 bits rsqrt.approx is off by 2^-22.9 besides, but for 1, where float32 rounds its argument to that. Then they
    move by less than 2^-16; bf16 rounds by 2^-9, fp16 by 2^-12.
    """
    exp2, rsqrt = jnp.exp2, jax.lax.rsqrt

    def spoilt_rsqrt(a: jax.Array) -> jax.Array:
        return jnp.where(a.astype(jnp.float32) == 1, 1.0, rsqrt(a) * (1 - direction * 2.0**-22.9))

    with jax.enable_x64(True):
        x = jnp.asarray(WIDE)
        right = gelu.forward(x, exact=True), gelu.backward(jnp.ones_like(x), x, exact=True)
        monkeypatch.setattr(gelu.jnp, "exp2", lambda a: exp2(a) * (1 + direction * 2.0**-22))
        monkeypatch.setattr(gelu.lax, "rsqrt", spoilt_rsqrt)
        approximate = gelu.forward(x, exact=exact), gelu.backward(jnp.ones_like(x), x, exact=exact)
        moved = [np.abs(np.asarray(found - expected)) for found, expected in zip(approximate, right, strict=True)]
    for error in moved:
        assert (error <= 2.0 ** (-22 if exact else -16) * np.maximum(np.abs(WIDE), 1)).all()
        assert error.max() > 2.0**-26  # they were what was spoilt
