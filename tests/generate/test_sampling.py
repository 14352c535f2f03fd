"""Each step of sampling against a plain one with sorted NumPy arrays, and what draws may depend on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.generate.sampling import (
    Draws,
    Sampling,
    Steps,
    check,
    draw,
    filtered,
    limit_of,
    numbers_of,
    steps_of,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

V = 40
LOGITS = 3 * np.random.default_rng(1).standard_normal((2, V)).astype(np.float32)
ALL_STEPS = Steps(greedy=False, top_k=True, top_p=True, candidates=0)


def plain(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities (V,) in float64 after temperature, top-k and top-p, by sorting."""
    logits = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-logits, kind="stable")
    p = np.exp(logits - logits.max())[order]
    if sampling.top_k:
        p[sampling.top_k :] = 0
    before = np.cumsum(p) - p
    p[before >= sampling.top_p * p.sum()] = 0
    out = np.empty_like(p)
    out[order] = p / p.sum()
    return out


left = jax.jit(filtered, static_argnames="steps")


@settings(max_examples=60)
@given(st.floats(0.2, 3), st.integers(0, V + 3), st.floats(0.05, 0.999))
def test_what_is_left_is_what_sorting_leaves(temperature: float, top_k: int, top_p: float) -> None:
    sampling = Sampling(temperature, top_k or V, top_p)
    weights = np.asarray(left(jnp.array(LOGITS), numbers_of(sampling), ALL_STEPS))
    for row, logits in zip(weights, LOGITS, strict=True):
        expected = plain(logits, sampling)
        # at an edge, where float32 and float64 may differ, one token more or less; it is the least likely one
        extra = np.flatnonzero((row > 0) != (expected > 0))
        assert len(extra) <= 1
        if not len(extra):
            np.testing.assert_allclose(row / row.sum(), expected, rtol=1e-4, atol=1e-7)
        assert row[np.argmax(logits)] == 1


@pytest.mark.parametrize("at_once", [1, 5])
def test_equals_at_the_edge_are_all_kept(at_once: int) -> None:
    """A thousand rows of weights of few values: as each platform looks for the limit."""
    rng = np.random.default_rng(2)
    rows = np.exp2(-rng.integers(0, [[1], [4], [9], [14]] * 250, (1000, 300))).astype(np.float32)
    rows[:, 0] = 1
    search = jax.jit(limit_of, static_argnames="at_once")
    for k in (1, 2, 64, 100, 299, 300):
        found = np.asarray(search(rows, np.ones_like(rows), np.float32(k), at_once=at_once))
        np.testing.assert_array_equal(found[:, 0], np.sort(rows, axis=1)[:, -k])
        sampling = Sampling(top_k=k)
        kept = np.asarray(left(np.log(rows), numbers_of(sampling), steps_of(sampling, 0)))
        np.testing.assert_array_equal(kept > 0, rows >= found)
    shares = np.cumsum(np.sort(rows, axis=1)[:, ::-1], axis=1)  # sums of powers of two that float32 holds exactly
    for p in (0.01, 0.5, 0.9):
        wanted = np.float32(p) * shares[:, -1:]
        found = np.asarray(search(rows, rows, wanted, at_once=at_once))
        fewest = np.sort(rows, axis=1)[:, ::-1][np.arange(1000), (shares < wanted).sum(axis=1)]
        np.testing.assert_array_equal(found[:, 0], fewest)


def drawn(logits: np.ndarray, sampling: Sampling, first: int = 0, position: int = 0, candidates: int = 0) -> Draws:
    samples = np.arange(first, first + len(logits), dtype=np.int32)
    steps = steps_of(sampling, candidates)
    return draw(jnp.array(logits), samples, np.int32(position), numbers_of(sampling), steps)


def test_frequencies_are_the_filtered_probabilities() -> None:
    sampling = Sampling(temperature=1.5, top_k=6, top_p=0.95)
    n = 4000
    tokens = drawn(np.repeat(LOGITS[:1], n, axis=0), sampling).tokens
    found = np.bincount(tokens, minlength=V) / n
    expected = plain(LOGITS[0], sampling)
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / n)


def test_a_draw_depends_on_seed_sample_and_position_alone() -> None:
    flat = np.zeros((8, 1000), np.float32)
    tokens = np.asarray(drawn(flat, Sampling()).tokens)
    assert len(set(tokens.tolist())) >= 7  # samples differ
    for sample in (0, 5):
        assert int(drawn(flat[:1], Sampling(), first=sample).tokens[0]) == tokens[sample]
    others = [drawn(flat, Sampling(seed=seed)) for seed in (1, 1337 + (1 << 32))]
    for other in (*others, drawn(flat, Sampling(), position=1)):
        assert (np.asarray(other.tokens) != tokens).sum() >= 7


def test_the_numbers_are_the_same_on_every_version_of_jax() -> None:
    tokens = drawn(np.zeros((4, 1000), np.float32), Sampling(seed=1337)).tokens
    assert np.asarray(tokens).tolist() == [461, 178, 20, 348]


def test_greedy_takes_the_largest_and_reports_the_models_own_probabilities() -> None:
    found = drawn(LOGITS, Sampling(temperature=0, top_k=3), candidates=4)
    np.testing.assert_array_equal(found.tokens, LOGITS.argmax(axis=1))
    own = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum(axis=1, keepdims=True))
    order = np.argsort(-own, axis=1)[:, :4]
    np.testing.assert_array_equal(found.candidates, order)
    np.testing.assert_allclose(found.candidate_logprobs, np.take_along_axis(own, order, 1), rtol=1e-5)
    np.testing.assert_allclose(found.logprobs, own.max(axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    "extreme",
    [{"temperature": 1e-37}, {"temperature": 1e-50}, {"top_p": 1e-38}, {"top_p": 1e-50}, {"top_k": 1, "top_p": 1e-50}],
)  # fmt: skip
def test_the_smallest_values_leave_the_likeliest_token(extreme: dict[str, Any]) -> None:
    """Numbers that float32 cannot hold are taken as the nearest that it can: a text does not end for them."""
    np.testing.assert_array_equal(drawn(100 * LOGITS, Sampling(**extreme)).tokens, LOGITS.argmax(axis=1))


@pytest.mark.filterwarnings("error")
def test_the_largest_values_leave_all_tokens_but_impossible_ones() -> None:
    impossible = np.where(np.arange(V) % 2 == 1, -np.inf, np.repeat(LOGITS[:1], 500, axis=0)).astype(np.float32)
    tokens = drawn(impossible, Sampling(temperature=1e300, top_k=10**400)).tokens
    assert set(np.asarray(tokens).tolist()) == set(range(0, V, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1), ("top_p", 0.0),
     ("top_p", 1.1), ("seed", -1), ("seed", 1 << 64)],
)  # fmt: skip
def test_values_that_cannot_be_are_named_as_their_flags(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} "):
        check(Sampling(**{name: value}))
