"""The kernels for one token of each of a few texts in interpret mode, with race detection, against float64 formulas.

What interpret mode does not cover, registers and shared memory as the hardware has them, is compiled in tests/aot.
"""

import inspect
import textwrap
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from pallas_kernels import decode
from pallas_kernels.decode import Tensor
from pallas_kernels.tuning import Tuned
from tests.comparisons import QUICK, interpreted
from tests.pallas_kernels.within_warpgroup import races, recorded

UNIT = {jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11, jnp.float32: 2.0**-24}  # largest relative error of a rounding
IN_FP32 = 2.0**-20  # of a sum of some thousand numbers, and ex2.approx
LAYER = 1  # of two
FEW = ("sms", 2)  # multiprocessors: a block has the rows of weights that it would have of a larger model
TEXTS = [1, 3, 5, 16]  # in registers; in shared memory: with a tile that overlaps another, and whole ones


def model(C: int, dtype: Any) -> dict[str, Any]:
    """Rows of C channels: of each of two layers a layernorm, weights (4 C, C), which are (C, 4 C) too, and a bias."""
    rng = np.random.default_rng(C)
    rows = np.concatenate(
        [rng.normal(1, 0.5, (2, C)), rng.normal(0, 0.5, (2, C)), rng.normal(size=(2 * (4 * C + 4), C))]
    )
    return {"rows": jnp.asarray(rows, dtype), "weight": Tensor(4, 4 * C), "bias": Tensor(4 + 8 * C, 4)}


NORM = Tensor(0, 1), Tensor(2, 1)
norm_linear = interpreted(decode.norm_linear, "norm", "weight", "bias", "outputs", "gelu", "out_dtype", "target")
linear_residual = interpreted(decode.linear_residual, "weight", "bias", "target")
attention_step = interpreted(decode.attention_step)


def numbers(dtype: Any, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape[0]).normal(0.5, scale, shape), dtype)


def in_float64(*given: jax.Array) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(array, np.float64) for array in given)


def of_layer(rows: np.ndarray, tensor: Tensor) -> np.ndarray:
    begin = tensor.first + LAYER * tensor.of_layer
    return rows[begin : begin + tensor.of_layer]


def check_product(
    found: jax.Array,
    parts: list[np.ndarray],
    a: np.ndarray,
    w: np.ndarray,
    dtype: Any,
    *,
    exact: bool,
    gelu: bool = False,
) -> None:
    """parts: what is added to the product a w^T, one after the other, with a rounding after each. exact: a is."""
    unit, sums = UNIT[dtype], [a @ w.T]
    for part in parts:
        sums.append(sums[-1] + part)
    y = sums[-1]
    allowed = (IN_FP32 + unit * (not exact)) * (np.abs(a) @ np.abs(w).T) + sum(unit * np.abs(each) for each in sums)
    if gelu:  # its slope is at most 1.13
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        allowed = 1.13 * allowed + (unit + IN_FP32) * np.abs(y)
    error = np.abs(np.asarray(found, np.float64) - y)
    assert (error <= 1.01 * allowed).all(), f"{(error / allowed).max()} of what roundings allow"


def normalised(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    w, b = (of_layer(rows, tensor)[0] for tensor in NORM)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def check_norm_linear(B: int, C: int, dtype: Any, outputs: int, gelu: bool, target: Tuned) -> None:
    given, x = model(C, dtype), numbers(dtype, B, C, scale=3.0)
    found = norm_linear(x, layer=jnp.int32(LAYER), norm=NORM, outputs=outputs, gelu=gelu, target=target, **given)
    assert found.shape == (B, outputs) and found.dtype == dtype
    wide, rows = in_float64(x, given["rows"])
    w, b = of_layer(rows, given["weight"])[:outputs], of_layer(rows, given["bias"]).reshape(-1)[:outputs]
    check_product(found, [b], normalised(wide, rows), w, dtype, exact=False, gelu=gelu)


SIZES = [(1, 64, jnp.bfloat16), (3, 96, jnp.float16), (5, 32, jnp.float32), (16, 96, jnp.bfloat16)]


@pytest.mark.parametrize(("B", "C", "dtype"), SIZES)
def test_norm_linear(B: int, C: int, dtype: Any) -> None:
    """Outputs that end within a row of the bias, or with one."""
    check_norm_linear(B, C, dtype, C + 32, B != 3, Tuned("sm_90", (FEW,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("B", "C", "dtype"), [(1, 1600, jnp.bfloat16), (8, 1600, jnp.bfloat16), (16, 1600, jnp.float32)]
)
def test_long_rows(B: int, C: int, dtype: Any) -> None:
    """Two vector widths, weights in two turns; in float32 16 texts are too much for this card's shared memory."""
    check_norm_linear(B, C, dtype, 64, True, Tuned("sm_89", (FEW,)))


def test_the_head_has_no_layer_and_no_bias() -> None:
    x, rows = numbers(jnp.bfloat16, 4, 64), model(64, jnp.bfloat16)["rows"]
    found = norm_linear(
        x, rows, jnp.int32(0), norm=(Tensor(1), Tensor(3)), weight=Tensor(7), bias=None, outputs=32,
        out_dtype=jnp.float32,
    )  # fmt: skip
    wide, all_rows = in_float64(x, rows)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, found.astype(jnp.bfloat16).astype(jnp.float32))
    check_product(found, [], normalised(wide, all_rows), all_rows[7:39], jnp.bfloat16, exact=False)


@pytest.mark.parametrize("wide", [1, 4])
@pytest.mark.parametrize(("B", "C", "dtype"), SIZES)
def test_linear_residual(B: int, C: int, dtype: Any, wide: int) -> None:
    given, x, a = model(C, dtype), numbers(dtype, B, C, scale=5.0), numbers(dtype, B, wide * C)
    found = linear_residual(x, a, layer=jnp.int32(LAYER), **given)
    assert found.shape == x.shape and found.dtype == dtype
    stream, factor, rows = in_float64(x, a, given["rows"])
    w = of_layer(rows, given["weight"]).reshape(-1, wide * C)[:C]
    check_product(found, [of_layer(rows, given["bias"])[0], stream], factor, w, dtype, exact=True)


def test_it_rounds_after_the_product_and_after_the_bias() -> None:
    """In bf16 256.75 is 256, and so is 256 + 1; at once they would be 258. 2.02 + 256 would be 258 from 257 on."""
    rows = np.zeros((34, 32))
    rows[:32, 0], rows[:32, 1], rows[32] = 256, 0.75, 1.0
    a = jnp.zeros((1, 32), jnp.bfloat16).at[0, :2].set(1)
    given = {"weight": Tensor(0), "bias": Tensor(32)}
    found = linear_residual(jnp.zeros((1, 32), jnp.bfloat16), a, jnp.asarray(rows, jnp.bfloat16), jnp.int32(0), **given)
    np.testing.assert_array_equal(found.astype(jnp.float32), 256)


@pytest.mark.parametrize("what", ["norm", "one", "four"])
def test_a_row_s_bits_do_not_depend_on_the_others(what: str) -> None:
    C, dtype = 64, jnp.float32
    given, x = model(C, dtype), numbers(dtype, 16, C, scale=3.0)
    a = numbers(dtype, 16, C if what == "one" else 4 * C)

    def result(texts: slice) -> np.ndarray:
        if what == "norm":
            return np.asarray(norm_linear(x[texts], layer=jnp.int32(LAYER), norm=NORM, outputs=2 * C, **given))
        return np.asarray(linear_residual(x[texts], a[texts], layer=jnp.int32(LAYER), **given))

    whole = result(slice(16))
    np.testing.assert_array_equal(whole, result(slice(16)))
    for count in TEXTS[:-1]:
        np.testing.assert_array_equal(whole[2 : 2 + count], result(slice(2, 2 + count)))


# ----- attention ----------------------------------------------------------------------------------------------------


def attended(B: int, NH: int, HS: int, S: int, position: int, dtype: Any) -> tuple[Any, ...]:
    qkv = numbers(dtype, B, 3 * NH * HS, scale=2.0)
    keys, values = (numbers(dtype, 2, B * NH, S, HS) * sign for sign in (1, -1))
    return qkv, keys, values, jnp.int32(LAYER), jnp.int32(position)


def check_attention(B: int, NH: int, HS: int, S: int, position: int, dtype: Any) -> None:
    given = attended(B, NH, HS, S, position, dtype)
    out, *caches = attention_step(*given)
    qkv, *expected = (np.array(each) for each in in_float64(*given[:3]))
    q, k, v = qkv.reshape(B, 3, NH, HS).transpose(1, 0, 2, 3).reshape(3, B * NH, HS)
    for cache, found, own in zip(expected, caches, (k, v), strict=True):
        cache[LAYER, :, position] = own
        np.testing.assert_array_equal(np.asarray(found, np.float64), cache)  # and nothing else has changed
    keys, values = (cache[LAYER, :, : position + 1] for cache in expected)
    score = np.einsum("nh,nsh->ns", q, keys) / np.sqrt(HS)
    weights = np.exp(score - score.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    wide = np.einsum("ns,nsh->nh", weights, values).reshape(B, NH * HS)
    # A score's error in fp32 is a weight's relative one.
    reach = np.abs(score).max() + 1
    allowed = UNIT[dtype] * np.abs(wide) + IN_FP32 * reach * np.einsum("ns,nsh->nh", weights, np.abs(values)).reshape(
        wide.shape
    )
    assert out.dtype == dtype
    assert (np.abs(np.asarray(out, np.float64) - wide) <= 1.01 * allowed).all()


@pytest.mark.parametrize("position", [0, 1, 100, 127, 128, 511, 512, 700, 1023])
def test_attention(position: int) -> None:
    """The first, the last, and on both sides of where a tile and a round of all warpgroups end."""
    check_attention(1, 2, 64, 1024, position, jnp.bfloat16)


@pytest.mark.parametrize(
    ("B", "NH", "HS", "dtype"),
    [(3, 2, 80, jnp.float32), (2, 1, 128, jnp.float32), (16, 1, 64, jnp.float16), (1, 3, 96, jnp.bfloat16),
     (1, 1, 112, jnp.bfloat16), (2, 2, 16, jnp.float16)],
)  # fmt: skip
def test_attention_of_other_heads(B: int, NH: int, HS: int, dtype: Any) -> None:
    check_attention(B, NH, HS, 256, 200, dtype)


def test_a_text_s_attention_does_not_depend_on_the_others() -> None:
    qkv, keys, values, *where = attended(3, 2, 64, 256, 200, jnp.float32)
    whole, again, alone = (
        attention_step(qkv[texts], keys[:, of], values[:, of], *where)[0]
        for texts, of in ((slice(3), slice(6)), (slice(3), slice(6)), (slice(1, 2), slice(2, 4)))
    )
    np.testing.assert_array_equal(whole, again)
    np.testing.assert_array_equal(whole[1:2], alone)


# ----- threads, and what is refused ---------------------------------------------------------------------------------


def run(name: str, function: str = "", old: str = "", new: str = "", patch: pytest.MonkeyPatch | None = None) -> Any:
    """Run a kernel, traced anew, maybe with other text of a function; norm, four rows of channels, attention."""
    if patch:
        text = textwrap.dedent(inspect.getsource(getattr(decode, function)))
        assert text.count(old) == 1
        made: dict[str, Any] = {}
        exec(text.replace(old, new), vars(decode), made)
        patch.setattr(decode, function, made[function])
    given, x = model(64, jnp.float32), numbers(jnp.float32, 5, 64)
    layer = jnp.int32(LAYER)
    if name == "attention":
        kernel, arrays = decode.attention_step, attended(1, 1, 64, 1024, 700, jnp.float32)
    elif name == "norm":
        rows = given.pop("rows")
        kernel, arrays = partial(decode.norm_linear.__wrapped__, norm=NORM, outputs=64, **given), (x, rows, layer)
    else:
        rows = given.pop("rows")
        arrays = x, numbers(jnp.float32, 5, 256), rows, layer
        kernel = partial(decode.linear_residual.__wrapped__, **given)
    kernel = partial(getattr(kernel, "__wrapped__", kernel), interpret=True)
    return jax.block_until_ready(jax.jit(kernel, compiler_options=QUICK)(*arrays))


@pytest.mark.parametrize("name", ["norm", "four"])
def test_threads_meet_where_they_must(name: str) -> None:
    with recorded() as log:
        run(name)
    assert any(access is not None and access.writes for events in log.values() for access in events)
    assert not any(map(races, log.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function", "meeting"),
    [("norm", "_given", "mosaic.meet(block.barrier)  # some of these rows"),
     ("norm", "_given", "mosaic.meet(block.barrier)\n    parts"),
     ("four", "_product", "mosaic.meet(barrier)\n        added")],
)  # fmt: skip
def test_each_meeting_is_needed(name: str, function: str, meeting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded() as log:
        run(name, function, meeting, "pass" + meeting[meeting.index(")") + 1 :], monkeypatch)
    assert any(map(races, log.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [("mosaic.meet(barrier)\n", "pass\n"), ("groups) == group)  # which", "groups) == (group + 1) % groups)  # which")],
)
def test_races_between_warpgroups(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are read too early, and a cache written by another warpgroup than the one that reads there."""
    try:
        with pytest.raises(Exception, match="RACE DETECTED"):
            run("attention", "_attend", old, new, monkeypatch)
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()


def test_what_it_refuses() -> None:
    given, x, layer = model(64, jnp.float32), numbers(jnp.float32, 17, 64), jnp.int32(0)
    with pytest.raises(ValueError, match="17 texts: these kernels take 1 to 16"):
        norm_linear(x, layer=layer, norm=NORM, outputs=64, **given)
    with pytest.raises(ValueError, match="outputs a multiple of 16"):
        norm_linear(x[:1], layer=layer, norm=NORM, outputs=50, **given)
    with pytest.raises(ValueError, match="a multiple of 32 up to 1600"):
        norm_linear(x[:1, :50], layer=layer, norm=NORM, outputs=64, **{**given, "rows": given["rows"][:, :50]})
    with pytest.raises(ValueError, match="must have one dtype"):
        linear_residual(x[:1], x[:1].astype(jnp.bfloat16), layer=layer, **given)
    with pytest.raises(ValueError, match="int8: all must have one dtype, bf16, fp16 or fp32"):
        norm_linear(
            x[:1].astype(jnp.int8), layer=layer, norm=NORM, outputs=64, **{**given, "rows": jnp.int8(given["rows"])}
        )
    with pytest.raises(ValueError, match=r"expected \(B, C\) or \(B, 4 C\)"):
        linear_residual(x[:1], jnp.zeros((1, 128)), layer=layer, **given)
    qkv, keys, values, *where = attended(2, 2, 64, 200, 5, jnp.float32)
    with pytest.raises(ValueError, match="S a multiple of 128"):
        attention_step(qkv, keys, values, *where)
    with pytest.raises(ValueError, match="heads of 24 channels"):
        attention_step(*attended(1, 1, 24, 128, 5, jnp.float32))
    with pytest.raises(ValueError, match="no kernels for sm_75"):
        norm_linear(x[:1], layer=layer, norm=NORM, outputs=64, target="sm_75", **given)
