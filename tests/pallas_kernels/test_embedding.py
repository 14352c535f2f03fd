"""The embedding backward's kernels, interpreted with race detection, against np.add.at in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.embedding import DIRECT, DROP, HEAD, KEEP, TAIL, _windows, embedding_backward
from tests.comparisons import interpreted

bf16, fp16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
Vp = 40


def expected(dout: Any, tokens: Any, dwte: Any) -> tuple[np.ndarray, np.ndarray]:
    """dwte (Vp, C) and dwpe (T, C), added row by row in float64."""
    dwte = np.array(dwte, np.float64)
    np.add.at(dwte, np.asarray(tokens), np.asarray(dout).astype(np.float64))
    return dwte, np.asarray(dout).astype(np.float64).sum(0)


def integers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """Small whole numbers: their sums have no rounding, so that every order of summation gives the same bits."""
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape), dtype)


def check(tokens: np.ndarray, C: int, dout_dtype: Any = bf16, dwte_dtype: Any = f32, padded_vocab: int = Vp) -> None:
    """Exact on whole numbers."""
    tokens = jnp.asarray(tokens, jnp.int32)
    dout, dwte = integers((*tokens.shape, C), dout_dtype), integers((padded_vocab, C), dwte_dtype, seed=1)
    found = interpreted(embedding_backward)(dout, tokens, dwte)
    assert found[0].dtype == dwte_dtype and found[1].dtype == dout_dtype
    for ours, wanted in zip(found, expected(dout, tokens, dwte), strict=True):
        assert ours.shape == wanted.shape
        np.testing.assert_array_equal(np.asarray(ours, np.float64), wanted)


random = np.random.default_rng(3)
# Four of one shape, and most of what follows too: what takes the time is to compile a program for each.
PATTERNS = {
    "random": random.integers(0, Vp, (4, 25)),
    "all the last id: one run through every window": np.full((4, 25), Vp - 1),
    "every run fills a window": np.repeat(np.arange(4), 32).reshape(4, 32),
    "every run crosses a border": np.repeat(np.arange(4), 30)[:100].reshape(4, 25),
    "a run over two borders, begun and ended inside windows": np.repeat([0, 1, 2], [20, 60, 20]).reshape(4, 25),
    "a window and one token, none twice": np.arange(33).reshape(33, 1),
    "fewer tokens than are loaded at a time": np.array([[3, 1, 3]]),
}


QUICK = ("random", "every run crosses a border", "fewer tokens than are loaded at a time")


@pytest.mark.parametrize("pattern", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow)
                                     for each in PATTERNS])  # fmt: skip
def test_patterns_of_tokens(pattern: str) -> None:
    check(PATTERNS[pattern], 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("C", "dtypes"),
    [
        (128, (bf16, bf16)),  # single elements: the narrowest accesses
        (768, (bf16, f32)),  # GPT-2's: pairs of elements, one program for the whole row
        pytest.param(1024, (f32, f32), marks=pytest.mark.slow),
        pytest.param(1280, (bf16, bf16), marks=pytest.mark.slow),  # five programs for a row
        (64, (f32, bf16)),  # padded to 128
        (200, (fp16, fp16)),  # padded to 256
    ],
)
def test_channels_and_dtypes(C: int, dtypes: Any) -> None:
    check(random.integers(0, 9, (5, 15)), C, *dtypes)


@pytest.mark.slow
@pytest.mark.parametrize("B", [8, 19])
def test_positions_of_batches_around_eight_rows(B: int) -> None:
    check(random.integers(0, Vp, (B, 3)), 128)


def test_rounded_once() -> None:
    """bf16 in, bf16 out, float32 between: half a unit of the float64 sum. In bf16 256 and any number of ones is 256."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 3, (4, 25)), jnp.int32)
    dout, dwte = jnp.asarray(rng.normal(size=(4, 25, 128)), bf16), jnp.asarray(rng.normal(size=(Vp, 128)), bf16)
    ones = jnp.ones_like(dout).at[0].set(256)
    for given in ((dout, tokens, dwte), (ones, 0 * tokens, 0 * dwte)):
        found = interpreted(embedding_backward)(*given)
        for ours, wanted in zip(found, expected(*given), strict=True):
            np.testing.assert_allclose(np.asarray(ours, np.float64), wanted, rtol=1.01 * 2.0**-8, atol=1e-5)


def test_tokens_do_not_touch_one_another() -> None:
    """A token whose gradient is not a number, in the midst of others' runs and windows."""
    tokens = jnp.asarray(np.repeat([0, 1, 2, 3, 4], [10, 5, 20, 40, 25]).reshape(4, 25), jnp.int32)
    dout, dwte = integers((4, 25, 128), bf16), integers((Vp, 128), f32)
    found, _ = interpreted(embedding_backward)(jnp.where(tokens[..., None] == 2, jnp.nan, dout), tokens, dwte)
    wanted = expected(dout, tokens, dwte)[0]
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(wanted, 2, 0))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [-1, Vp])
def test_unknown_ids_add_nothing(wrong: int) -> None:
    tokens = random.integers(0, Vp, (4, 25)).astype(np.int32)
    tokens[1, :20] = wrong
    dout, dwte = np.array(integers((4, 25, 128), bf16)), integers((Vp, 128), f32)
    found, _ = interpreted(embedding_backward)(jnp.asarray(dout), jnp.asarray(tokens), dwte)
    dout[1, :20], tokens[1, :20] = 0, 0
    np.testing.assert_array_equal(found, expected(dout, tokens, dwte)[0])


def test_plan_of_windows() -> None:
    """Ten tokens in windows of four: a run inside one, one over two borders, one over one, one at the end."""
    ids = jnp.array([5, 1, 5, 0, 5, 5, 5, 7, 5, 7], jnp.int32)
    plan = _windows(ids, 8, 4)
    np.testing.assert_array_equal(plan.ids, [0, 1, 5, 5, 5, 5, 5, 5, 7, 7])
    np.testing.assert_array_equal(plan.order, [3, 1, 0, 2, 4, 5, 6, 8, 7, 9])
    wanted = [DIRECT, DIRECT, KEEP, TAIL, KEEP, KEEP, KEEP, HEAD, KEEP, DIRECT]
    np.testing.assert_array_equal(plan.action, wanted)
    unknown = [DIRECT, DIRECT, KEEP, DROP, KEEP, KEEP, KEEP, DROP, KEEP, DROP]
    np.testing.assert_array_equal(_windows(ids, 2, 4).action, unknown)


def test_no_tokens() -> None:
    dwte, dwpe = embedding_backward(
        jnp.zeros((0, 3, 128), bf16), jnp.zeros((0, 3), jnp.int32), integers((Vp, 128), f32), interpret=True
    )
    np.testing.assert_array_equal(dwte, integers((Vp, 128), f32))
    assert dwpe.shape == (3, 128) and (dwpe == 0).all()


@pytest.mark.parametrize(
    ("dout", "tokens", "dwte"),
    [
        ((2, 3, 128), jnp.zeros((3, 2), jnp.int32), (Vp, 128)),
        ((2, 3, 128), jnp.zeros((2, 3), jnp.int32), (Vp, 64)),
        ((2, 3, 128), jnp.zeros((2, 3)), (Vp, 128)),
    ],
)
def test_what_does_not_fit_together_is_refused(dout: Any, tokens: jax.Array, dwte: Any) -> None:
    with pytest.raises(ValueError, match=r"expected \(B, T, C\)"):
        embedding_backward(jnp.zeros(dout), tokens, jnp.zeros(dwte), interpret=True)
