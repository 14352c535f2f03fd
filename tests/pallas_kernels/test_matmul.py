"""Hopper's products with epilogues in interpret mode, with race detection, against float64 formulas."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from llmc_jax.ops import gelu as plain_gelu
from llmc_jax.ops import head as plain_head
from llmc_jax.ops.classifier import classifier
from pallas_kernels import gelu, matmul
from tests.comparisons import interpreted
from tests.pallas_kernels.test_gelu import expected_of
from tests.pallas_kernels.test_mutants import FOUND, Mutant, broken

HALF = 1.01 * 2.0**-8  # one rounding to bfloat16
IN_FP32 = 2.0**-20  # of sums over at most 128 products, and of GELU's slope (test_gelu.py)
bf16, f32, f64 = jnp.bfloat16, np.float32, np.float64


# ----- the product --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [True, False])
def test_a_product_that_is_not_asked_for_leaves_what_was_there(run: bool) -> None:
    """Its output is the array that lay there before, and no tile of it has been computed."""
    rng = np.random.default_rng(0)
    a, b, before = (jnp.asarray(rng.normal(size=shape), bf16) for shape in ((200, 64), (128, 64), (200, 128)))
    epilogue = matmul.Epilogue(lambda sums, *_: [sums])

    @jax.jit
    def product(run: jax.Array) -> Any:
        return matmul._product(a, b, [], epilogue, "sm_90", True, name="product", run=run, over=[before])

    [found] = product(jnp.asarray(run))
    if run:
        wanted = np.asarray(a, f64) @ np.asarray(b, f64).T
        np.testing.assert_allclose(np.asarray(found, f64), wanted, rtol=HALF, atol=IN_FP32)
    else:
        np.testing.assert_array_equal(found, before)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 9))
def test_every_tile_is_visited_once(high: int, wide: int) -> None:
    rows_of, most = matmul.ROWS * matmul.BLOCKS, 40 * 9
    M, N, epilogue = high * rows_of, wide * matmul.COLUMNS, matmul.Epilogue(lambda sums, *_: [sums])
    p = matmul.Problem(M, N, K=64, transposed=True, clusters=2, stages=4, epilogue=epilogue, interpret=True)
    assert p.tiles == high * wide
    rows, columns = (np.asarray(each)[: p.tiles] for each in jax.vmap(p.place)(jnp.arange(most)))
    cells = {(row, column) for row in range(0, M, rows_of) for column in range(0, N, matmul.COLUMNS)}
    assert set(zip(rows.tolist(), columns.tolist(), strict=True)) == cells
    strips = rows // rows_of // matmul.STRIP  # one after another: what they read stays in L2
    assert (np.diff(strips) >= 0).all() and (np.diff(columns[strips == 0]) >= 0).all()


# ----- the head -----------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Of a head: rows, channels, ids, and columns of the product."""

    n: int
    C: int
    V: int
    Vp: int


SMALL = Shape(200, 64, 100, 128)  # a tile of each of a cluster's blocks, of a single slot, and padding both ways
ROUND = Shape(257, 128, 300, 384)  # six for two clusters: a warpgroup has more than one, and the ring goes round
WITHOUT_PADDING = Shape(256, 64, 256, 256)
FAR = 5  # rows of `far_off` whose sums are beyond what is taken as it is


class Head(NamedTuple):
    """The arguments of the product."""

    x: jax.Array  # (n, C)
    w: jax.Array  # (Vp, C), whose padding would count
    targets: jax.Array  # (n,)
    picked: jax.Array  # (n,)


def usual(shape: Shape) -> Head:
    """Logits of a few nats. The first and the last id are targets."""
    rng = np.random.default_rng(shape.n)
    x, w = rng.normal(size=(shape.n, shape.C)), rng.normal(0, 0.3, (shape.Vp, shape.C))
    targets = rng.integers(0, shape.V, shape.n)
    targets[0], targets[-1] = 0, shape.V - 1
    return head_of(x, w, targets)


def far_off(shape: Shape) -> Head:
    """In the first FAR rows logits are 100 and more above the target's, in the last 60; in the row after FAR 25."""
    rows = [*range(FAR), shape.n - 1, FAR]
    x, w, targets, _ = (np.asarray(array, f64) for array in usual(shape))
    w[:, 0] = np.where(np.arange(shape.Vp) % 2, 1.0, 0.0)
    x[:, 0] = 0
    targets = targets.astype(np.int64)
    targets[rows] -= targets[rows] % 2  # an even id, whose logit is a few nats
    x[rows, 0] = [100, 120, 150, 400, 1000, 60, 25]  # an odd id's is as much larger
    return head_of(x, w, targets)


def head_of(x: np.ndarray, w: np.ndarray, targets: np.ndarray) -> Head:
    x, w = (np.asarray(jnp.asarray(array, bf16), f64) for array in (x, w))
    picked = np.sum(x * w[targets], 1)
    return Head(jnp.asarray(x, bf16), jnp.asarray(w, bf16), jnp.asarray(targets, jnp.int32), jnp.asarray(picked, f32))


def others_of(head: Head, V: int) -> np.ndarray:
    """The logits of all other tokens than a row's target in float64, -inf in the other places."""
    logits = np.asarray(head.x, f64) @ np.asarray(head.w, f64).T
    columns = np.arange(logits.shape[1])
    return np.where((columns != np.asarray(head.targets)[:, None]) & (columns < V), logits, -np.inf)


def weights(head: Head, V: int) -> tuple[np.ndarray, ...]:
    e, total, base = interpreted(matmul.head_weights, "vocab_size")(*head, vocab_size=V)
    assert (e.shape, e.dtype) == ((head.x.shape[0], head.w.shape[0]), bf16)
    assert total.shape == base.shape == head.targets.shape and total.dtype == base.dtype == f32
    return np.asarray(e), np.asarray(total), np.asarray(base)


def totals(head: Head, V: int) -> tuple[np.ndarray, ...]:
    """The sums and base alone: e is nowhere."""
    e, *found = interpreted(matmul.head_weights, "vocab_size", "keep")(*head, vocab_size=V, keep=False)
    assert e is None
    return tuple(map(np.asarray, found))


def check(head: Head, V: int, found: tuple[np.ndarray, ...], again: np.ndarray) -> None:
    """Compare with float64. again (n,): the rows that must have another base than the target's logit."""
    e, total, base = found
    others = others_of(head, V)
    np.testing.assert_array_equal(base[~again], np.asarray(head.picked)[~again])
    np.testing.assert_allclose(base[again], others.max(1)[again], rtol=2.5e-7)
    expected = np.exp(others - base.astype(f64)[:, None])
    # Float32's sum of a logit, and its product with log2 e, are off by units of the logit's last place: 3.1 halves.
    allowed = 2.0**-22 * np.abs(others, where=np.isfinite(others), out=np.zeros_like(others)).max(1)
    assert (np.abs(total - expected.sum(1)) <= allowed * expected.sum(1)).all()
    assert (np.abs(e.astype(f64) - expected) <= (HALF + allowed[:, None]) * expected + 1.2e-38).all()  # no subnormals
    assert not e[np.isneginf(others)].astype(f32).any()  # a target's column and padding, exactly


@pytest.mark.parametrize(
    "shape", [*(pytest.param(each, marks=pytest.mark.slow) for each in (SMALL, WITHOUT_PADDING)), ROUND]
)
def test_head_weights(shape: Shape) -> None:
    head = usual(shape)
    check(head, shape.V, weights(head, shape.V), again=np.zeros(shape.n, bool))


def test_the_sums_are_of_what_has_not_been_rounded() -> None:
    e, total, _ = weights(usual(ROUND), ROUND.V)
    of_rounded = e.astype(f64).sum(1)
    assert np.median(np.abs(of_rounded / total - 1)) > 1e-4  # a sum may be off by 3e-6


def test_rows_whose_exponentials_would_overflow() -> None:
    head, again = far_off(ROUND), np.zeros(ROUND.n, bool)
    again[[*range(FAR), -1]] = True
    with np.errstate(over="ignore"):
        sums = np.exp(others_of(head, ROUND.V) - np.asarray(head.picked, f64)[:, None]).sum(1)
    assert matmul.LARGEST == plain_head.LARGEST
    np.testing.assert_array_equal(sums > matmul.LARGEST, again)
    overflows = sums > np.finfo(f32).max
    assert overflows.any() and (again & ~overflows).any() and (sums[~again] > 1e9).any()
    found = weights(head, ROUND.V)
    assert all(np.isfinite(each.astype(f32)).all() for each in found)
    check(head, ROUND.V, found, again)


@pytest.mark.slow
def test_totals_are_those_of_the_weights() -> None:
    """Bit for bit, where a second product is made and where not."""
    for head in (usual(SMALL), far_off(SMALL)):
        for one, other in zip(totals(head, SMALL.V), weights(head, SMALL.V)[1:], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_same_bits_twice() -> None:
    head = far_off(ROUND)
    for one, other in zip(weights(head, ROUND.V), weights(head, ROUND.V), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_rows_do_not_touch_one_another() -> None:
    """A row that overflows, one that is not a number: the others' bits are those of a product without the two."""
    head, wanted = usual(SMALL), weights(usual(SMALL), SMALL.V)
    x = head.x.at[7].multiply(300).at[150, 3].set(jnp.nan)
    picked = head.picked.at[7].multiply(300).at[150].set(jnp.nan)
    found = weights(head._replace(x=x, picked=picked), SMALL.V)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.delete(one, (7, 150), 0), np.delete(other, (7, 150), 0))
    assert found[2][7] != picked[7] and np.isfinite(found[1][7]) and np.isnan(found[1][150])


@pytest.mark.slow
def test_the_gradients_of_a_head_of_these_weights() -> None:
    """As with the plain twin's, to where float32 sums in another order."""
    head = far_off(SMALL)
    dlosses = jnp.asarray(np.random.default_rng(0).normal(size=SMALL.n), f32)

    def add_rows(dout: jax.Array, tokens: jax.Array, dwte: jax.Array) -> Any:
        return dwte.at[tokens[0]].add(dout[0]), None

    def gradients(weights: Any) -> Any:
        return plain_head.head_gradients(*head[:3], dlosses, SMALL.V, classifier, weights=weights, add_rows=add_rows)

    found = gradients(lambda *given: interpreted(matmul.head_weights, "vocab_size")(*given[:4], vocab_size=given[4]))
    for one, other in zip(found, gradients(plain_head.head_weights), strict=True):
        wide = np.asarray(other, f64)
        assert np.linalg.norm(np.asarray(one, f64) - wide) <= 3e-4 * np.linalg.norm(wide)
        assert one.dtype == other.dtype


# ----- GELU ---------------------------------------------------------------------------------------------------------


GELU_SHAPES = {  # leading dimensions, of the sum, columns
    "three dimensions": ((3, 67), 64, 128),
    "the ring goes round": ((257,), 128, 384),
    "nothing is padded": ((2, 2, 64), 64, 128),
}
*QUICKLY, LAST = GELU_SHAPES
every_shape = pytest.mark.parametrize("shape", [*QUICKLY, pytest.param(LAST, marks=pytest.mark.slow)])


def linear(shape: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x (..., I), w (O, I) and b (O,), of which h comes to lie on both sides of where GELU bends."""
    leading, depth, columns = GELU_SHAPES[shape]
    rng = np.random.default_rng(depth + columns)
    x, w = rng.normal(size=(*leading, depth)), rng.normal(0, 2 * depth**-0.5, (columns, depth))
    b = rng.normal(size=columns)
    return jnp.asarray(x, bf16), jnp.asarray(w, bf16), jnp.asarray(b, bf16)


@every_shape
def test_linear_gelu_forward(shape: str) -> None:
    x, w, b = linear(shape)
    h, out = interpreted(matmul.linear_gelu_forward)(x, w, b)
    assert h.shape == out.shape == (*x.shape[:-1], w.shape[0]) and h.dtype == out.dtype == bf16
    expected = np.asarray(x, f64) @ np.asarray(w, f64).T + np.asarray(b, f64)
    np.testing.assert_allclose(np.asarray(h, f64), expected, rtol=HALF, atol=IN_FP32)
    np.testing.assert_array_equal(out, interpreted(gelu.gelu_forward)(h))
    value = expected_of(np.asarray(h, f64))[0]
    np.testing.assert_allclose(np.asarray(out, f64), value, rtol=HALF, atol=IN_FP32)
    again = interpreted(matmul.linear_gelu_forward)(x, w, b)
    assert all((one == other).all() for one, other in zip((h, out), again, strict=True))


def gradient(shape: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dout (..., O), w (O, I), h (..., I): here O is summed over."""
    leading, depth, columns = GELU_SHAPES[shape]
    rng = np.random.default_rng(depth * columns)
    dout, w = rng.normal(size=(*leading, depth)), rng.normal(0, depth**-0.5, (depth, columns))
    h = rng.normal(0, 2, (*leading, columns))
    return jnp.asarray(dout, bf16), jnp.asarray(w, bf16), jnp.asarray(h, bf16)


@every_shape
def test_linear_gelu_backward(shape: str) -> None:
    dout, w, h = gradient(shape)
    dh, db = interpreted(matmul.linear_gelu_backward)(dout, w, h)
    assert (dh.shape, db.shape) == (h.shape, h.shape[-1:]) and dh.dtype == db.dtype == bf16
    expected = np.asarray(dout, f64) @ np.asarray(w, f64) * expected_of(np.asarray(h, f64))[1]
    np.testing.assert_allclose(np.asarray(dh, f64), expected, rtol=HALF, atol=4 * IN_FP32)
    rows = np.asarray(dh, f64).reshape(-1, dh.shape[-1])
    of_rounded, of_exact = rows.sum(0).astype(bf16), expected.reshape(rows.shape).sum(0).astype(bf16)
    np.testing.assert_array_equal(db, of_rounded)
    assert (of_rounded != of_exact).any()  # the sum of what has not been rounded would show
    again = interpreted(matmul.linear_gelu_backward)(dout, w, h)
    assert all((one == other).all() for one, other in zip((dh, db), again, strict=True))


def test_the_plain_twins_are_the_same_formulas() -> None:
    rng = np.random.default_rng(1)
    x, w, b, dout = (rng.normal(size=shape) for shape in ((2, 5, 6), (7, 6), (7,), (2, 5, 7)))
    with jax.enable_x64(True):
        h, out = jax.jit(plain_gelu.linear_gelu_forward)(x, w, b)
        dx, db = jax.jit(plain_gelu.linear_gelu_backward)(dout, w, x)
    expected = x @ w.T + b, expected_of(x @ w.T + b)[0], dout @ w * expected_of(x)[1]
    for one, other in zip((h, out, dx, db), (*expected, expected[2].sum((0, 1))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


# ----- what is not right, and what is refused -------------------------------------------------------------------------


BETWEEN_WARPGROUPS = {
    "a slot is filled before it is released": (
        "_copy", "pl.when(step >= p.stages)(lambda: released(step))", "pass"
    ),
    "a slot is released before it is read": (
        "_compute", "copies.wait(barriers, FULL, worker * p.stages + slot(k))", "pass"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("race", BETWEEN_WARPGROUPS)
def test_races_between_warpgroups(race: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret mode finds them, of which the tests above make use."""
    broken(Mutant(matmul, *BETWEEN_WARPGROUPS[race], "", []), monkeypatch)
    x, w, b = linear("the ring goes round")
    kernel: Any = matmul.linear_gelu_forward
    try:
        with pytest.raises(Exception, match=FOUND):
            jax.block_until_ready(jax.jit(partial(kernel.__wrapped__, interpret=True))(x, w, b))
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()


HEAD = {
    "lnf": jnp.zeros((8, 64), bf16), "wte": jnp.zeros((128, 64), bf16), "targets": jnp.zeros(8, jnp.int32),
    "picked": jnp.zeros(8),
}  # fmt: skip
FORWARD = {"x": jnp.zeros((2, 8, 64), bf16), "w": jnp.zeros((128, 64), bf16), "b": jnp.zeros(128, bf16)}
BACKWARD = {"dout": jnp.zeros((2, 8, 64), bf16), "w": jnp.zeros((64, 128), bf16), "h": jnp.zeros((2, 8, 128), bf16)}
DEPTH, COLUMNS, DTYPE = "over a multiple of 64", "columns a multiple of 128", "take bfloat16, not"
KERNELS: dict[str, Any] = {
    "head_weights": (matmul.head_weights, HEAD | {"vocab_size": 100}),
    "linear_gelu_forward": (matmul.linear_gelu_forward, FORWARD),
    "linear_gelu_backward": (matmul.linear_gelu_backward, BACKWARD),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
def test_other_gpus_are_refused(kernel: str, target: str) -> None:
    function, arrays = KERNELS[kernel]
    with pytest.raises(ValueError, match=rf"Hopper's instructions \(sm_90\), not for {target}"):
        function(**arrays, target=target, interpret=True)


@pytest.mark.parametrize(
    ("kernel", "change", "says"),
    [
        ("head_weights", {"lnf": (8, 96), "wte": (128, 96)}, DEPTH),
        ("head_weights", {"wte": (100, 64)}, COLUMNS),
        ("head_weights", {"lnf": (8, 128)}, DEPTH),  # what does not fit together
        ("head_weights", {"wte": (192, 64)}, COLUMNS),
        ("linear_gelu_forward", {"x": (2, 8, 32), "w": (128, 32)}, DEPTH),
        ("linear_gelu_forward", {"w": (64, 64)}, COLUMNS),
        ("linear_gelu_backward", {"dout": (2, 8, 100), "w": (100, 128)}, DEPTH),
        ("linear_gelu_backward", {"w": (64, 200), "h": (2, 8, 200)}, COLUMNS),
    ],
)
def test_shapes_that_no_kernel_serves(kernel: str, change: dict[str, tuple[int, ...]], says: str) -> None:
    function, arrays = KERNELS[kernel]
    with pytest.raises(ValueError, match=says):
        function(**arrays | {name: jnp.zeros(shape, bf16) for name, shape in change.items()}, interpret=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("factor", [0, 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_dtypes_are_refused(kernel: str, factor: int, dtype: Any) -> None:
    function, arrays = KERNELS[kernel]
    name = list(arrays)[factor]
    with pytest.raises(ValueError, match=f"{DTYPE} .*{np.dtype(dtype).name}"):
        function(**arrays | {name: arrays[name].astype(dtype)}, interpret=True)
