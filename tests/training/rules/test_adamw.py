"""AdamW, the global norm, clipping and the ranges of the weight decay."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.config.model import ModelConfig
from llmc_jax.models import units
from llmc_jax.models.layout import flat_size, num_parameters
from llmc_jax.models.tensors import FLAT_MULTIPLE
from llmc_jax.training.optimizer import clip_scale, decay_ranges, global_norm, in_ranges
from llmc_jax.training.rounding import (
    Rows,
    _noise_positions,
    _noise_positions_of,
    round_stochastically,
    squirrel_noise5,
)
from llmc_jax.training.rules.adamw import (
    AdamWNumbers,
    adamw_update,
)
from tests import plain_model
from tests.comparisons import ADAMW_TOLERANCE, adamw_errors

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ModelConfig(max_seq_len=9, vocab_size=11, padded_vocab_size=16, num_layers=2, num_heads=2, channels=6)
NUMBERS = AdamWNumbers(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


def one_update(p: Any, m: Any, v: Any, g: Any, *, update: int = 1, lr: float = 1e-3, decay: bool = False, **how: Any):
    """params, m and v after adamw_update of a few float32 numbers, all of which decay or none."""
    arrays = [jnp.asarray(a, jnp.float32) for a in (p, m, v, g)]
    given = {"scale": jnp.float32(1), "apply": jnp.array(True), "numbers": NUMBERS} | how
    ranges = ((0, arrays[0].size),) if decay else ()
    return adamw_update(*arrays, learning_rate=jnp.float32(lr), update=update, decay=ranges, **given)[:3]


def test_worked_example() -> None:
    """w = 0.5, g = 0.2, lr = 0.001, decay 0.01: m = 0.02, v = 0.00004, mhat = 0.2, vhat = 0.04; w moves by 0.001005."""
    p, m, v = one_update([0.5], [0.0], [0.0], [0.2], decay=True)
    np.testing.assert_allclose(m, 0.02, rtol=1e-5)
    np.testing.assert_allclose(v, 0.00004, rtol=1e-4)
    np.testing.assert_allclose(p, 0.498995, rtol=0, atol=1e-7)


@pytest.mark.parametrize("rule", ["matrices", "all", "none"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, ADAMW_TOLERANCE), (np.float32, 1e-6)])
def test_several_updates(rule: str, dtype: Any, tolerance: float) -> None:
    errors = adamw_errors(rule, SMALL, dtype)
    assert max(errors.values()) <= tolerance, errors


def test_not_applied_it_changes_no_bit() -> None:
    """Not even where the gradient, and so the new m, v and parameters, are NaN."""
    state = [np.array(values, np.float32) for values in ([1.5, -0.0, np.inf], [0.1, -0.0, 1e-40], [0.3, 0.0, 2.0])]
    after = one_update(*state, [np.nan, np.inf, 1.0], apply=jnp.array(False), decay=True)
    for found, before in zip(after, state, strict=True):
        np.testing.assert_array_equal(np.asarray(found).view(np.uint32), before.view(np.uint32))


@pytest.mark.parametrize("rule", ["matrices", "all"])
def test_decay_ranges_are_the_tensors_that_decay(rule: str) -> None:
    mask = np.zeros(flat_size(SMALL))
    ranges = decay_ranges(SMALL, rule)
    for start, stop in ranges:
        assert not mask[start:stop].any()  # they do not overlap
        mask[start:stop] = 1
    np.testing.assert_array_equal(mask[: num_parameters(SMALL)], plain_model.decay_mask(SMALL, rule))
    assert not mask[num_parameters(SMALL) :].any()
    assert all(earlier[1] < later[0] for earlier, later in itertools.pairwise(ranges))  # neighbours joined


# ----- dtypes, the copy and stochastic rounding ---------------------------------------------------------------------

bf16, f32 = jnp.bfloat16, jnp.float32
EXACT = AdamWNumbers(beta1=0.875, beta2=0.96875, eps=2.0**-20, weight_decay=0.125)  # float32 holds 1 - beta, too
SIZE = 2 * FLAT_MULTIPLE
RANGES = ((0, 1), (700, 70_001), (SIZE - 3, SIZE))


def state_of(rng: np.random.Generator, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """params (SIZE,) in dtype, and m, v float32 as they are in the midst of a run."""
    p, m, v = rng.normal(0, 0.02, SIZE), rng.normal(0, 1e-3, SIZE), rng.normal(0, 1e-3, SIZE) ** 2
    return jnp.asarray(p, dtype), jnp.asarray(m, f32), jnp.asarray(v, f32)


def updated(state: tuple[jax.Array, ...], gradient: jax.Array, **how: Any) -> tuple[Any, ...]:
    """A jitted update number 3 with learning rate 1e-3, gradient scale 0.5 and RANGES decaying."""
    given = {"scale": f32(0.5), "apply": jnp.array(True), "numbers": EXACT, "update": 3} | how
    call = partial(adamw_update, learning_rate=f32(1e-3), decay=RANGES, rounding=given.pop("rounding", "nearest"))
    return jax.jit(lambda state, gradient, given: call(*state, gradient, **given))(state, gradient, given)


def in_float64(state: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `updated` should give, by the plain AdamW."""
    mask = np.zeros(SIZE)
    for start, stop in RANGES:
        mask[start:stop] = 1
    arrays = [np.asarray(array).astype(np.float64) for array in (*state, gradient)]
    return plain_model.adamw(
        *arrays[:3],
        0.5 * arrays[3],
        update=3,
        learning_rate=1e-3,
        beta1=EXACT.beta1,
        beta2=EXACT.beta2,
        eps=EXACT.eps,
        decay=EXACT.weight_decay * mask,
    )


@pytest.mark.parametrize("dtype", [bf16, jnp.float16])
@pytest.mark.parametrize("with_copy", [True, False])
def test_narrow_dtypes_round_once(dtype: Any, with_copy: bool) -> None:
    """A gradient in dtype; params in float32 with a copy in dtype, or in dtype themselves: half a unit at the end."""
    rng = np.random.default_rng(1)
    state = state_of(rng, f32 if with_copy else dtype)
    gradient = jnp.asarray(rng.normal(0, 1e-3, SIZE), dtype)
    copy = {"copy": jnp.full(SIZE, jnp.nan, dtype)} if with_copy else {}
    p, m, v, copied = updated(state, gradient, **copy)
    expected = in_float64(state, gradient)
    np.testing.assert_allclose(m, expected[1], rtol=1e-6, atol=1e-10)
    np.testing.assert_allclose(v, expected[2], rtol=1e-6)
    assert p.dtype == state[0].dtype and m.dtype == v.dtype == f32
    if with_copy:
        np.testing.assert_allclose(p, expected[0], rtol=1e-6, atol=1e-8)  # a change is up to 0.01
        np.testing.assert_array_equal(copied, p.astype(dtype))
        assert copied.dtype == dtype
    else:
        assert copied is None
        unit = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(p, np.float64), expected[0], rtol=0.5001 * unit, atol=1e-7)
    assert not np.array_equal(p, state[0])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_not_applied_the_copy_stays_too(dtype: Any, rounding: str) -> None:
    rng = np.random.default_rng(2)
    state = state_of(rng, dtype)
    copy = {"copy": jnp.asarray(rng.normal(size=SIZE), bf16)} if dtype == f32 else {}
    after = updated(
        state, jnp.full(SIZE, jnp.nan), apply=jnp.array(False), seed=jnp.uint32(1), rounding=rounding, **copy
    )
    for found, before in zip(after, (*state, copy.get("copy")), strict=True):
        if before is not None:
            np.testing.assert_array_equal(found, before)


def test_the_copy_of_an_update_costs_no_further_buffer() -> None:
    """Donated, all four are changed where they lie: what the barriers are for."""
    state = (*(jax.ShapeDtypeStruct((SIZE,), f32),) * 3, jax.ShapeDtypeStruct((SIZE,), bf16))

    def update(p: jax.Array, m: jax.Array, v: jax.Array, copy: jax.Array, g: jax.Array) -> tuple[Any, ...]:
        how = {"scale": f32(0.5), "learning_rate": f32(1e-3), "update": 3, "apply": jnp.array(True)}
        return adamw_update(p, m, v, g, copy=copy, numbers=NUMBERS, decay=RANGES, **how)

    compiled = jax.jit(update, donate_argnums=(0, 1, 2, 3)).lower(*state, state[0]).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 14 * SIZE
    assert memory.temp_size_in_bytes < SIZE


def test_squirrel_noise5() -> None:
    """Against Python's integers, step by step; and the low 16 bits, which rounding uses, are spread evenly."""

    def by_hand(position: int, seed: int) -> int:
        bits = (position * 0xD2A80A3F + seed) % 2**32
        for shift, add, multiply in (
            (9, 0xA884F197, 1), (11, 0, 0x6C736F4B), (13, 0xB79F3ABB, 1), (15, 0, 0x1B56C4F5), (17, 0, 1),
        ):  # fmt: skip
            bits = ((bits ^ bits >> shift) + add) * multiply % 2**32
        return bits

    positions = [0, 1, 2, 65_535, 2**31, 2**32 - 1]
    for seed in (0, 1, 0xDEADBEEF):
        found = squirrel_noise5(jnp.asarray(positions, jnp.uint32), jnp.uint32(seed))
        assert found.tolist() == [by_hand(position, seed) for position in positions]
    low = np.asarray(squirrel_noise5(jnp.arange(2**20, dtype=jnp.uint32), jnp.uint32(7))) & 0xFFFF
    counts = np.bincount(low >> 8, minlength=256)  # 4096 expected in each, with a standard deviation of 64
    assert np.abs(counts - 4096).max() < 5 * 64


def test_stochastic_rounding_is_right_in_expectation() -> None:
    """A value 1/8 or 7/8 of the way between two neighbours goes up as often; one that bfloat16 holds stays."""
    n = 2**18
    for lower, upper, way in ((0.75, 0.75 + 2**-8, 1 / 8), (-1.5, -1.5 - 2**-7, 7 / 8), (2 - 2**-7, 2.0, 1 / 2)):
        value = lower + way * (upper - lower)  # bfloat16's spacing is 2^-8 between 0.5 and 1, 2^-7 between 1 and 2
        rounded = np.asarray(round_stochastically(jnp.full(n, value, f32), jnp.uint32(9))).astype(np.float64)
        assert set(rounded) == {lower, upper}
        share = (rounded == upper).mean()
        assert abs(share - way) < 4 * (way * (1 - way) / n) ** 0.5
    exact = jnp.asarray(np.random.default_rng(0).normal(size=n), bf16)
    np.testing.assert_array_equal(round_stochastically(exact.astype(f32), jnp.uint32(3)), exact)


def test_stochastic_rounding_of_what_is_not_finite() -> None:
    """A NaN whose payload lies in the dropped bits, and one that a carry would make -0, stay NaN."""
    nan = np.array([0x7F800001, 0x7FFFFFFF, 0xFF80FFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    values = jnp.asarray(np.concatenate([np.repeat(nan, 64), np.repeat(np.float32([np.inf, -np.inf, 0.0, -0.0]), 64)]))
    rounded = np.asarray(round_stochastically(values, jnp.uint32(5))).astype(np.float32)
    assert np.isnan(rounded[:256]).all()
    np.testing.assert_array_equal(rounded[256:], values[256:])
    assert (np.signbit(rounded[256:]) == np.signbit(np.asarray(values[256:]))).all()


@pytest.mark.parametrize(
    ("dtype", "how", "says"),
    [
        (f32, {"rounding": "up"}, "'nearest' or 'stochastic'"),
        (f32, {"rounding": "stochastic", "seed": 1}, "nothing is rounded"),
        (f32, {"rounding": "stochastic", "seed": 1, "copy": jnp.float16}, "float16 is rounded to"),
        (jnp.float16, {"rounding": "stochastic", "seed": 1}, "float16 is rounded to"),
        (bf16, {"rounding": "stochastic"}, "needs a seed"),
        (bf16, {"copy": bf16}, "float32 params only"),
    ],
)
def test_what_cannot_be_rounded_is_refused(dtype: Any, how: dict[str, Any], says: str) -> None:
    how = {name: jnp.zeros(SIZE, value) if name == "copy" else value for name, value in how.items()}
    with pytest.raises(ValueError, match=says):
        updated((jnp.zeros(SIZE, dtype), jnp.zeros(SIZE), jnp.zeros(SIZE)), jnp.zeros(SIZE), **how)


# ----- positions ----------------------------------------------------------------------------------------------------


class Beyond32Bits(int):
    """A size that says it is above 2^32, so that the test needs no buffer of that size."""

    def __le__(self, other: object) -> bool:
        return False


@pytest.mark.parametrize("kind", [int, Beyond32Bits])
def test_positions_in_ranges(kind: type[int]) -> None:
    """Ranges that begin or end at a multiple of FLAT_MULTIPLE, or beside one; neighbours; the first and the last."""
    size, row = 4 * FLAT_MULTIPLE, FLAT_MULTIPLE
    ranges = (
        (0, 1),
        (row - 1, row),
        (row, row + 1),
        (2 * row - 1, 2 * row + 1),
        (2 * row + 5, 3 * row),
        (size - 1, size),
    )
    expected = np.zeros(size, bool)
    for start, stop in ranges:
        expected[start:stop] = True
    np.testing.assert_array_equal(in_ranges(kind(size), ranges), expected)
    np.testing.assert_array_equal(in_ranges(kind(size), ((0, size),)), np.ones(size, bool))
    np.testing.assert_array_equal(in_ranges(kind(size), ()), np.zeros(size, bool))


def test_noise_positions_beyond_32_bits_begin_as_below() -> None:
    found = _noise_positions(Beyond32Bits(SIZE))
    np.testing.assert_array_equal(found, np.arange(SIZE))
    assert found.dtype == jnp.uint32


def test_global_norm() -> None:
    flat = np.zeros(2 * FLAT_MULTIPLE, np.float32)
    flat[[0, 70_000, -1]] = 2.0, -3.0, 6.0
    assert float(global_norm(jnp.asarray(flat))) == 7.0


def test_global_norm_keeps_its_digits_over_many_elements() -> None:
    """A running float32 sum of 8 million squares, one after the other, gives a norm that is 0.1 % off."""
    flat = np.random.default_rng(0).normal(1.0, 0.1, 128 * FLAT_MULTIPLE).astype(np.float32)
    found = float(jax.jit(global_norm)(flat))
    np.testing.assert_allclose(found, np.linalg.norm(flat.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e30])
def test_global_norm_is_not_finite_where_a_gradient_is_not_or_its_square_overflows(bad: float) -> None:
    flat = np.zeros(FLAT_MULTIPLE, np.float32)
    flat[123] = bad
    assert not np.isfinite(global_norm(jnp.asarray(flat)))


@pytest.mark.parametrize(
    ("norm", "limit", "scale"),
    [
        (2.0, 1.0, 0.5),
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (8.0, 2.0, 0.25),
        (5.0, 0.0, 1.0),
        (5.0, -1.0, 1.0),
        (0.0, 1.0, 1.0),
    ],
)
def test_clip_scale(norm: float, limit: float, scale: float) -> None:
    assert float(clip_scale(jnp.float32(norm), jnp.float32(limit))) == scale


# ----- a part of the buffers ----------------------------------------------------------------------------------------


def parts_of(flat: Any, devices: int) -> list[jax.Array]:
    return list(jnp.asarray(units.split_on_host(np.asarray(flat), SMALL, devices).reshape(devices, -1)))


KINDS = {  # params, copy, rounding
    "fp32": (f32, None, "nearest"),
    "bf16": (f32, bf16, "nearest"),
    "fp16": (f32, jnp.float16, "nearest"),
    "bf16, stochastic": (f32, bf16, "stochastic"),
    "bf16 alone": (bf16, None, "nearest"),
    "bf16 alone, stochastic": (bf16, None, "stochastic"),
    "fp16 alone": (jnp.float16, None, "nearest"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rule", "devices"),
    [("fp32", "all", 3), ("fp32", "none", 2), *((kind, "matrices", 8) for kind in KINDS if kind != "fp32")],
)
def test_the_parts_are_updated_as_the_whole(kind: str, rule: str, devices: int) -> None:
    """Bit for bit: what decays and what is rounded which way goes by the place in the flat buffer."""
    dtype, copied, rounding = KINDS[kind]
    rng, N = np.random.default_rng(4), num_parameters(SMALL)

    def random(scale: float, dtype: Any) -> jax.Array:
        return jnp.asarray(np.pad(rng.normal(0, scale, N), (0, flat_size(SMALL) - N)), dtype)

    arrays = [random(0.02, dtype), random(1e-3, f32), random(1e-3, f32) ** 2, random(1e-3, copied or dtype)]
    copies = [] if copied is None else [random(1, copied)]
    decay = () if rule == "none" else decay_ranges(SMALL, rule)

    @jax.jit
    def update(arrays: Any, copies: Any, apply: Any, rows: Any = None) -> Any:
        place = None if rows is None else Rows(rows, SMALL.channels)
        return adamw_update(
            *arrays, copy=copies[0] if copies else None, scale=f32(0.5), learning_rate=f32(1e-3), update=3,
            apply=apply, numbers=EXACT, decay=decay, rounding=rounding, seed=jnp.uint32(11), rows=place,
        )[: 3 + len(copies)]  # fmt: skip

    numbers = [units.own_rows(SMALL, devices, device) for device in range(devices)]
    arrays_of = list(zip(*(parts_of(each, devices) for each in arrays), strict=True))
    copies_of = list(zip(*(parts_of(each, devices) for each in copies), strict=True)) or [()] * devices
    for apply in (True, False):
        whole = update(arrays, copies, apply)
        parts = [update(*given, apply, rows) for *given, rows in zip(arrays_of, copies_of, numbers, strict=True)]
        for found, expected in zip(zip(*parts, strict=True), whole, strict=True):
            joined = units.joined_on_host([np.asarray(part) for part in found], SMALL)
            assert joined.dtype == expected.dtype
            assert joined[:N].tobytes() == np.asarray(expected)[:N].tobytes()
    assert not np.array_equal(whole[0], update(arrays, copies, True)[0])


@pytest.mark.parametrize("length", [1, 3, 768, 65_536])
def test_noise_positions_of_rows(length: int) -> None:
    """Against 64-bit numbers: rows around each multiple of 2^32, and the last that 32 bits number."""
    at = [max(0, k * 2**32 // length + d) for k in (0, 1, 2, 3, 7, length // 2 - 1) for d in (-1, 0, 1)]
    numbers = sorted({row for row in at if row < 2**31})
    found = np.asarray(_noise_positions_of(Rows(jnp.asarray(numbers, jnp.int32), length)))
    position = (np.array(numbers, np.uint64)[:, None] * np.uint64(length) + np.arange(length, dtype=np.uint64)).ravel()
    expected = (position + (position >> np.uint64(32)) * np.uint64(198_491_317)) & np.uint64(2**32 - 1)
    np.testing.assert_array_equal(found, expected.astype(np.uint32))
    assert (position.max() > 2**32) == (length > 2)
    whole = Beyond32Bits(SIZE)
    rows = SIZE // length
    beginning = _noise_positions_of(Rows(jnp.arange(rows, dtype=jnp.int32), length))
    np.testing.assert_array_equal(beginning, np.asarray(_noise_positions(whole))[: rows * length])
