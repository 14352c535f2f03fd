"""The output head in one piece and in chunks, against jax.grad of the plain formula in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.ops.classifier import classifier, classifier_forward
from llmc_jax.ops.head import head_gradients, head_losses, rows_per_chunk
from llmc_jax.ops.linear import linear_forward

N, C, V, Vp = 30, 6, 11, 16  # rows, channels, vocabulary, padded vocabulary
LIMITS = (0, N, N + 5, 15, 7, 1)  # all at once thrice; two chunks; 7 does not divide 30: five chunks of 6; 30 chunks
gradients = jax.jit(head_gradients, static_argnums=(4, 5, 6))
losses_alone = jax.jit(head_losses, static_argnums=(3, 4, 5))


def arrays(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """lnf (N, C), wte (Vp, C) whose padding is not zero, targets (N,), dlosses (N,) of both signs, one of them 0."""
    targets = rng.integers(0, V, N).astype(np.int32)
    targets[:2] = 0, V - 1
    dlosses = rng.normal(size=N)
    dlosses[3] = 0
    return rng.normal(size=(N, C)), rng.normal(size=(Vp, C)), targets, dlosses


def plain_losses(lnf: Any, wte: Any, targets: Any) -> jax.Array:
    log_probs = jax.nn.log_softmax(lnf @ wte[:V].T, axis=-1)  # (N, V)
    return -jnp.sum(log_probs * jax.nn.one_hot(targets, V, dtype=log_probs.dtype), axis=-1)


@jax.jit
def plain(lnf: Any, wte: Any, targets: Any, dlosses: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses, dlnf, dwte."""
    total = jax.grad(lambda lnf, wte: jnp.sum(dlosses * plain_losses(lnf, wte, targets)), argnums=(0, 1))
    return plain_losses(lnf, wte, targets), *total(lnf, wte)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("limit", LIMITS)
def test_losses_and_gradients(limit: int, rng: np.random.Generator) -> None:
    inputs = arrays(rng)
    expected = plain(*inputs)
    found = gradients(*inputs, V, classifier, limit)
    for name, one, other in zip(("losses", "dlnf", "dwte"), found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == jnp.float64, name
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13, err_msg=name)
    assert not np.asarray(found[2])[V:].any()  # the padded rows of wte
    assert not np.asarray(found[1])[3].any()  # the row whose loss does not count
    np.testing.assert_allclose(losses_alone(*inputs[:3], V, classifier_forward, limit), expected[0], rtol=1e-12)


def no_gradient(*args: Any) -> Any:
    losses, dlogits = classifier(*args)
    return losses, 0 * dlogits


def rows_in_another_order(*args: Any) -> Any:
    losses, dlogits = classifier(*args)
    return losses, dlogits[::-1]


def every_row_weighs_alike(logits: jax.Array, targets: jax.Array, dlosses: jax.Array, vocab_size: int) -> Any:
    return classifier(logits, targets, jnp.full_like(dlosses, jnp.mean(dlosses)), vocab_size)


def padding_counts(logits: jax.Array, targets: jax.Array, dlosses: jax.Array, _vocab_size: int) -> Any:
    return classifier(logits, targets, dlosses, Vp)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("wrong", [no_gradient, rows_in_another_order, every_row_weighs_alike, padding_counts])
def test_a_mistake_shows_in_both_gradients(wrong: Any, rng: np.random.Generator) -> None:
    inputs = arrays(rng)
    expected, found = plain(*inputs), gradients(*inputs, V, wrong, 15)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert np.linalg.norm(one - other) > 0.05 * np.linalg.norm(other)


@pytest.mark.parametrize("limit", LIMITS)
def test_no_more_rows_of_logits_than_the_limit_exist(limit: int, rng: np.random.Generator) -> None:
    seen: list[tuple[int, ...]] = []

    def watched(logits: jax.Array, *rest: Any) -> Any:
        seen.append(logits.shape)
        return (classifier if len(rest) == 3 else classifier_forward)(logits, *rest)

    lnf, wte, targets, dlosses = (jnp.asarray(array) for array in arrays(rng))
    program = jax.make_jaxpr(partial(head_gradients, vocab_size=V, classifier=watched, limit=limit))(
        lnf, wte, targets, dlosses
    )
    jax.eval_shape(partial(head_losses, vocab_size=V, forward=watched, limit=limit), lnf, wte, targets)
    rows = {0: N, N + 5: N, 7: 6}.get(limit, limit)
    assert set(seen) == {(rows, Vp)}
    assert (f"[{N},{Vp}]" in str(program)) == (rows == N)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("limit", [0, 6])
def test_narrow_dtypes(dtype: Any, limit: int, rng: np.random.Generator) -> None:
    """dlnf comes in lnf's dtype, dwte in float32: summed exactly but for float32's rounding, of rounded dlogits."""
    lnf, wte, targets, dlosses = arrays(rng)
    lnf, wte, dlosses = jnp.asarray(lnf, dtype), jnp.asarray(wte, dtype), jnp.asarray(dlosses, jnp.float32)
    losses, dlnf, dwte = gradients(lnf, wte, targets, dlosses, V, classifier, limit)
    assert (losses.dtype, dlnf.dtype, dwte.dtype) == (jnp.float32, dtype, jnp.float32)
    expected_losses, dlogits = jax.jit(classifier, static_argnums=3)(
        linear_forward(lnf, wte, None), targets, dlosses, V
    )  # (N,), (N, Vp)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    wide = [np.asarray(array, np.float64) for array in (dlogits, lnf, wte)]
    expected_dwte, expected_dlnf = wide[0].T @ wide[1], wide[0] @ wide[2]
    scale = np.abs(expected_dwte).max()
    np.testing.assert_allclose(dwte, expected_dwte, rtol=0, atol=1e-6 * scale)
    rounded = np.asarray(expected_dwte.astype(dtype), np.float64)
    assert np.abs(rounded - expected_dwte).max() > 1e-4 * scale  # a dwte in dtype would not have passed
    half = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(dlnf, np.float64), expected_dlnf, rtol=1.01 * half, atol=1e-6)


def test_chunks_are_added_in_float32() -> None:
    """1024 chunks that add 1 each: in bfloat16 the sum would stop growing at 256."""
    rows = 1024
    lnf, wte = jnp.ones((rows, 1), jnp.bfloat16), jnp.zeros((2, 1), jnp.bfloat16)
    targets, dlosses = jnp.zeros(rows, jnp.int32), jnp.full(rows, 2.0)  # prob = 1/2: dlogit = -1 and 1
    _, _, dwte = gradients(lnf, wte, targets, dlosses, 2, classifier, 1)
    np.testing.assert_array_equal(dwte, [[-rows], [rows]])


@given(st.integers(1, 5000), st.integers(-3, 6000))
def test_the_rows_of_a_chunk_are_the_largest_divisor_within_the_limit(rows: int, limit: int) -> None:
    size = rows_per_chunk(rows, limit)
    if limit <= 0 or limit >= rows:
        assert size == rows
    else:
        assert rows % size == 0 and size <= limit
        assert all(rows % larger for larger in range(size + 1, limit + 1))
