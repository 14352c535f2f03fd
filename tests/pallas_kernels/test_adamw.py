"""AdamW's and the norm's kernels, interpreted with race detection, against float64 and the plain function's bits."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.training import rounding
from llmc_jax.training.rules import adamw as plain_adamw
from llmc_jax.training.rules.adamw import AdamWNumbers
from pallas_kernels import adamw as kernels
from pallas_kernels import mosaic
from pallas_kernels.adamw import adamw_update, global_norm
from tests import plain_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

bf16, fp16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
N = 5 * 1024
# Within a row, over a border, from border to border, neighbours, whole rows, the last element.
RANGES = ((0, 1), (700, 1030), (1030, 1031), (2048, 3072), (N - 3, N))
EXACT = AdamWNumbers(beta1=0.875, beta2=0.96875, eps=2.0**-20, weight_decay=0.125)  # float32 holds 1 - beta, too


def inputs(params: Any, gradient: Any, copy: Any = None) -> dict[str, Any]:
    """Buffers (N,) as in the midst of a run; the copy, which is only written, is poison."""
    rng = np.random.default_rng(0)
    return {
        "params": jnp.asarray(rng.normal(0, 0.02, N), params),
        "m": jnp.asarray(rng.normal(0, 1e-3, N), f32),
        "v": jnp.asarray(rng.normal(0, 1e-3, N) ** 2, f32),
        "gradient": jnp.asarray(rng.normal(0, 1e-3, N), gradient),
    } | ({} if copy is None else {"copy": jnp.full(N, jnp.nan, copy)})


def scalars(**others: Any) -> dict[str, Any]:
    given = {"scale": f32(0.5), "learning_rate": f32(1e-3), "update": jnp.int32(3), "apply": jnp.array(True)}
    return given | {"numbers": EXACT, "decay": RANGES} | others


def expected(buffers: dict[str, Any], ranges: Any = RANGES) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mask = np.zeros(N)
    for start, stop in ranges:
        mask[start:stop] = 1
    p, m, v, g = (np.asarray(buffers[name]).astype(np.float64) for name in ("params", "m", "v", "gradient"))
    return plain_model.adamw(
        p, m, v, 0.5 * g, update=3, learning_rate=1e-3,
        beta1=EXACT.beta1, beta2=EXACT.beta2, eps=EXACT.eps, decay=EXACT.weight_decay * mask,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("params", "gradient", "copy"),
    [(f32, bf16, bf16), (f32, f32, None), (f32, fp16, fp16), (bf16, bf16, None), (fp16, fp16, None)],
)
def test_against_float64(params: Any, gradient: Any, copy: Any) -> None:
    buffers = inputs(params, gradient, copy)
    p, m, v, copied = adamw_update(**buffers, **scalars(), interpret=True)
    wanted = expected(buffers)
    np.testing.assert_allclose(m, wanted[1], rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(v, wanted[2], rtol=1e-6)
    assert p.dtype == params and m.dtype == v.dtype == f32
    rounding = float(jnp.finfo(params).eps) / 2  # at the end; a change of up to 0.01 has float32's error before
    np.testing.assert_allclose(np.asarray(p, np.float64), wanted[0], rtol=1.01 * rounding + 1e-6, atol=1e-7)
    if copy is None:
        assert copied is None
    else:
        assert copied.dtype == copy
        np.testing.assert_array_equal(copied, p.astype(copy))


@pytest.mark.parametrize("ranges", [(), ((0, N),), ((1023, 1025),)])
def test_decay_of_exactly_the_ranges(ranges: Any) -> None:
    buffers = inputs(f32, f32)
    found = adamw_update(**buffers, **scalars(decay=ranges, numbers=EXACT._replace(weight_decay=0.5)), interpret=True)
    without = adamw_update(**buffers, **scalars(decay=()), interpret=True)
    decayed = np.asarray(found[0] != without[0])
    mask = np.zeros(N, bool)
    for start, stop in ranges:
        mask[start:stop] = True
    assert not decayed[~mask].any()
    assert decayed[mask].all()


@pytest.mark.parametrize("apply", [False, np.bool_(False), jnp.array(False)])
def test_not_applied_it_changes_no_bit(apply: Any) -> None:
    buffers = inputs(f32, f32, bf16) | {"gradient": jnp.full(N, jnp.nan), "copy": jnp.arange(N).astype(bf16)}
    after = adamw_update(
        **buffers, **scalars(apply=apply, scale=f32(jnp.nan), rounding="stochastic", seed=jnp.uint32(4)), interpret=True
    )
    for found, name in zip(after, ("params", "m", "v", "copy"), strict=True):
        np.testing.assert_array_equal(found, buffers[name])


def test_stochastic_copy_has_the_plain_function_s_bits() -> None:
    buffers = inputs(f32, bf16, bf16)
    for seed in (0, 7, 2**32 - 1):
        p, _, _, copied = adamw_update(
            **buffers, **scalars(rounding="stochastic", seed=jnp.uint32(seed)), interpret=True
        )
        np.testing.assert_array_equal(copied, rounding.round_stochastically(p, jnp.uint32(seed)))
        assert 0.2 < np.mean(copied != p.astype(bf16)) < 0.8


def test_stochastic_params_without_masters() -> None:
    """The neighbours of the right value; and the plain function's choice wherever its float32 is the same."""
    buffers = inputs(bf16, bf16)
    how = scalars(rounding="stochastic", seed=jnp.uint32(5))
    p, *_ = adamw_update(**buffers, **how, interpret=True)
    wanted = expected(buffers)[0]
    np.testing.assert_allclose(np.asarray(p, np.float64), wanted, rtol=1.01 * float(jnp.finfo(bf16).eps), atol=1e-7)
    plain, *_ = plain_adamw.adamw_update(*(buffers.pop(name) for name in ("params", "m", "v", "gradient")), **how)
    assert np.mean(np.asarray(p != plain)) < 0.002
    errors = (np.asarray(p, np.float64) - wanted) / np.abs(wanted)
    assert abs(errors.mean()) < 4 * errors.std() / N**0.5  # as often too large as too small


@partial(jax.jit, static_argnums=2)
def rounded_at(row: int, values: jax.Array, seed: int) -> jax.Array:
    """The kernel's rounding of 1024 values as if they were a row of a large buffer."""
    layout = mosaic.flat_layout(kernels.BLOCK, 4)

    def body(values_ref: Any, row_ref: Any, seed_ref: Any, out_ref: Any) -> None:
        loaded = mosaic.load(values_ref, layout)
        mosaic.store(out_ref, kernels._round_stochastically(loaded, row_ref[0], seed_ref[0], layout))

    call = mosaic.kernel(
        body, name="round", out_type=mosaic.shape_of((kernels.BLOCK,), bf16), grid=(1,), grid_names=("x",),
        interpret=True,
    )  # fmt: skip
    return call(values, jnp.array([row], jnp.int32), jnp.array([seed], jnp.uint32))


@pytest.mark.parametrize("row", [0, 1, 2**21 - 1, 2**22 - 1, 2**22, 2**22 + 3, 6_563_840])
def test_rounding_of_positions_beyond_32_bits(row: int) -> None:
    """gpt3:c4096's last row is the 6.5 millionth; from 2^32 elements on the position is folded."""
    values = jnp.asarray(np.random.default_rng(row).normal(size=kernels.BLOCK), f32)
    beyond, low = divmod(row * kernels.BLOCK, 2**32)
    position = (low + np.arange(kernels.BLOCK) + beyond * 198_491_317) % 2**32
    noise = rounding.squirrel_noise5(jnp.asarray(position, jnp.uint32), jnp.uint32(11)) & 0xFFFF
    bits = np.asarray(values).view(np.uint32)
    up = (bits & 0xFFFF) > np.asarray(noise)
    wanted = ((bits >> 16) + up).astype(np.uint16)
    np.testing.assert_array_equal(np.asarray(rounded_at(row, values, 11)).view(np.uint16), wanted)


def test_rounding_of_what_is_not_finite() -> None:
    nan = np.array([0x7F800001, 0x7FFFFFFF, 0xFF80FFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    values = np.resize(np.concatenate([nan, np.float32([np.inf, -np.inf, 0.0, -0.0])]), kernels.BLOCK)
    found = np.asarray(rounded_at(0, jnp.asarray(values), 3)).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(values))
    real = ~np.isnan(values)
    np.testing.assert_array_equal(found[real], values[real])
    assert (np.signbit(found[real]) == np.signbit(values[real])).all()


def test_column_of_a_position_beyond_31_bits() -> None:
    """The row that holds a range's border sees it at its column, the rows before beyond their end, those after before
    their start; none of the numbers overflows 32 bits.
    """
    position = 6_700_000_000
    row, column = divmod(position, kernels.BLOCK)
    seen = [int(kernels._column(position, jnp.int32(r))) for r in (0, row - 1, row, row + 1, row + 5_000_000)]
    assert seen == [1024 + column, 1024 + column, column, column - 1024, column - 1024]
    assert row < 2**31


def test_a_buffer_above_2_31_elements_is_lowered() -> None:
    """Nothing counts its elements in 32 bits: only shapes are needed."""
    n = 65_536 * 102_500
    wide = jax.ShapeDtypeStruct((n,), f32)
    update = partial(adamw_update, **scalars(decay=((5, n - 70_000),)))
    shapes = jax.eval_shape(update, wide, wide, wide, wide)
    assert [shape.shape for shape in shapes[:3]] == [(n,)] * 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({name: jnp.zeros(1000) for name in ("params", "m", "v", "gradient")}, "multiple of 1024"),
        ({"m": jnp.zeros(2048)}, "of one size"),
        ({"m": jnp.zeros(1024, bf16)}, "both in float32"),
        ({"rounding": "up"}, "'nearest' or 'stochastic'"),
        ({"rounding": "stochastic", "seed": 1}, "nothing is rounded"),
        ({"rounding": "stochastic", "seed": 1, "copy": jnp.zeros(1024, fp16)}, "float16 is rounded to"),
        ({"rounding": "stochastic", "copy": jnp.zeros(1024, bf16)}, "needs a seed"),
        ({"params": jnp.zeros(1024, bf16), "copy": jnp.zeros(1024, bf16)}, "float32 params only"),
        ({"target": "sm_70"}, "no kernels for sm_70"),
        ({"rows": (0, 1)}, "whole buffers"),
    ],
)
def test_what_cannot_be_updated_is_refused(change: dict[str, Any], says: str) -> None:
    given = {name: jnp.zeros(1024) for name in ("params", "m", "v", "gradient")}
    with pytest.raises(ValueError, match=says):
        adamw_update(**(given | scalars() | change), interpret=True)


# ----- the norm -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(1024, bf16), (1024, fp16), (3 * 1024, f32), (16_384, bf16), (5 * 16_384, f32), (4 * 65_536, bf16)],
)
def test_global_norm(n: int, dtype: Any) -> None:
    """One block, an odd number of them, one program, an odd number of programs, a trainer's buffer."""
    gradient = jnp.asarray(np.random.default_rng(n).normal(1.0, 0.1, n), dtype)
    found = global_norm(gradient, interpret=True)
    assert found.dtype == f32 and found.shape == ()
    np.testing.assert_allclose(found, np.linalg.norm(np.asarray(gradient).astype(np.float64)), rtol=3e-7)


def test_every_element_counts_once() -> None:
    """Powers of four at places that no two programs, rounds or threads share: their sum has no rounding."""
    gradient = np.zeros(2 * 16_384, np.float32)
    places = [0, 1, 1023, 1024, 5000, 16_383, 16_384, 2 * 16_384 - 1]
    gradient[places] = 2.0 ** np.arange(len(places))
    assert float(global_norm(jnp.asarray(gradient), interpret=True)) ** 2 == pytest.approx((4**8 - 1) / 3, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e30])
def test_global_norm_is_not_finite_where_a_gradient_is_not_or_its_square_overflows(bad: float) -> None:
    gradient = jnp.zeros(3 * 1024).at[1500].set(bad)
    assert not np.isfinite(global_norm(gradient, interpret=True))
