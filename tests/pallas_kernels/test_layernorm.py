"""The layernorm kernels in interpret mode, with race detection, against float64 formulas and jax.vjp.

Interpret mode fills what a kernel allocates with NaN, so an element that is not written fails. What it does not cover,
registers and shared memory as the hardware has them, is compiled in tests/aot.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layernorm, tuning
from pallas_kernels.layernorm import plan_rows
from pallas_kernels.mosaic import f32
from tests.comparisons import QUICK, interpreted

Arrays = tuple[np.ndarray, ...]

# Bounds in units of the dtype's rounding of the largest element. Statistics and sums are fp32 whatever the dtype.
ROUNDING = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11, jnp.float32: 2.0**-20}
IN_FP32 = 2.0**-20

# How rows are held depends on C alone (plan_rows); each way stands here once for C as it is and once with padding of
# columns, over both lists. Rows: whole tiles of 4, and 1, 2 or 3 beyond them.
FORWARD = [
    ((8,), 768, jnp.bfloat16, jnp.bfloat16),  # one warp, one vector width
    ((2, 3), 50, jnp.float16, jnp.float32),  # one warp, padded to 64; rows of two axes
    ((5,), 1600, jnp.bfloat16, jnp.float32),  # one warp, two vector widths
    ((3,), 1700, jnp.float32, jnp.bfloat16),  # two warps, padded to 1728
    ((1,), 2560, jnp.float16, jnp.float16),  # four warps
    ((2,), 9000, jnp.bfloat16, jnp.float32),  # streamed, padded to 9216
]
BACKWARD = [
    ((7,), 768, jnp.bfloat16, jnp.bfloat16),  # one warp
    ((2, 3), 50, jnp.float16, jnp.float32),  # one warp, padded to 64
    ((5,), 1600, jnp.bfloat16, jnp.float32),  # two warps, two vector widths
    ((1,), 2500, jnp.float32, jnp.bfloat16),  # four warps, padded to 2560
    ((2,), 5000, jnp.float32, jnp.float32),  # streamed, padded to 5120
]


def every(cases: list[Any]) -> pytest.MarkDecorator:
    """One of a warp and one that is streamed are quick."""
    params = [
        pytest.param(*case, id=f"{'x'.join(map(str, (*case[0], case[1])))}-{case[2].__name__}",
                     marks=[] if case[1] == 768 or case[1] >= 5000 else pytest.mark.slow)
        for case in cases
    ]  # fmt: skip
    return pytest.mark.parametrize(("rows", "C", "dtype", "of_w"), params)


def arrays(rows: tuple[int, ...], C: int, dtype: jnp.dtype, of_w: jnp.dtype) -> tuple[jax.Array, ...]:
    """x, f, dresidual, dout (rows, C) and w, b (C,); rows differ in mean and spread, and no two columns are alike."""
    rng = np.random.default_rng(C)
    x = rng.normal(size=(*rows, C)) * rng.uniform(0.1, 4, (*rows, 1)) + rng.normal(size=(*rows, 1))
    wide = [x, *rng.normal(size=(3, *rows, C))]
    return *(jnp.asarray(a, dtype) for a in wide), *(jnp.asarray(rng.normal(1, 0.5, C), of_w) for _ in range(2))


def in_float64(*given: jax.Array) -> Arrays:
    return tuple(np.asarray(array, np.float64) for array in given)


def reference(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * w + b


def gradients(dout: np.ndarray, x: np.ndarray, w: np.ndarray) -> Arrays:
    """dx, dw, db and the sum of dx's rows by jax.vjp in float64."""
    with jax.enable_x64(True):
        found = tuple(map(np.asarray, jax.vjp(reference, x, w, np.zeros_like(w))[1](jnp.asarray(dout))))
    return *found, rows_of(found[0]).sum(0)


def rows_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])


def check(found: jax.Array, expected: np.ndarray, rounding: float) -> None:
    """Within the rounding of the largest element, and of the same shape."""
    assert found.shape == expected.shape
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    assert error <= rounding * np.abs(expected).max(), f"off by {error} of {np.abs(expected).max()}"


def check_forward(
    residual: jax.Array, w: jax.Array, b: jax.Array, out: jax.Array, mean: jax.Array, rstd: jax.Array
) -> None:
    x, w, b = in_float64(residual, w, b)
    assert (out.dtype, mean.dtype, rstd.dtype) == (residual.dtype, jnp.float32, jnp.float32)
    check(out, np.asarray(reference(*map(np.asarray, (x, w, b)))), ROUNDING[residual.dtype.type])
    np.testing.assert_allclose(mean, x.mean(-1), rtol=0, atol=IN_FP32 * np.abs(x).max())
    np.testing.assert_allclose(rstd, (x.var(-1) + 1e-5) ** -0.5, rtol=IN_FP32)


@every(FORWARD)
def test_forward(rows: tuple[int, ...], C: int, dtype: jnp.dtype, of_w: jnp.dtype) -> None:
    x, _, _, _, w, b = arrays(rows, C, dtype, of_w)
    check_forward(x, w, b, *interpreted(layernorm.layernorm_forward)(x, w, b))


@every(FORWARD[1::2])
def test_forward_with_the_residual(rows: tuple[int, ...], C: int, dtype: jnp.dtype, of_w: jnp.dtype) -> None:
    x, f, _, _, w, b = arrays(rows, C, dtype, of_w)
    residual, *normalised = interpreted(layernorm.residual_layernorm_forward)(x, f, w, b)
    np.testing.assert_array_equal(residual, x + f)  # one addition, rounded once
    check_forward(residual, w, b, *normalised)


@every(BACKWARD)
def test_backward(rows: tuple[int, ...], C: int, dtype: jnp.dtype, of_w: jnp.dtype) -> None:
    x, _, _, dout, w, _ = arrays(rows, C, dtype, of_w)
    wide = in_float64(x)[0]
    mean, rstd = (jnp.asarray(a, jnp.float32) for a in (wide.mean(-1), (wide.var(-1) + 1e-5) ** -0.5))
    found = interpreted(layernorm.layernorm_backward)(dout, x, w, mean, rstd)
    assert [g.dtype for g in found] == [dtype, f32, f32, f32]
    for got, expected in zip(found, gradients(*in_float64(dout, x, w)), strict=True):
        check(got, expected, ROUNDING[got.dtype.type])


@pytest.mark.slow
@every(BACKWARD[::2])
def test_backward_with_the_residual(rows: tuple[int, ...], C: int, dtype: jnp.dtype, of_w: jnp.dtype) -> None:
    x, _, dresidual, dout, w, _ = arrays(rows, C, dtype, of_w)
    wide = in_float64(x)[0]
    mean, rstd = (jnp.asarray(a, jnp.float32) for a in (wide.mean(-1), (wide.var(-1) + 1e-5) ** -0.5))
    found = interpreted(layernorm.residual_layernorm_backward)(dresidual, dout, x, w, mean, rstd)
    dx, dw, db, dbias = gradients(*in_float64(dout, x, w))
    stream = in_float64(dresidual)[0]
    for got, expected in zip(found, (dx + stream, dw, db, dbias + rows_of(stream).sum(0)), strict=True):
        check(got, expected, ROUNDING[got.dtype.type])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "C"),
    [(22, 64), pytest.param(9, 1088, marks=pytest.mark.slow), pytest.param(5, 2176, marks=pytest.mark.slow), (3, 5120)],
)
def test_a_block_goes_over_several_rows(rows: int, C: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a grid of 2: each of the four plans; tiles in unequal numbers, the last with padding."""
    monkeypatch.setattr(layernorm, "blocks", lambda *_: 2)
    x, _, _, dout, w, _ = arrays((rows,), C, jnp.float32, jnp.float32)
    wide = in_float64(x)[0]
    mean, rstd = (jnp.asarray(a, jnp.float32) for a in (wide.mean(-1), (wide.var(-1) + 1e-5) ** -0.5))
    backward = jax.jit(layernorm._backward, static_argnums=(6, 7), compiler_options=QUICK)  # theirs remembers the grid
    found = backward(None, dout, x, w, mean, rstd, "sm_90", True)
    for got, expected in zip(found, gradients(*in_float64(dout, x, w)), strict=True):
        check(got, expected, IN_FP32)


@pytest.mark.parametrize(("C", "waits"), [(768, 6), (1600, 6), (2560, 0), (5120, 0)])
def test_warps_wait_where_they_read_each_other_s_sums(C: int, waits: int) -> None:
    """Twice for each of three sums, where rows of several warps are added. Interpret mode has one thread for all."""
    x, w, rows = jnp.zeros((8, C), jnp.bfloat16), jnp.zeros(C), jnp.zeros(8)
    program = str(jax.make_jaxpr(layernorm.layernorm_backward)(x, x, w, rows, rows))
    assert program.count("barrier_arrive") == program.count("barrier_wait") == waits


def test_a_row_far_from_zero_keeps_its_variance() -> None:
    """The variance is that of x - mean: mean(x^2) - mean(x)^2 would cancel here. In registers and streamed."""
    for C in (256, 9216):
        rng = np.random.default_rng(0)
        x = jnp.asarray(4096 + rng.integers(-8, 9, (2, C)) / 8, jnp.float32)  # exact
        _, _, rstd = interpreted(layernorm.layernorm_forward)(x, jnp.ones(C), jnp.zeros(C))
        np.testing.assert_allclose(rstd, (in_float64(x)[0].var(-1) + 1e-5) ** -0.5, rtol=1e-4)


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    """256 + 1 is 256 in bf16: the row is constant after rounding, and not before."""
    x, f = jnp.full((4, 32), 256, jnp.bfloat16), jnp.asarray(np.tile([0.0, 1.0], (4, 16)), jnp.bfloat16)
    residual, out, mean, _ = interpreted(layernorm.residual_layernorm_forward)(x, f, jnp.ones(32), jnp.zeros(32))
    np.testing.assert_array_equal(residual.astype(np.float32), 256)
    np.testing.assert_array_equal(mean, 256)
    np.testing.assert_array_equal(out.astype(np.float32), 0)


def test_every_row_length_has_a_plan() -> None:
    for target in tuning.TARGETS:
        for limits in (tuning.sizes(target).layernorm_forward, tuning.sizes(target).layernorm_backward):
            teams = [plan_rows(C, limits).team for C in range(1, 13000, 7)]
            assert {1, 2, 4, 0} == set(teams)
            assert all(plan_rows(C, limits).columns >= C for C in range(1, 13000, 7))
        assert layernorm.longest_row(target) >= 12288  # GPT-3's largest


def test_what_it_refuses() -> None:
    x, w = jnp.zeros((4, 32768), jnp.bfloat16), jnp.zeros(32768)
    rows = jnp.zeros(4)
    with pytest.raises(ValueError, match="too long for sm_89, which takes up to 12288"):
        layernorm.layernorm_backward(x, x, w, rows, rows, target="sm_89", interpret=True)
    with pytest.raises(ValueError, match="f is float32 and x is bfloat16"):
        layernorm.residual_layernorm_forward(x, x.astype(jnp.float32), w, w, interpret=True)
    with pytest.raises(ValueError, match="no kernels for sm_75"):
        layernorm.layernorm_forward(x, w, w, target="sm_75", interpret=True)
