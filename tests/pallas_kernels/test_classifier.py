"""The fused classifier's kernel, interpreted with race detection, against float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from llmc_jax.machine import deviceless, gpus
from pallas_kernels import classifier as kernels
from pallas_kernels.classifier import _form, classifier
from tests.pallas_kernels.test_mosaic import launches

pytestmark = pytest.mark.usefixtures("quick_compilation")

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


def inputs(n: int, Vp: int, V: int, dtype: str, *, padding: float = np.nan) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits whose padded columns are poison, targets with the first and the last id among them, and dlosses."""
    rng = np.random.default_rng(Vp + n)
    logits = rng.normal(0, 3, (n, Vp))
    logits[:, V:] = padding
    targets = rng.integers(0, V, n)
    targets[0], targets[-1] = 0, V - 1
    return jnp.asarray(logits, DTYPES[dtype]), jnp.asarray(targets, jnp.int32), jnp.asarray(rng.normal(size=n), "f4")


def expected(logits: Any, targets: Any, dlosses: Any, V: int) -> tuple[np.ndarray, np.ndarray]:
    """Losses and dlogits in float64."""
    wide = np.asarray(logits).astype(np.float64)[:, :V]
    shifted = wide - wide.max(1, keepdims=True)
    log_prob = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    hit = np.arange(V) == np.asarray(targets)[:, None]
    dlogits = np.zeros(logits.shape)
    dlogits[:, :V] = (np.exp(log_prob) - hit) * np.asarray(dlosses, np.float64)[:, None]
    return -log_prob[hit], dlogits


def check(logits: jax.Array, targets: jax.Array, dlosses: jax.Array, V: int, **how: Any) -> None:
    losses, dlogits = classifier(logits, targets, dlosses, V, interpret=True, **how)
    wanted = expected(logits, targets, dlosses, V)
    assert losses.dtype == jnp.float32 and dlogits.dtype == logits.dtype and dlogits.shape == logits.shape
    np.testing.assert_allclose(losses, wanted[0], rtol=2e-6, atol=2e-6)
    half = float(jnp.finfo(logits.dtype).eps) / 2  # one rounding, on top of float32's error of exp2 over the row
    smallest = float(jnp.finfo(logits.dtype).smallest_subnormal) / 2
    np.testing.assert_allclose(np.asarray(dlogits, np.float64), wanted[1], rtol=1.01 * half + 4e-6, atol=smallest)
    assert (np.asarray(dlogits[:, V:]).astype(np.float32) == 0).all()


D12 = "d12's row: four rounds of slabs for two warpgroups, a narrower one, and one for the first alone"
SHAPES = {
    D12: (2, 50304, 50257, "bf16"),
    "bytes: two narrow slabs, one real column in the second": (5, 384, 257, "bf16"),
    "one round, and narrow slabs, the last one for one warpgroup": (3, 8576, 8500, "bf16"),
    "two rounds, a slab alone, and padding that begins with a slab": (2, 30848, 30720, "bf16"),
    "padding in the second warpgroup's part": (2, 6144, 5500, "bf16"),
    "padding in the middle of a slab, and slabs of padding alone": (3, 4096, 1500, "bf16"),
    "an odd stride: padded and cut off again": (3, 1001, 999, "bf16"),
    "one column": (2, 128, 1, "bf16"),
    "no padding": (3, 2304, 2304, "fp16"),
    "float32: slabs of half the columns": (3, 4736, 4700, "fp32"),
    "a single row": (1, 384, 257, "fp16"),
}


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "form"),
    [
        *[(shape, "shared") if place % 4 == 0 else slow(shape, "shared") for place, shape in enumerate(SHAPES)],
        # Both forms compute the same.
        *[slow(shape, "sweeps") for shape, (_, Vp, _, _) in SHAPES.items() if 1000 < Vp < 4500],
        slow(D12, "sweeps"),
    ],
)
def test_against_float64(shape: str, form: str) -> None:
    n, Vp, V, dtype = SHAPES[shape]
    check(*inputs(n, Vp, V, dtype), V, form=form)


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0.0, 60_000.0, np.inf, -np.inf])
def test_padded_columns_take_no_part(padding: float) -> None:
    check(*inputs(3, 1280, 1100, "bf16", padding=padding), 1100)


@pytest.mark.slow
def test_targets_at_the_borders_of_slabs_and_rounds() -> None:
    targets = jnp.array([0, 1023, 1024, 7167, 7168, 8191, 8192, 8447, 8448, 8499], jnp.int32)
    logits, _, dlosses = inputs(len(targets), 8576, 8500, "bf16")
    check(logits, targets, dlosses, 8500)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["every product", "as the GPU does"])
def test_large_logits_do_not_overflow(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.zeros((4, 384), np.float32)
    logits[0, :3] = 1e4, -1e4, 0.0
    logits[1, 7] = 1e9
    logits[2] = -1e4
    logits[3] = -np.inf
    logits[3, 200] = -1e9
    targets = np.array([1, 7, 0, 200], np.int32)
    if rounding == "as the GPU does":
        monkeypatch.setattr(kernels, "_exponents", rounded_once)
    with jax.enable_x64(rounding == "as the GPU does"):
        losses, dlogits = classifier.__wrapped__(
            jnp.asarray(logits), jnp.asarray(targets), jnp.ones(4, jnp.float32), 257, interpret=True
        )
    fused = rounding == "as the GPU does"  # exp2 of what the largest logit's own exponent lacks of 0 is rounded
    np.testing.assert_allclose(losses, [2e4, 0.0, np.log(257), 0.0], rtol=1e-6, atol=1e-6 * fused)
    one_hot = np.eye(384)[targets]
    prob = np.stack([np.eye(384)[0], np.eye(384)[7], (np.arange(384) < 257) / 257, np.eye(384)[200]])
    np.testing.assert_allclose(dlogits, prob - one_hot, rtol=1e-5, atol=1e-6 * fused)


def rounded_once(logits: jax.Array, base: Any, interpret: bool) -> jax.Array:
    """The kernel's exponents as the hardware has them: the product in full, then one rounding."""
    product = logits.astype(jnp.float64) * float(np.float32(kernels.LOG2E))
    return (product - base).astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["up", "either"])
def test_the_hardware_s_exponential_is_exact_enough(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ex2.approx is off by up to 2 units in the last place, 2^-22: up, or as the argument's last bit says.

    Up everywhere cancels between a weight and the sum of all, but for the loss, whose logarithm it moves by no
    more; in both directions a probability may be off by twice as much, 2^-21.
    """
    exp2 = jnp.exp2

    def approximate(x: jax.Array) -> jax.Array:
        odd = lax.bitcast_convert_type(x, jnp.int32) & 1
        sign = {"up": 1.0, "either": (2 * odd - 1).astype(jnp.float32)}[direction]
        return exp2(x) * (1 + sign * jnp.float32(2.0**-22))

    logits, targets, dlosses = inputs(3, 1664, 1600, "fp32")
    wanted = expected(logits, targets, dlosses, 1600)
    monkeypatch.setattr(kernels, "_exponents", rounded_once)
    monkeypatch.setattr(kernels.jnp, "exp2", approximate)
    with jax.enable_x64(True):
        losses, dlogits = classifier.__wrapped__(logits, targets, dlosses, 1600, interpret=True)
    moved = np.abs(np.asarray(losses, np.float64) - wanted[0]).max()
    np.testing.assert_allclose(losses, wanted[0], rtol=2e-6, atol=2e-6)
    hit = np.arange(1664) == np.asarray(targets)[:, None]
    error = np.abs(np.asarray(dlogits, np.float64) - wanted[1])
    prob = np.abs(wanted[1] + hit * np.asarray(dlosses, np.float64)[:, None])  # times |dloss|
    assert (error <= (2.0**-21 + 4e-6) * prob + 2.0**-23 * hit).all()
    assert moved > 2.0**-26  # it was the exponential that was spoilt


def test_rows_do_not_touch_one_another() -> None:
    """A row that is not a number, and one whose loss gets no gradient."""
    logits, targets, dlosses = inputs(4, 384, 257, "bf16")
    losses, dlogits = classifier(logits.at[1, 30].set(jnp.nan), targets, dlosses.at[2].set(0.0), 257, interpret=True)
    wanted = classifier(logits, targets, dlosses, 257, interpret=True)
    assert np.isnan(losses[1]) and np.isnan(np.asarray(dlogits[1, :257], np.float32)).all()
    np.testing.assert_array_equal(np.delete(losses, 1), np.delete(wanted[0], 1))
    np.testing.assert_array_equal(dlogits[jnp.array([0, 3])], wanted[1][jnp.array([0, 3])])
    assert (dlogits[2] == 0).all()


def test_no_rows() -> None:
    losses, dlogits = classifier(
        jnp.zeros((0, 384), jnp.bfloat16), jnp.zeros(0, jnp.int32), jnp.zeros(0), 257, interpret=True
    )
    assert losses.shape == (0,) and dlogits.shape == (0, 384)


def test_a_row_is_kept_where_two_fit_into_a_multiprocessor() -> None:
    d12 = 50304 * 2  # bytes
    assert {target: _form(d12, target) for target in ("sm_80", "sm_89", "sm_90", "sm_100")} == {
        "sm_80": "sweeps", "sm_89": "sweeps", "sm_90": "shared", "sm_100": "shared",
    }  # fmt: skip
    assert _form(2 * d12, "sm_90") == "sweeps"
    assert _form(384 * 2, "sm_89") == "shared"


def test_the_widest_row_that_is_kept_is_kept_twice() -> None:
    """By the shared memory that the lowered kernel asks for, and a kilobyte of the system's."""
    Vp = max(columns for columns in range(128, 120_000, 128) if _form(columns * 2, "sm_90") == "shared")
    kinds = ((2, Vp), jnp.bfloat16), ((2,), jnp.int32), ((2,), jnp.float32)
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    [launch] = launches(deviceless.lower_for(jax.jit(partial(classifier, vocab_size=Vp)), given, "h200"))
    assert launch.threads == 256
    room = gpus.TARGETS["h200"].shared_memory_per_multiprocessor
    assert 2 * Vp <= launch.shared_memory <= room // 2 - 1024


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logits": jnp.zeros((4, 2, 384))}, r"expected \(n, Vp\)"),
        ({"targets": jnp.zeros(3, jnp.int32)}, r"expected \(n, Vp\)"),
        ({"vocab_size": 385}, "is not in 1..384"),
        ({"vocab_size": 0}, "is not in 1..384"),
        ({"targets": jnp.zeros(4)}, "int32"),
        ({"logits": jnp.zeros((4, 384), jnp.int32)}, "bf16, fp16 or fp32"),
        ({"form": "registers"}, "'shared' or 'sweeps'"),
        ({"target": "sm_75"}, "no kernels for sm_75"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], says: str) -> None:
    given = {"logits": jnp.zeros((4, 384)), "targets": jnp.zeros(4, jnp.int32), "dlosses": jnp.zeros(4)}
    with pytest.raises(ValueError, match=says):
        classifier(**(given | {"vocab_size": 257} | change), interpret=True)
