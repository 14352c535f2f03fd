"""Softmax and cross-entropy against jax.nn.log_softmax and jax.vjp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.ops.classifier import classifier, classifier_backward, classifier_forward

V, Vp = 11, 16
forward = jax.jit(classifier_forward, static_argnums=2)
backward = jax.jit(classifier_backward, static_argnums=4)


def reference(logits: jax.Array, targets: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits[..., :V], axis=-1)
    return -jnp.sum(log_probs * jax.nn.one_hot(targets, V, dtype=logits.dtype), axis=-1)


def arrays(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """logits (2, 3, Vp), targets (2, 3) with the first and the last id among them, dlosses (2, 3)."""
    targets = rng.integers(0, V, (2, 3)).astype(np.int32)
    targets[0, :2] = 0, V - 1
    return 3 * rng.normal(size=(2, 3, Vp)), targets, rng.normal(size=(2, 3))


def test_worked_example() -> None:
    """Scores 5.2, 1.1, -2.7: probabilities 0.98, 0.017, 0.0004, whose losses are 0.02, 4.1 and 7.9."""
    logits = np.tile(np.array([5.2, 1.1, -2.7], np.float32), (1, 3, 1))
    targets = np.array([[0, 1, 2]], np.int32)
    losses, logsumexp = forward(logits, targets, 3)
    np.testing.assert_allclose(losses[0], [0.0168, 4.1168, 7.9168], atol=1e-4)
    dlogits = backward(np.ones((1, 3), np.float32), logits, targets, logsumexp, 3)
    prob = dlogits[0] + np.eye(3)
    np.testing.assert_allclose(prob, np.tile([0.9833, 0.0163, 0.0004], (3, 1)), atol=1e-4)


@pytest.mark.usefixtures("double")
def test_forward_and_backward(rng: np.random.Generator) -> None:
    logits, targets, dlosses = arrays(rng)
    expected, pull = jax.vjp(jax.jit(lambda logits: reference(logits, targets)), logits)
    losses, logsumexp = forward(logits, targets, V)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    np.testing.assert_allclose(logsumexp, jax.nn.logsumexp(logits[..., :V], axis=-1), rtol=1e-12)
    dlogits = backward(dlosses, logits, targets, logsumexp, V)
    np.testing.assert_allclose(dlogits, pull(dlosses)[0], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(np.sum(dlogits, -1), 0, atol=1e-13)  # what the target gains the others lose


@pytest.mark.parametrize("padding", [0.0, 1e30, np.inf, -np.inf, np.nan])
def test_padded_columns_take_no_part(padding: float, rng: np.random.Generator) -> None:
    logits, targets, dlosses = (a.astype(np.int32 if a.dtype == np.int32 else np.float32) for a in arrays(rng))
    expected, expected_logsumexp = forward(logits[..., :V], targets, V)  # without any padding
    logits[..., V:] = padding
    losses, logsumexp = forward(logits, targets, V)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    dlogits = backward(dlosses, logits, targets, logsumexp, V)
    assert (np.asarray(dlogits[..., V:]) == 0).all()
    wanted = backward(dlosses, logits[..., :V], targets, expected_logsumexp, V)
    np.testing.assert_allclose(dlogits[..., :V], wanted, rtol=1e-5, atol=1e-7)
    both = jax.jit(classifier, static_argnums=3)(*(a.reshape(6, *a.shape[2:]) for a in (logits, targets, dlosses)), V)
    np.testing.assert_allclose(both[0], expected.reshape(6), rtol=1e-6)
    np.testing.assert_allclose(both[1][:, :V], wanted.reshape(6, V), rtol=1e-5, atol=1e-7)
    assert (np.asarray(both[1][:, V:]) == 0).all()


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[[1e4, -1e4, 0.0], [3e38, 0.0, 0.0]]], np.float32)
    targets = np.array([[1, 0]], np.int32)
    losses, logsumexp = forward(logits, targets, 3)
    np.testing.assert_allclose(losses, [[2e4, 0.0]])
    dlogits = backward(np.ones((1, 2), np.float32), logits, targets, logsumexp, 3)
    np.testing.assert_array_equal(dlogits, [[[1, -1, 0], [0, 0, 0]]])
    both = jax.jit(classifier, static_argnums=3)(logits[0], targets[0], np.ones(2, np.float32), 3)
    np.testing.assert_allclose(both[0], losses[0])
    np.testing.assert_array_equal(both[1], dlogits[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes(dtype: jnp.dtype, rng: np.random.Generator) -> None:
    logits, targets, dlosses = arrays(rng)
    logits, dlosses = jnp.asarray(logits, dtype), jnp.asarray(dlosses, jnp.float32)
    losses, logsumexp = forward(logits, targets, V)
    assert losses.dtype == logsumexp.dtype == jnp.float32
    np.testing.assert_allclose(losses, reference(logits.astype(jnp.float32), targets), rtol=1e-5)
    assert backward(dlosses, logits, targets, logsumexp, V).dtype == dtype


@pytest.mark.usefixtures("double")
def test_both_at_once(rng: np.random.Generator) -> None:
    """`classifier` of rows (n, Vp) against jax.vjp; a row whose loss gets no gradient among them."""
    logits, targets, dlosses = (a.reshape(6, *a.shape[2:]) for a in arrays(rng))
    dlosses[4] = 0
    losses, dlogits = jax.jit(classifier, static_argnums=3)(logits, targets, dlosses, V)
    expected, pull = jax.vjp(lambda logits: reference(logits, targets), logits)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    np.testing.assert_allclose(dlogits, pull(dlosses)[0], rtol=1e-11, atol=1e-14)
    assert (dlogits[:, V:] == 0).all() and (dlogits[4] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_both_at_once_in_narrow_dtypes(dtype: jnp.dtype, rng: np.random.Generator) -> None:
    logits, targets, dlosses = (a.reshape(6, *a.shape[2:]) for a in arrays(rng))
    logits = jnp.asarray(logits, dtype)
    losses, dlogits = jax.jit(classifier, static_argnums=3)(logits, targets, dlosses.astype(np.float32), V)
    assert losses.dtype == jnp.float32 and dlogits.dtype == dtype
    wide = classifier(logits.astype(jnp.float32), targets, dlosses.astype(np.float32), V)
    np.testing.assert_allclose(losses, wide[0], rtol=1e-6)
    half = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(dlogits.astype(jnp.float32), wide[1], rtol=1.01 * half, atol=1e-7)
