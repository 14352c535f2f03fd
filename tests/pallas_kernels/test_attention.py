"""Flash attention in interpret mode, with race detection, against float64 attention differentiated by JAX.

What interpret mode replaces by stand-ins is proved elsewhere: the relabelling of registers in
test_attention_layout.py, layouts and instructions by compiling for each GPU (tests/aot).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention, mosaic, tuning
from tests.comparisons import QUICK

# Largest error of a head's q, k or v part, of its largest element. Three roundings to the dtype (the weights or their
# gradient, out or the kept sums through it, the result) of half a unit each, of which the first is averaged over a row.
TOLERANCE = {jnp.bfloat16: 2.0**-7, jnp.float16: 2.0**-10}


class Case(NamedTuple):
    B: int
    T: int
    NH: int
    HS: int
    dtype: Any
    version: str
    relu: bool = False
    seed: int = 0


CASES = [
    Case(2, 130, 2, 32, jnp.bfloat16, "mma"),  # three tiles, the last almost all padding; heads and batches in order
    Case(1, 130, 2, 64, jnp.bfloat16, "wgmma"),  # two blocks of two warpgroups; the ring of four slots is full
]
SLOW = [
    Case(1, 63, 1, 40, jnp.float16, "wgmma", relu=True),  # channels padded to 48, rows to 128: half of the block idles
    Case(1, 65, 2, 64, jnp.bfloat16, "mma", relu=True),
    Case(1, 1, 2, 32, jnp.bfloat16, "wgmma"),  # a single token: attention is v, dq and dk are 0
    Case(1, 64, 2, 80, jnp.float16, "mma"),  # exactly one tile; a head of 5 * 16 channels
    Case(1, 200, 1, 128, jnp.bfloat16, "mma"),
    Case(1, 130, 1, 96, jnp.float16, "mma"),
    Case(1, 200, 1, 128, jnp.bfloat16, "wgmma"),  # keys and values of dkv's own rows are read anew
    Case(1, 130, 1, 80, jnp.float16, "wgmma"),
    Case(1, 130, 1, 96, jnp.bfloat16, "wgmma"),
    Case(1, 600, 1, 64, jnp.bfloat16, "wgmma"),  # the ring goes round
]


def name_of(case: Case) -> str:
    kind = "relu" if case.relu else "softmax"
    return f"{case.version}-{kind}-B{case.B}-T{case.T}-NH{case.NH}-HS{case.HS}-{np.dtype(case.dtype).name}"


every_case = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=name_of
)


def inputs(case: Case) -> tuple[jax.Array, jax.Array]:
    """qkv (B, T, 3C), every head of another size so that a mix-up shows, and dout (B, T, C)."""
    rng = np.random.default_rng(case.seed)
    qkv = rng.normal(size=(case.B, case.T, 3, case.NH, case.HS)) * (1 + 0.4 * np.arange(case.NH))[:, None]
    dout = rng.normal(size=(case.B, case.T, case.NH * case.HS))
    return jnp.asarray(qkv.reshape(case.B, case.T, -1), case.dtype), jnp.asarray(dout, case.dtype)


def expected(case: Case, qkv: jax.Array, dout: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """out (B, T, C), lse (B, NH, T) and dqkv (B, T, 3C) in float64."""

    def reference(qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads = qkv.reshape(case.B, case.T, 3, case.NH, case.HS)
        score = jnp.einsum("btnh,bunh->bntu", heads[:, :, 0], heads[:, :, 1]) / math.sqrt(case.HS)
        past = np.tri(case.T, dtype=bool)
        lse = jax.nn.logsumexp(score, axis=-1, where=past)  # (B, NH, T)
        weights = jax.nn.relu(score) if case.relu else jnp.exp(score - lse[..., None])
        out = jnp.einsum("bntu,bunh->btnh", jnp.where(past, weights, 0), heads[:, :, 2])
        return out.reshape(case.B, case.T, -1), lse

    with jax.enable_x64(True):
        out, vjp, lse = jax.vjp(reference, jnp.asarray(np.asarray(qkv, np.float64)), has_aux=True)
        (dqkv,) = vjp(jnp.asarray(np.asarray(dout, np.float64)))
        return np.asarray(out), np.asarray(lse), np.asarray(dqkv)


def check(found: jax.Array, wanted: np.ndarray, case: Case) -> None:
    """Every part of every head of every sequence by itself."""
    assert (found.shape, found.dtype) == (wanted.shape, case.dtype)

    def by_head(x: Any) -> np.ndarray:
        x = np.asarray(x, np.float64).reshape(case.B, case.T, -1, case.HS)
        return x.transpose(0, 2, 1, 3).reshape(-1, case.T * case.HS)

    values, wants = by_head(found), by_head(wanted)
    scale = np.abs(wants).max(-1)
    # What is 0 in truth, q's and k's gradient where there is one token, is a difference of rounded numbers.
    scale = np.where(scale == 0, 1, scale)
    error = np.abs(values - wants).max(-1) / scale
    assert (error <= TOLERANCE[case.dtype]).all(), f"errors of heads, {TOLERANCE[case.dtype]:.1e} allowed: {error}"


def check_sums(dbias: jax.Array, dqkv: np.ndarray, case: Case) -> None:
    """The sum over all rows. That of dk is 0 in truth, since softmax sees no difference: its terms are the measure."""
    assert (dbias.shape, dbias.dtype) == (dqkv.shape[-1:], case.dtype)
    terms = np.abs(dqkv).reshape(-1, dqkv.shape[-1]).sum(0)
    scale = np.where(terms.max() == 0, 1, terms.max())
    assert (np.abs(np.asarray(dbias, np.float64) - dqkv.sum((0, 1))) <= TOLERANCE[case.dtype] * scale).all()


def check_rounded_once(dbias: jax.Array, dqkv: jax.Array) -> None:
    """The sum of what was returned, in float32, rounded at the end."""
    rows = np.asarray(dqkv, np.float64).reshape(-1, dbias.size)
    bound = jnp.finfo(dbias.dtype).eps / 2 * np.abs(rows.sum(0)) + 2.0**-20 * np.abs(rows).sum(0)
    assert (np.abs(np.asarray(dbias, np.float64) - rows.sum(0)) <= bound).all()


@partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def run(case: Case, qkv: jax.Array, dout: jax.Array) -> tuple[jax.Array, Any, tuple[jax.Array, jax.Array]]:
    """out, saved, and dqkv with its sum over all rows, by the kernels."""
    kind = "relu_attention" if case.relu else "attention"
    options: dict[str, Any] = {"version": case.version, "target": "sm_90", "interpret": True}
    out, saved = getattr(attention, f"{kind}_forward")(qkv, case.NH, **options)
    return out, saved, getattr(attention, f"{kind}_backward")(dout, qkv, out, saved, case.NH, **options)


@every_case
def test_against_float64(case: Case) -> None:
    qkv, dout = inputs(case)
    out, saved, (dqkv, dbias) = run(case, qkv, dout)
    wanted_out, wanted_lse, wanted_dqkv = expected(case, qkv, dout)
    check(out, wanted_out, case)
    check(dqkv, wanted_dqkv, case)
    check_sums(dbias, wanted_dqkv, case)
    check_rounded_once(dbias, dqkv)
    if case.relu:
        assert saved == ()
    else:
        assert saved.dtype == jnp.float32
        wanted = wanted_lse * math.log2(math.e)
        np.testing.assert_allclose(saved, wanted, rtol=1e-5, atol=1e-5)  # float32 products, ex2.approx's 2^-22


WRONG: dict[str, Any] = {
    "zero": np.zeros_like,
    "transposed heads": lambda x: x.reshape(2, 70, -1, 2, 8).swapaxes(3, 4).reshape(x.shape),
    "swapped heads": lambda x: x.reshape(2, 70, -1, 2, 8)[..., ::-1, :].reshape(x.shape),
    "swapped sequences": lambda x: x[::-1],
    "shifted by a row": lambda x: np.roll(x, 1, axis=1),
    "last row forgotten": lambda x: np.where(np.arange(70)[:, None] == 69, 0, x),
    "scaled": lambda x: x * 1.02,
    "NaN": lambda x: np.where(np.arange(70)[:, None] == 69, np.nan, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WRONG)
def test_the_comparison_sees_mistakes(mistake: str) -> None:
    case = Case(2, 70, 2, 8, jnp.bfloat16, "mma")
    qkv, dout = inputs(case)
    out, _, dqkv = expected(case, qkv, dout)
    for right in (out, dqkv):
        check(jnp.asarray(right, case.dtype), right, case)
        with pytest.raises(AssertionError):
            check(jnp.asarray(WRONG[mistake](right), case.dtype), right, case)


@pytest.mark.slow
def test_float16_holds_gradients_of_scores_that_only_their_scale_makes_small() -> None:
    """Up to 3e5 before it, more than the largest float16; with it, by 64 channels, an eighth."""
    case = Case(1, 16, 1, 64, jnp.float16, "mma")
    qkv, dout = inputs(case)
    qkv, dout = qkv * jnp.repeat(jnp.asarray([0.01, 0.01, 200], jnp.float16), 64), 200 * dout
    check(run(case, qkv, dout)[2][0], expected(case, qkv, dout)[2], case)


@pytest.mark.slow
def test_the_future_reaches_nothing() -> None:
    """To the bit, within a tile and across its edge."""
    case = Case(1, 66, 1, 32, jnp.bfloat16, "mma")
    qkv, dout = inputs(case)
    out = run(case, qkv, dout)[0]
    changed, _ = inputs(case._replace(seed=1))
    changed = jnp.concatenate([qkv[:, :60], 9 * changed[:, 60:]], axis=1)
    dout = dout.at[:, 60:].set(0)
    changed_out, _, (dqkv, _) = run(case, changed, dout)
    np.testing.assert_array_equal(out[:, :60], changed_out[:, :60])
    assert (np.asarray(dqkv)[:, 60:] == 0).all() and (np.asarray(dqkv)[:, :60] != 0).any()


@pytest.mark.parametrize("target", tuning.TARGETS)
@pytest.mark.parametrize("version", tuning.VERSIONS)
@pytest.mark.parametrize("HS", tuning.HEAD_SIZES)
def test_tiles_fit_the_shared_memory(target: str, version: str, HS: int) -> None:
    if version != "mma" and target != "sm_90":
        with pytest.raises(ValueError, match=f"wgmma.*sm_90.*{target}"):
            tuning.attention_sizes(target, HS, version)
        return
    sizes = tuning.attention_sizes(target, HS, version)
    for kernel, columns in sizes.columns.items():
        assert attention.ROWS % columns == 0
        own = sizes.warpgroups * (1 if kernel == "forward" else 2)
        rows = 2 * max(sizes.stages, sizes.warpgroups) * attention.ROWS * 4  # lse and delta
        assert (own * attention.ROWS + 2 * sizes.stages * columns) * HS * 2 + rows + 1024 <= tuning.sizes(target).smem
    assert sizes.stages & (sizes.stages - 1) == 0  # slots are counted by the last bits
    assert set(sizes.copied_apart) <= set(sizes.columns)


@pytest.mark.parametrize(
    ("T", "blocks"),
    [(300, 2), pytest.param(300, 1, marks=pytest.mark.slow), pytest.param(130, 3, marks=pytest.mark.slow)],
)
def test_blocks_that_go_from_part_to_part_give_the_same_bits(T: int, blocks: int) -> None:
    """Several parts of the work, of different lengths, in each block of dkv; else every block has one."""
    case = Case(2, T, 1, 64, jnp.bfloat16, "wgmma")
    qkv, dout = inputs(case)
    out, lse, (dqkv, dbias) = run(case, qkv, dout)
    few = tuning.Tuned("sm_90", (("sms", blocks), ("attention_blocks", 1)))
    backward = partial(attention.attention_backward, num_heads=1, target=few, version="wgmma", interpret=True)
    found = jax.jit(backward, compiler_options=QUICK)(dout, qkv, out, lse)
    np.testing.assert_array_equal(found[0], dqkv)
    np.testing.assert_array_equal(found[1], dbias)


@pytest.mark.parametrize(
    ("parts", "most", "blocks"), [(8, 132, 131), (7, 132, 132), (1, 132, 64), (2, 128, 128), (12, 2, 1), (2, 3, 3)]
)
def test_blocks_of_a_kernel_that_lasts(parts: int, most: int, blocks: int) -> None:
    """No more than parts of the work; where they are more, each block gets all lengths in turn."""
    assert set(tuning.attention_sizes("sm_90", 64, None).lasting.values()) == {3 * 132}
    sizes = tuning.attention_sizes(tuning.Tuned("sm_90", (("sms", most), ("attention_blocks", 1))), 64, None)
    qkv = jax.ShapeDtypeStruct((16, parts * 128, 4 * 3 * 64), jnp.bfloat16)
    problem = attention._problem(qkv, 4, False, "sm_90", None, False)._replace(sizes=sizes)
    assert problem.lasting_blocks("dkv") == blocks
    assert math.gcd(blocks, parts) == 1 or blocks == 64 * parts


def contiguous(source: Any) -> bool:
    """Whether the elements that a copy takes of an array lie one after another."""
    (indexer,) = source.transforms
    taken = [getattr(index, "size", 1) if not hasattr(index, "dtype") else 1 for index in indexer.indices]
    first = next(axis for axis, size in enumerate(taken) if size > 1)
    return taken[first + 1 :] == list(indexer.shape[first + 1 :])


def test_plain_arrays_are_copied_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """cp.async takes that for granted, and interpret mode copies otherwise."""
    copied = []
    start = mosaic.plgpu.copy_gmem_to_smem

    def record(source: Any, tile: Any, *rest: Any, **named: Any) -> None:
        copied.append((tile.dtype, source))
        start(source, tile, *rest, **named)

    monkeypatch.setattr(mosaic.plgpu, "copy_gmem_to_smem", record)
    bf16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    arguments = bf16((2, 192, 384)), bf16((2, 192, 128)), jax.ShapeDtypeStruct((2, 2, 192), jnp.float32)
    jax.eval_shape(
        lambda qkv, out, lse: attention.attention_backward(out, qkv, out, lse, 2, target="sm_80"), *arguments
    )
    plain = [source for dtype, source in copied if dtype == jnp.float32]
    assert plain and all(map(contiguous, plain))
    assert not any(contiguous(source) for dtype, source in copied if dtype != jnp.float32)  # tiles have rows apart


def test_a_tuned_target_has_the_version_of_its_architecture() -> None:
    for target in tuning.TARGETS:
        tuned = tuning.Tuned(target, (("layernorm_blocks", 1),))
        assert tuning.attention_sizes(tuned, 64, None) == tuning.attention_sizes(target, 64, None)


def test_registers_suffice_where_a_warpgroup_only_copies() -> None:
    """Three warpgroups get 168 a thread at launch; what two of them ask for later must then be there."""
    computing, copying = attention.COMPUTING_REGISTERS, attention.COPYING_REGISTERS
    assert 2 * computing + copying <= 3 * 168 and computing % 8 == copying % 8 == 0


def test_the_table_chooses_wgmma_for_hopper_alone() -> None:
    chosen = {target: tuning.attention_sizes(target, 64, None).version for target in tuning.TARGETS}
    assert chosen == {target: "wgmma" if target == "sm_90" else "mma" for target in tuning.TARGETS}


def test_errors_teach() -> None:
    qkv = jnp.zeros((1, 8, 96), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"float32.*jnp version"):
        attention.attention_forward(qkv.astype(jnp.float32), 2)
    with pytest.raises(ValueError, match=r"\(1, 8, 96\).*3 \* 5 heads"):
        attention.attention_forward(qkv, 5)
    with pytest.raises(ValueError, match=r"256 channels.*128"):
        attention.attention_forward(jnp.zeros((1, 8, 768), jnp.bfloat16), 1)
    many = jax.ShapeDtypeStruct((65_536, 1, 96), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"65,536 blocks along 'sequence'"):
        jax.eval_shape(partial(attention.attention_forward, num_heads=2), many)
    with pytest.raises(ValueError, match="sm_75"):
        attention.attention_forward(qkv, 2, target="sm_75")
    with pytest.raises(ValueError, match=r"fast.*mma, wgmma"):
        attention.attention_forward(qkv, 2, version="fast")
