"""The fused classifier's kernel, interpreted with race detection, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.ops import classifier as twin
from pallas_kernels.classifier import _form, classifier

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


SHAPES = {
    "d12's row: seven rounds of slabs, and a last one with padding": (2, 50304, 50257, "bf16"),
    "bytes: two narrow slabs, one real column in the second": (5, 384, 257, "bf16"),
    "one round, a slab alone, narrow ones": (3, 8576, 8500, "bf16"),
    "two rounds, and padding that begins with a slab": (2, 14464, 14336, "bf16"),
    "padding in the middle of a slab, and slabs of padding alone": (3, 4096, 1500, "bf16"),
    "an odd stride: padded and cut off again": (3, 1001, 999, "bf16"),
    "one column": (2, 128, 1, "bf16"),
    "no padding": (3, 2304, 2304, "fp16"),
    "float32: slabs of half the columns": (3, 4736, 4700, "fp32"),
    "a single row": (1, 384, 257, "fp16"),
}


@pytest.mark.parametrize("form", ["shared", "sweeps"])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape: str, form: str) -> None:
    n, Vp, V, dtype = SHAPES[shape]
    check(*inputs(n, Vp, V, dtype), V, form=form)


@pytest.mark.parametrize("padding", [0.0, 60_000.0, np.inf, -np.inf])
def test_padded_columns_take_no_part(padding: float) -> None:
    check(*inputs(3, 1280, 1100, "bf16", padding=padding), 1100)


def test_targets_at_the_borders_of_slabs_and_rounds() -> None:
    targets = jnp.array([0, 1023, 1024, 7167, 7168, 8191, 8192, 8447, 8448, 8499], jnp.int32)
    logits, _, dlosses = inputs(len(targets), 8576, 8500, "bf16")
    check(logits, targets, dlosses, 8500)


def test_large_logits_do_not_overflow() -> None:
    logits = np.zeros((4, 384), np.float32)
    logits[0, :3] = 1e4, -1e4, 0.0
    logits[1, 7] = 3e38
    logits[2] = -1e4
    logits[3] = -np.inf
    logits[3, 200] = -1e30
    targets = jnp.array([1, 7, 0, 200], jnp.int32)
    losses, dlogits = classifier(jnp.asarray(logits), targets, jnp.ones(4), 257, interpret=True)
    np.testing.assert_allclose(losses, [2e4, 0.0, np.log(257), 0.0], rtol=1e-6)
    one_hot = np.eye(384)[np.asarray(targets)]
    prob = np.stack([np.eye(384)[0], np.eye(384)[7], (np.arange(384) < 257) / 257, np.eye(384)[200]])
    np.testing.assert_allclose(dlogits, prob - one_hot, rtol=1e-5)


def test_rows_do_not_touch_one_another() -> None:
    """A row that is not a number, and one whose loss gets no gradient."""
    logits, targets, dlosses = inputs(4, 384, 257, "bf16")
    losses, dlogits = classifier(logits.at[1, 30].set(jnp.nan), targets, dlosses.at[2].set(0.0), 257, interpret=True)
    wanted = classifier(logits, targets, dlosses, 257, interpret=True)
    assert np.isnan(losses[1]) and np.isnan(np.asarray(dlogits[1, :257], np.float32)).all()
    np.testing.assert_array_equal(np.delete(losses, 1), np.delete(wanted[0], 1))
    np.testing.assert_array_equal(dlogits[jnp.array([0, 3])], wanted[1][jnp.array([0, 3])])
    assert (dlogits[2] == 0).all()


def test_agrees_with_the_plain_operation() -> None:
    logits, targets, dlosses = inputs(6, 384, 257, "fp32")
    found = classifier(logits, targets, dlosses, 257, interpret=True)
    for ours, plain in zip(found, twin.classifier(logits, targets, dlosses, 257), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-7)


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
