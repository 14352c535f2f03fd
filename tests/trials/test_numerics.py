"""llmc_jax/trials/numerics.py finds what is wrong, and accepts what is right."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import numerics as measured
from benchmarks.gpu import solvers
from llmc_jax.ops import attention
from llmc_jax.trials import numerics, problems
from llmc_jax.trials.children import FREE, OTHER


def _one_element(out: jax.Array) -> jax.Array:
    return out.at[3, 5].add(0.2)


SPOILT: dict[str, Callable[[jax.Array], jax.Array]] = {
    "zero": jnp.zeros_like,
    "shifted": lambda out: jnp.roll(out, 1, axis=0),
    "mirrored": lambda out: out[:, ::-1],
    "one element": _one_element,
    "not written": lambda out: out.at[-1, -1].set(jnp.nan),
    "one percent": lambda out: out * jnp.asarray(1.01, out.dtype),
}


def _measure(monkeypatch: pytest.MonkeyPatch, function: str, sizes: list[int], spoil: Callable[..., Any]) -> str:
    solver = solvers.implementation(function, "naive" if function == "attention" else "xla")
    spoiled = solver[1] if function == "attention" else solver  # of attention the backward

    def spoilt(*arguments: Any) -> Any:
        first, *rest = spoiled(*arguments)
        return (spoil(first), *rest)

    given = (solver[0], spoilt) if function == "attention" else spoilt
    with monkeypatch.context() as patch:
        real = solvers.implementation
        patch.setattr(
            solvers, "implementation", lambda name, which="", **more: given if which == "pallas" else real(name, which)
        )
        return str(measured.measure(function, "bf16", sizes, interpret=True)["verdict"])


@pytest.mark.slow
@pytest.mark.parametrize("what", SPOILT)
def test_numerics_find(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = _measure(monkeypatch, "layernorm_forward", [64, 256], SPOILT[what])
    assert verdict.startswith("WRONG: output 0")


@pytest.mark.slow
def test_numerics_accept_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for function, sizes in (("layernorm_forward", [64, 256]), ("classifier", [8, 250, 256])):
        assert _measure(monkeypatch, function, sizes, lambda out: out) == "right"


@pytest.mark.slow
@pytest.mark.parametrize("what", [None, "zero", "shifted", "one percent"])
def test_numerics_of_attention(what: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil = SPOILT[what] if what else lambda out: out
    verdict = _measure(monkeypatch, "attention", [2, 48, 2, 16], lambda dqkv: spoil(dqkv[0])[None].repeat(2, 0)
                       if what else dqkv)  # fmt: skip
    assert verdict.startswith("WRONG: output 1") if what else verdict == "right"


@pytest.mark.slow
@pytest.mark.parametrize("third", ["k", "v"])
def test_numerics_of_the_last_row_of_attention(third: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that one query alone makes, 9 % too large: beside the whole row it would be within the tolerance."""
    C = 32
    here = slice(C, 2 * C) if third == "k" else slice(2 * C, 3 * C)
    verdict = _measure(monkeypatch, "attention", [2, 48, 2, 16], lambda dqkv: dqkv.at[:, -1, here].multiply(1.09))
    assert verdict.startswith("WRONG: output 1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, sizes", [("gelu_backward", [3, 300]), ("global_norm", [2**13]), ("layernorm_backward", [2, 4224])]
)
def test_numerics_of_kernels_in_interpret_mode(function: str, sizes: list[int]) -> None:
    assert measured.measure(function, "bf16", sizes, interpret=True)["verdict"] == "right"


@pytest.mark.slow
@pytest.mark.parametrize("left_out, right", [(0, True), (1, False)])
def test_a_sum_may_be_of_rounded_terms_but_of_all(left_out: int, right: bool) -> None:
    """A row too long to add up while it is held is summed as it was rounded; one of 4,000 rows is still missed."""
    given = problems.problem("layernorm_backward", "bf16", [4000, 32], 1)

    def solver(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        dx, dw, db, _ = problems.plain_twin("layernorm_backward")(*arrays)
        return dx, dw, db, jnp.sum(dx[left_out:], axis=0, dtype=jnp.float32)

    run = jax.jit(given.bind(solver))
    _, wrong = numerics.judged(given, run, promised=False, interpret=True, wide=jnp.float64, rounding="nearest")
    assert [each.partition(":")[0] for each in wrong] == ([] if right else ["output 3"])


# ----- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, bits, verdict",
    [
        ("pallas", OTHER, "WRONG: the same inputs gave different bits"),
        ("xla", FREE, "right"),  # promises none
    ],
)
def test_bits_that_move(name: str, bits: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose third call differs in one bit is wrong if it has promised the same ones."""
    real, calls = solvers.implementation("gelu_forward", "xla"), []

    def moving(x: jax.Array) -> jax.Array:
        def last_bit(out: Any) -> Any:
            calls.append(None)
            bits = np.array(out).view(np.uint16)
            bits[0, 0] ^= len(calls) == 3
            return bits.view(jnp.bfloat16)

        out = real(x)
        return jax.pure_callback(last_bit, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

    monkeypatch.setattr(solvers, "implementation", lambda *_, **more: moving if more else real)
    monkeypatch.setattr(numerics, "POISON", 2**10)
    found = measured.measure("gelu_forward", "bf16", [16, 32], name)
    assert (found["bits"], found["verdict"]) == (bits, verdict)
    assert len(calls) == (3 if name == "pallas" else 1)


def test_who_promises_bits() -> None:
    """The field of the implementation says it: of every kernel of ours, of nothing that may sum in any order."""
    for function in solvers.FUNCTIONS:
        flash = "attention" in function
        for name in ("wgmma", "mma", "pallas") if flash else ("pallas",):
            assert solvers.repeats_bits(function, name)
        for name in ("cudnn", "naive") if flash else ("xla",):
            assert not solvers.repeats_bits(function, name)


# ----- the answer, in parts: errors of a whole are those of its parts together ---------------------------------------


@pytest.mark.slow
def test_attention_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few rows at a time: values and gradients in float64 as with the whole matrix."""
    monkeypatch.setattr(problems, "SCORES", 2 * 2 * 12 * 3)  # three rows at a time
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        qkv, dout = (jnp.asarray(rng.standard_normal((2, 12, width))) for width in (48, 16))
        out, att = attention.attention_forward(qkv, 2)
        wanted = [out, *attention.attention_backward(dout, qkv, out, att, 2)]
        out, _ = problems.by_blocks_forward(qkv, 2)
        found = [out, *problems.by_blocks_backward(dout, qkv, out, None, 2)]
        assert "length=4" in str(jax.make_jaxpr(problems.by_blocks_forward, static_argnums=1)(qkv, 2))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


PART_SIZES: dict[str, list[int]] = {
    "layernorm_forward": [10, 16], "layernorm_backward": [10, 16], "residual_layernorm_forward": [10, 16],
    "residual_layernorm_backward": [10, 16], "gelu_forward": [10, 16], "gelu_backward": [10, 16],
    "classifier": [10, 20, 24], "attention": [3, 8, 2, 4], "relu_attention": [3, 8, 2, 4],
    "softmax_forward": [3, 2, 8], "softmax_backward": [3, 2, 8],
}  # fmt: skip


QUICK = ("layernorm_forward", "layernorm_backward")  # rows, and sums over them; the others take seconds together


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PART_SIZES]
)
def test_parts_give_the_whole(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors of something wrong, with one part and with several; every output is compared."""
    given = problems.problem(function, "bf16", PART_SIZES[function], 1)
    with jax.enable_x64(True):
        right = problems.expected(given)
    found = [output.astype(jnp.float32) + 0.01 * (k + 1) for k, output in enumerate(right)]
    whole = numerics.errors(found, given, jnp.float64)
    assert all(error > 1e-3 and worst > 1e-3 for error, worst in whole)
    monkeypatch.setattr(numerics, "PART", max(array.size for array in given.arrays) // 3)
    with jax.enable_x64(True):
        assert len(list(numerics.parts(given, jnp.float64))) >= 3
    rows = numerics.errors(found, given, jnp.float64)
    np.testing.assert_allclose(np.array(rows), np.array(whole), rtol=1e-6)


@pytest.mark.slow
def test_what_is_not_a_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, in the first part or the last."""
    given = problems.problem("gelu_forward", "bf16", [10, 16], 1)
    monkeypatch.setattr(numerics, "PART", 40)
    with jax.enable_x64(True):
        right: Any = problems.expected(given)[0].astype(jnp.float32)
    for row in (0, 9):
        ((error, worst),) = numerics.errors([right.at[row, 3].set(jnp.nan)], given, jnp.float64)
        assert np.isnan(error) and np.isnan(worst)
