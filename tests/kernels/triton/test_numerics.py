"""Every Triton kernel in Triton's interpreter, against formulas in float64 and their derivatives by jax.vjp.

Outputs hold NaN before a kernel writes them, so a place that it leaves out is seen. The interpreter cuts fp32 off to
bf16 where a GPU rounds (test_compile.py sees to that), so one conversion errs by up to 2^-7 there instead of 2^-8.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROUNDOFF = {jnp.bfloat16: 2.0**-7, jnp.float16: 2.0**-11, jnp.float32: 2.0**-24}  # of one conversion, relative
FP32 = 1e-5  # sums of up to a few thousand terms of size 1 in fp32: absolute
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def draw(rng: np.random.Generator, shape: Sequence[int], dtype: Any, spread: float = 1.0) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) * spread, dtype)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def row_sum(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1]).sum(0)


def vjp(function: Any, inputs: Sequence[jax.Array], *gradients: jax.Array) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Results of a function and the gradients of its inputs, in float64."""
    with jax.enable_x64(True):
        outputs, pull = jax.vjp(function, *[jnp.asarray(wide(each)) for each in inputs])
        cotangents = tuple(jnp.asarray(wide(each)) for each in gradients)
        back = pull(cotangents if isinstance(outputs, tuple) else cotangents[0])
        return jax.tree.map(np.asarray, outputs), tuple(np.asarray(each) for each in back)


def assert_rounded(found: jax.Array, expected: np.ndarray, dtype: Any, *, sums: float = FP32) -> None:
    """found is expected, rounded to its dtype, but for the error of sums in fp32 (relative to the largest value)."""
    assert found.dtype == dtype
    assert found.shape == expected.shape
    largest = np.max(np.abs(expected), initial=1.0)
    np.testing.assert_allclose(wide(found), expected, rtol=ROUNDOFF[dtype], atol=sums * largest)


# ----- layernorm ----------------------------------------------------------------------------------------------------


def layernorm(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b


LAYERNORMS = [
    ((2, 3), 40, f32), ((2, 3), 40, bf16), ((2, 3), 40, f16), ((5,), 7, f32), ((5,), 7, bf16), ((4, 1), 1, f32),
    ((1, 3), 768, bf16), ((2,), 1600, f32), ((2,), 1024, f16),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "C", "dtype"), LAYERNORMS)
def test_layernorm_forward(
    kernels: SimpleNamespace, rng: np.random.Generator, rows: tuple[int, ...], C: int, dtype: Any
) -> None:
    x = draw(rng, (*rows, C), dtype, 3.0) + jnp.asarray(rng.normal(size=(*rows, 1)), dtype)
    w, b = draw(rng, (C,), jnp.float32), draw(rng, (C,), dtype)
    out, mean, rstd = kernels.layernorm.layernorm_forward(x, w, b, interpret=True)
    expected, _ = vjp(layernorm, (x, w, b), np.zeros(x.shape))
    assert_rounded(out, expected, dtype)
    assert_rounded(mean, wide(x).mean(-1), jnp.float32)
    assert_rounded(rstd, 1 / np.sqrt(wide(x).var(-1) + 1e-5), jnp.float32)


@pytest.mark.parametrize(("rows", "C", "dtype"), LAYERNORMS)
def test_layernorm_backward(
    kernels: SimpleNamespace, rng: np.random.Generator, rows: tuple[int, ...], C: int, dtype: Any
) -> None:
    x, dout = draw(rng, (*rows, C), dtype, 3.0), draw(rng, (*rows, C), dtype)
    w, b = draw(rng, (C,), jnp.float32), draw(rng, (C,), jnp.float32)
    _, (dx, dw, db) = vjp(layernorm, (x, w, b), dout)
    mean, rstd = wide(x).mean(-1), 1 / np.sqrt(wide(x).var(-1) + 1e-5)
    found = kernels.layernorm.layernorm_backward(dout, x, w, jnp.float32(mean), jnp.float32(rstd), interpret=True)
    # C = 1: dx is exactly 0, the difference of two equal terms as large as rstd
    assert_rounded(found[0], dx, dtype, sums=FP32 * max(1.0, rstd.max()))
    assert_rounded(found[1], dw, jnp.float32)
    assert_rounded(found[2], db, jnp.float32)
    assert_rounded(found[3], row_sum(dx), dtype, sums=FP32 * max(1.0, rstd.max()) * x.size / C)


@pytest.mark.parametrize(("rows", "C", "dtype"), LAYERNORMS)
def test_residual_layernorm_forward(
    kernels: SimpleNamespace, rng: np.random.Generator, rows: tuple[int, ...], C: int, dtype: Any
) -> None:
    x, f, w, b = (draw(rng, shape, dtype) for shape in ((*rows, C), (*rows, C), (C,), (C,)))
    residual, out, mean, rstd = kernels.layernorm.residual_layernorm_forward(x, f, w, b, interpret=True)
    assert_rounded(residual, wide(x) + wide(f), dtype, sums=0)
    expected, _ = vjp(layernorm, (residual, w, b), np.zeros(x.shape))  # of the rounded sum
    assert_rounded(out, expected, dtype)
    assert_rounded(mean, wide(residual).mean(-1), jnp.float32)
    assert_rounded(rstd, 1 / np.sqrt(wide(residual).var(-1) + 1e-5), jnp.float32)


@pytest.mark.parametrize(("rows", "C", "dtype"), LAYERNORMS)
def test_residual_layernorm_backward(
    kernels: SimpleNamespace, rng: np.random.Generator, rows: tuple[int, ...], C: int, dtype: Any
) -> None:
    x, f, dresidual, dout = (draw(rng, (*rows, C), dtype) for _ in range(4))
    residual, w, b = x + f, draw(rng, (C,), dtype), draw(rng, (C,), dtype)
    _, (dx, dw, db) = vjp(lambda r, w, b: (r, layernorm(r, w, b)), (residual, w, b), dresidual, dout)
    mean, rstd = wide(residual).mean(-1), 1 / np.sqrt(wide(residual).var(-1) + 1e-5)
    found = kernels.layernorm.residual_layernorm_backward(
        dresidual, dout, residual, w, jnp.float32(mean), jnp.float32(rstd), interpret=True
    )
    assert_rounded(found[0], dx, dtype, sums=FP32 * max(1.0, rstd.max()))
    assert_rounded(found[1], dw, dtype)
    assert_rounded(found[2], db, dtype)
    assert_rounded(found[3], row_sum(dx), dtype, sums=FP32 * max(1.0, rstd.max()) * x.size / C)


def test_backwards_whose_programs_take_several_rows(
    kernels: SimpleNamespace, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 programs for 11 rows: three turns, the last one short."""
    monkeypatch.setattr(kernels.layernorm, "sizes", lambda target: SimpleNamespace(sms=1))
    dresidual, dout, x = (draw(rng, (11, 12), f32) for _ in range(3))
    w, mean, rstd = draw(rng, (12,), f32), x.mean(-1), 1 / jnp.sqrt(x.var(-1) + 1e-5)
    _, gradients = vjp(layernorm, (x, w, w), dout)
    found = kernels.layernorm.layernorm_backward(dout, x, w, mean, rstd, interpret=True)
    for ours, expected in zip(found, (*gradients, row_sum(gradients[0])), strict=True):
        assert_rounded(ours, expected, f32)
    found = kernels.layernorm.residual_layernorm_backward(dresidual, dout, x, w, mean, rstd, interpret=True)
    dx = gradients[0] + wide(dresidual)
    for ours, expected in zip(found, (dx, *gradients[1:], row_sum(dx)), strict=True):
        assert_rounded(ours, expected, f32)


# ----- causal softmax -----------------------------------------------------------------------------------------------


def softmax(scores: jax.Array, scale: float) -> jax.Array:
    T = scores.shape[-1]
    past = np.tril(np.ones((T, T), bool))
    return jax.nn.softmax(jnp.where(past, scores * scale, -jnp.inf), axis=-1)


def with_rubbish(scores: jax.Array) -> jax.Array:
    """The future filled with what must not be seen."""
    T = scores.shape[-1]
    rubbish = np.resize([np.nan, np.inf, -np.inf, 6e4], (T, T))
    return jnp.where(np.tril(np.ones((T, T), bool)), scores, jnp.asarray(rubbish, scores.dtype))


SOFTMAXES = [  # (..., T)
    ((2, 3, 7), f32), ((2, 3, 7), bf16), ((2, 3, 7), f16), ((1, 1), f32), ((1, 64), bf16), ((1, 63), f32),
    ((1, 63), bf16), ((1, 1, 130), f16),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), SOFTMAXES)
def test_softmax_forward(
    kernels: SimpleNamespace, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any
) -> None:
    scores = draw(rng, (*shape, shape[-1]), dtype, 5.0)
    expected, _ = vjp(lambda s: softmax(s, 0.35), [scores], np.zeros(scores.shape))
    att = kernels.softmax.softmax_forward(with_rubbish(scores), 0.35, interpret=True)
    tiny = 2.0**-25 if dtype == jnp.float16 else 0.0  # half the smallest fp16
    assert_rounded(att, expected, dtype, sums=1e-6 + tiny)
    assert not np.triu(wide(att), 1).any()


@pytest.mark.parametrize(("shape", "dtype"), SOFTMAXES)
def test_softmax_backward(
    kernels: SimpleNamespace, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any
) -> None:
    scores, datt = draw(rng, (*shape, shape[-1]), jnp.float32, 3.0), draw(rng, (*shape, shape[-1]), dtype)
    att = jnp.asarray(vjp(lambda s: softmax(s, 0.35), [scores], datt)[0], dtype)
    weights, gradient = wide(att), wide(datt)  # the softmax as it was stored, rounded
    expected = 0.35 * weights * (gradient - (weights * gradient).sum(-1, keepdims=True))
    found = kernels.softmax.softmax_backward(with_rubbish(datt), att, 0.35, interpret=True)
    assert_rounded(found, expected, dtype, sums=1e-6)
    assert not np.triu(wide(found), 1).any()


def test_softmax_backward_is_the_derivative(kernels: SimpleNamespace, rng: np.random.Generator) -> None:
    scores, datt = draw(rng, (2, 33, 33), jnp.float32), draw(rng, (2, 33, 33), jnp.float32)
    _, (expected,) = vjp(lambda s: softmax(s, 0.35), [scores], datt)
    att = kernels.softmax.softmax_forward(scores, 0.35, interpret=True)
    found = kernels.softmax.softmax_backward(datt, att, 0.35, interpret=True)
    assert_rounded(found, expected, jnp.float32, sums=1e-6)


def test_softmax_of_large_scores(kernels: SimpleNamespace) -> None:
    """exp(3e4) overflows; the largest of a row is subtracted. A negative scale picks the smallest score."""
    scores = jnp.asarray([[5.0, 0.0, 0.0], [3e4, 1e4, 0.0], [-3e4, -1e4, -1e4]], jnp.float32)
    att = kernels.softmax.softmax_forward(scores, 1.0, interpret=True)
    np.testing.assert_array_equal(att, [[1, 0, 0], [1, 0, 0], [0, 0.5, 0.5]])
    att = kernels.softmax.softmax_forward(scores, -1.0, interpret=True)
    np.testing.assert_array_equal(att, [[1, 0, 0], [0, 1, 0], [1, 0, 0]])


# ----- classifier ---------------------------------------------------------------------------------------------------


def losses_of(logits: jax.Array, targets: np.ndarray, V: int) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :V], axis=-1), targets[:, None], axis=-1)[:, 0]


@pytest.mark.parametrize(
    ("rows", "V", "Vp", "dtype"),
    [
        (5, 5, 7, f32), (5, 5, 7, bf16), (5, 5, 7, f16), (3, 257, 384, bf16), (2, 1, 1, f32), (2, 8193, 8201, f32),
        (2, 16384, 16384, bf16), (2, 50257, 50304, f32), (2, 50257, 50304, bf16), (2, 100, 17000, f16),
    ],
)  # fmt: skip
def test_classifier(kernels: SimpleNamespace, rng: np.random.Generator, rows: int, V: int, Vp: int, dtype: Any) -> None:
    logits = draw(rng, (rows, Vp), dtype, 4.0)
    targets = rng.integers(0, V, rows).astype(np.int32)
    targets[0], targets[-1] = V - 1, 0
    dlosses = jnp.asarray(rng.uniform(0.5, 2.0, rows), jnp.float32)
    expected, (gradient,) = vjp(lambda x: losses_of(x, targets, V), [logits], dlosses)
    padded = logits.at[:, V:].set(jnp.asarray(np.resize([np.nan, np.inf, 1e4], Vp - V), dtype))
    losses, dlogits = kernels.classifier.classifier(padded, jnp.asarray(targets), dlosses, V, interpret=True)
    assert_rounded(losses, expected, jnp.float32)
    # relative even where a probability is 1e-6: exp and its sum in fp32 are good to 1e-5; fp16 cannot hold less
    rtol = ROUNDOFF[dtype] + FP32
    np.testing.assert_allclose(wide(dlogits), gradient, rtol=rtol, atol=2.0**-25 if dtype == jnp.float16 else 1e-10)
    assert dlogits.dtype == dtype
    assert not wide(dlogits)[:, V:].any()


def test_classifier_with_extreme_logits(kernels: SimpleNamespace) -> None:
    """Large logits do not overflow, and a first block that is -inf throughout adds nothing."""
    logits = np.full((2, 9000), -np.inf, np.float32)
    logits[0, 8500:8502] = (3e4, 3e4)
    logits[1, 3] = 88.0
    targets = jnp.asarray([8500, 3], jnp.int32)
    losses, dlogits = kernels.classifier.classifier(logits, targets, jnp.ones(2), 9000, interpret=True)
    np.testing.assert_allclose(losses, [np.log(2), 0], atol=2e-3)  # 3e4 + log 2 has a spacing of 2e-3 in fp32
    expected = np.zeros((2, 9000))
    expected[0, 8500:8502] = (-0.5, 0.5)
    np.testing.assert_allclose(dlogits, expected, atol=1e-3)


def test_classifier_of_a_target_that_is_no_token(kernels: SimpleNamespace) -> None:
    targets = jnp.asarray([-1, 3, 1_000_000], jnp.int32)
    losses, _ = kernels.classifier.classifier(jnp.zeros((3, 4)), targets, jnp.ones(3), 3, interpret=True)
    assert np.isnan(losses).all()


# ----- what all of them refuse, and no rows -------------------------------------------------------------------------


def test_other_dtypes_are_refused(kernels: SimpleNamespace) -> None:
    ints, floats = jnp.ones((4, 4), jnp.int32), jnp.ones((4, 4))
    with pytest.raises(ValueError, match=r"x is int32; .* convert it"):
        kernels.layernorm.layernorm_forward(ints, floats[0], floats[0], interpret=True)
    with pytest.raises(ValueError, match="scores is int32"):
        kernels.softmax.softmax_forward(ints, 1.0, interpret=True)
    with pytest.raises(ValueError, match="logits is int32"):
        kernels.classifier.classifier(ints, ints[0], floats[0], 4, interpret=True)


def test_shapes_that_fit_nothing_are_refused(kernels: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"\(\.\.\., T, T\).*not \(3, 4\)"):
        kernels.softmax.softmax_forward(jnp.ones((3, 4)), 1.0, interpret=True)
    for V in (0, 5):
        with pytest.raises(ValueError, match=f"vocab_size is {V}; it must be between 1 and the 4"):
            kernels.classifier.classifier(jnp.ones((1, 4)), jnp.zeros(1, jnp.int32), jnp.ones(1), V, interpret=True)


def test_unknown_target_and_wrong_mode_are_refused(kernels: SimpleNamespace) -> None:
    x = jnp.ones((2, 8))
    with pytest.raises(ValueError, match="no kernels for sm_70"):
        kernels.layernorm.layernorm_forward(x, x[0], x[0], target="sm_70", interpret=True)
    with pytest.raises(ValueError, match=r"interpret=False: .* without TRITON_INTERPRET"):
        kernels.layernorm.layernorm_forward(x, x[0], x[0])


def test_no_rows(kernels: SimpleNamespace) -> None:
    x, w, none = jnp.ones((0, 8)), jnp.ones(8), jnp.ones(0)
    assert kernels.layernorm.layernorm_forward(x, w, w, interpret=True)[0].shape == (0, 8)
    dx, *sums = kernels.layernorm.layernorm_backward(x, x, w, none, none, interpret=True)
    assert (dx.shape, *(each.tolist() for each in sums)) == ((0, 8), [0.0] * 8, [0.0] * 8, [0.0] * 8)
    assert kernels.softmax.softmax_forward(jnp.ones((0, 3, 3)), 1.0, interpret=True).shape == (0, 3, 3)
    losses, _ = kernels.classifier.classifier(x, none.astype(jnp.int32), none, 8, interpret=True)
    assert losses.shape == (0,)
