"""The output head in one piece and in chunks, against jax.grad of the plain formula in float64.

With a classifier and without one: then the head's product leaves exponentials, and where a model is sure, or far off,
nothing is lost (docs/derivations/head.md).
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.ops.classifier import classifier, classifier_forward
from llmc_jax.ops.embedding import embedding_backward
from llmc_jax.ops.head import head_gradients, head_losses, head_weights, rows_per_chunk
from llmc_jax.ops.linear import linear_forward

N, C, V, Vp = 30, 6, 11, 16  # rows, channels, vocabulary, padded vocabulary
LIMITS = (0, N, N + 5, 15, 7, 1)  # all at once thrice; two chunks; 7 does not divide 30: five chunks of 6; 30 chunks
gradients = jax.jit(head_gradients, static_argnums=(4, 5, 6, 7, 8))
losses_alone = jax.jit(head_losses, static_argnums=(3, 4, 5, 6))
WITHOUT = (head_weights, embedding_backward)  # what `gradients` takes to do without a classifier


def arrays(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """lnf (N, C), wte (Vp, C) whose padding is not zero, targets (N,), dlosses (N,) of both signs, one of them 0."""
    targets = rng.integers(0, V, N).astype(np.int32)
    targets[:2] = 0, V - 1
    dlosses = rng.normal(size=N)
    dlosses[3] = 0
    return rng.normal(size=(N, C)), rng.normal(size=(Vp, C)), targets, dlosses


def plain_losses(lnf: Any, wte: Any, targets: Any, vocab_size: int) -> jax.Array:
    log_probs = jax.nn.log_softmax(lnf @ wte[:vocab_size].T, axis=-1)  # (N, V)
    return -jnp.sum(log_probs * jax.nn.one_hot(targets, vocab_size, dtype=log_probs.dtype), axis=-1)


@partial(jax.jit, static_argnums=4)
def plain(
    lnf: Any, wte: Any, targets: Any, dlosses: Any, vocab_size: int = V
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses, dlnf, dwte."""
    total = jax.grad(lambda lnf, wte: jnp.sum(dlosses * plain_losses(lnf, wte, targets, vocab_size)), argnums=(0, 1))
    return plain_losses(lnf, wte, targets, vocab_size), *total(lnf, wte)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("how", [(), WITHOUT], ids=["classifier", "without"])
@pytest.mark.parametrize("limit", LIMITS)
def test_losses_and_gradients(limit: int, how: tuple[Any, ...], rng: np.random.Generator) -> None:
    inputs = arrays(rng)
    expected = plain(*inputs)
    found = gradients(*inputs, V, classifier, limit, *how)
    for name, one, other in zip(("losses", "dlnf", "dwte"), found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == jnp.float64, name
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13, err_msg=name)
    assert not np.asarray(found[2])[V:].any()  # the padded rows of wte
    assert not np.asarray(found[1])[3].any()  # the row whose loss does not count
    alone = losses_alone(*inputs[:3], V, classifier_forward, limit, *([head_weights] if how else []))
    np.testing.assert_allclose(alone, expected[0], rtol=1e-12)


@pytest.mark.parametrize(("rounded", "dtype"), [(False, jnp.float32), (True, jnp.bfloat16)])
def test_a_product_may_be_rounded_before_more_is_added(
    rounded: bool, dtype: jnp.dtype, rng: np.random.Generator
) -> None:
    lnf, wte, targets, dlosses = (jnp.asarray(each) for each in arrays(rng))
    inputs = lnf.astype(jnp.bfloat16), wte.astype(jnp.bfloat16), targets, dlosses.astype(jnp.float32)
    given = partial(head_gradients, vocab_size=V, classifier=classifier, rounded=rounded)
    made = [
        each.outvars[0].aval for each in jax.make_jaxpr(given)(*inputs).eqns if each.primitive.name == "dot_general"
    ]
    assert [each.dtype for each in made if each.shape == (Vp, C)] == [dtype]
    exact = plain(*(jnp.asarray(each, jnp.float32) for each in inputs[:2]), *inputs[2:])[2]
    dwte = given(*inputs)[2]
    assert dwte.dtype == jnp.float32
    np.testing.assert_allclose(dwte, exact, atol=2**-6 * np.abs(exact).max())


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


def target_in_the_product_alone(lnf: Any, wte: Any, targets: Any, picked: Any, vocab_size: int) -> Any:
    e, *rest = head_weights(lnf, wte, targets, picked, vocab_size)
    return e.at[jnp.arange(len(targets)), targets].set(1.0), *rest


def weights_of_padding(lnf: Any, wte: Any, targets: Any, picked: Any, _vocab_size: int) -> Any:
    return head_weights(lnf, wte, targets, picked, Vp)


def sums_of_other_rows(*args: Any) -> Any:
    e, total, base = head_weights(*args)
    return e, total[::-1], base


WRONG_WEIGHTS = [target_in_the_product_alone, weights_of_padding, sums_of_other_rows]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("wrong", WRONG_WEIGHTS)
def test_a_mistake_in_the_exponentials_shows_in_both_gradients(wrong: Any, rng: np.random.Generator) -> None:
    inputs = arrays(rng)
    expected, found = plain(*inputs), gradients(*inputs, V, classifier, 15, wrong, embedding_backward)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert np.linalg.norm(one - other) > 0.05 * np.linalg.norm(other)


@pytest.mark.parametrize("limit", LIMITS)
def test_no_more_rows_of_exponentials_than_the_limit_exist(limit: int, rng: np.random.Generator) -> None:
    seen: list[tuple[int, ...]] = []

    def watched(*args: Any) -> Any:
        found = head_weights(*args)
        seen.append(found[0].shape)
        return found

    how: Any = {"vocab_size": V, "classifier": None, "limit": limit, "weights": watched, "add_rows": embedding_backward}
    program = jax.make_jaxpr(partial(head_gradients, **how))(*(jnp.asarray(array) for array in arrays(rng)))
    rows = {0: N, N + 5: N, 7: 6}.get(limit, limit)
    assert set(seen) == {(rows, Vp)}
    assert (f"[{N},{Vp}]" in str(program)) == (rows == N)


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


# ----- models that are sure, far off, or whose logits are far from zero ----------------------------------------------


class Case(NamedTuple):
    """What a model has learned: by how much a row's target is above, or below, what chance would make of it."""

    pulls: tuple[float, float] | None  # of the targets' logits, in nats; None: nothing is learned
    losses: tuple[float, float]  # between which the mean lies, in nats
    # Relative error of dwte, norm-wise, in bfloat16. Measured 0.9, 1.7, 3.5, 1.6 and 10.3 e-4: a target's own row is
    # exact but for float32, and the other rows' error averages out, but where one other token has nearly all of it.
    dwte: float
    offset: float = 0.0  # of all logits alike


CASES = {
    "random": Case(None, (8, 10), dwte=1.2e-4),
    "fitted": Case((15, 19), (2e-3, 5e-3), dwte=2.1e-4),
    "memorised": Case((21, 24), (1e-5, 2e-5), dwte=4.2e-4),
    "fitted, logits at -60": Case((15, 19), (2e-3, 5e-3), dwte=1.9e-4, offset=-60),
    "far off": Case((-140, -110), (100, 200), dwte=1.2e-3),
}
WIDE_N, WIDE_C, WIDE_V, WIDE_Vp = 128, 256, 4000, 4096
DLNF = 1.8e-3  # relative error of dlnf, norm-wise, in bfloat16
every_case = pytest.mark.parametrize("case", CASES)


@cache
def learned(case: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """lnf and wte in bfloat16, frequent targets among the first ids, dlosses float32 of both signs, a few of them 0."""
    rng, (pulls, *_, offset) = np.random.default_rng(0), CASES[case]
    wte = rng.normal(0, 0.14, (WIDE_Vp, WIDE_C))
    targets = (WIDE_V * rng.random(WIDE_N) ** 3).astype(np.int32)
    lnf = rng.normal(0, 0.6, (WIDE_N, WIDE_C))
    if pulls:
        own = wte[targets]
        lnf += own / np.sum(own**2, 1, keepdims=True) * rng.uniform(*pulls, (WIDE_N, 1))
    if offset:  # along a direction in which all rows of wte are alike
        same = np.full(WIDE_C, WIDE_C**-0.5)
        wte += np.outer(0.5 - wte @ same, same)
        lnf += np.outer(offset / 0.5 - lnf @ same, same)
    dlosses = rng.normal(size=WIDE_N).astype(np.float32)
    dlosses[::17] = 0
    return lnf.astype(jnp.bfloat16), wte.astype(jnp.bfloat16), targets, dlosses


@cache
def expected_of(case: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Losses, dlnf and dwte in float64, by JAX's derivative."""
    lnf, wte, targets, dlosses = learned(case)
    with jax.enable_x64(True):
        wide = [np.asarray(array, np.float64) for array in (lnf, wte, dlosses)]
        losses, dlnf, dwte = plain(*wide[:2], targets, wide[2], WIDE_V)
    return np.asarray(losses), np.asarray(dlnf), np.asarray(dwte)


def error(found: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


@every_case
def test_the_cases_are_what_they_are_called(case: str) -> None:
    losses, lnf, wte = expected_of(case)[0], *(np.asarray(array, np.float64) for array in learned(case)[:2])
    least, most = CASES[case].losses
    assert least < losses.mean() < most
    assert np.median(lnf @ wte[:WIDE_V].T) == pytest.approx(CASES[case].offset, abs=1)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("limit", [0, 32])
@every_case
def test_without_a_classifier_in_float64(case: str, limit: int) -> None:
    """To what is left of float64 where the plain formula's prob - 1 is 1e-5."""
    lnf, wte, targets, dlosses = learned(case)
    wide = lnf.astype(np.float64), wte.astype(np.float64), targets, dlosses.astype(np.float64)
    losses, dlnf, dwte = gradients(*wide, WIDE_V, classifier, limit, *WITHOUT)
    expected = expected_of(case)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-12, atol=1e-13)
    assert error(dlnf, expected[1]) < 1e-10 and error(dwte, expected[2]) < 1e-10
    np.testing.assert_allclose(
        losses_alone(*wide[:3], WIDE_V, classifier_forward, limit, head_weights), losses, rtol=1e-14
    )


@pytest.mark.parametrize("limit", [0, 32])
@every_case
def test_without_a_classifier_in_bfloat16(case: str, limit: int) -> None:
    """Measured of dlnf: 1.6 to 1.7 e-3, little more than rounding it once; of a row at most 2.1e-3."""
    inputs, expected = learned(case), expected_of(case)
    losses, dlnf, dwte = gradients(*inputs, WIDE_V, classifier, limit, *WITHOUT)
    assert (losses.dtype, dlnf.dtype, dwte.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    assert error(dlnf, expected[1]) < DLNF and error(dwte, expected[2]) < CASES[case].dwte
    counts = inputs[3] != 0
    assert not np.asarray(dlnf)[~counts].any()
    rows = zip(np.asarray(dlnf)[counts], expected[1][counts], strict=True)
    assert max(error(*pair) for pair in rows) < 2.3e-3
    assert not np.asarray(dwte)[WIDE_V:].any()


@pytest.mark.parametrize("case", list(CASES)[1:])
def test_with_a_classifier_the_same_is_lost_in_bfloat16(case: str) -> None:
    """Or the tolerances above would say nothing: measured 0.9 to 7 e-2."""
    losses, dlnf, dwte = gradients(*learned(case), WIDE_V, classifier, 0)
    expected = expected_of(case)
    assert error(dlnf, expected[1]) > 4 * DLNF and error(dwte, expected[2]) > 4 * CASES[case].dwte
    assert np.abs(losses / expected[0] - 1).max() > 1e-3


@every_case
def test_losses_from_sums_of_exponentials_in_bfloat16(case: str) -> None:
    lnf, wte, targets, _ = learned(case)
    found = losses_alone(lnf, wte, targets, WIDE_V, classifier_forward, 0, head_weights)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected_of(case)[0], rtol=1e-5)


@pytest.mark.parametrize("loss", [43.0, 46.0, 88.0, 1000.0])
def test_exponentials_around_the_largest_sum(loss: float) -> None:
    """Beside logits of 0 and `loss` the target's is 0: from 44 nats on another base is taken."""
    lnf, wte = jnp.array([[loss]]), jnp.array([[0.0], [1.0], [0.0], [9.0]])
    picked, targets = jnp.zeros(1), jnp.zeros(1, jnp.int32)
    e, total, base = head_weights(lnf, wte, targets, picked, 3)
    taken = 0.0 if loss < 44 else loss
    np.testing.assert_array_equal(base, [taken])
    expected = np.exp([-np.inf, loss - taken, -taken, -np.inf])
    np.testing.assert_allclose(e, [expected], rtol=1e-6, atol=1.2e-38)  # no subnormals
    np.testing.assert_allclose(total, [expected.sum()], rtol=1e-6)
    np.testing.assert_allclose(head_losses(lnf, wte, targets, 3, classifier_forward, 0, head_weights), loss, rtol=1e-6)
