"""Kernels broken on purpose: the trials' judge finds wrong numbers, interpret mode races between warpgroups, and the
recorder those within one.
"""

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

from llmc_jax.trials import numerics, problems
from pallas_kernels import attention, classifier, gelu, mosaic
from tests.pallas_kernels.within_warpgroup import races, recorded


class Mutant(NamedTuple):
    """A function of a kernel with other text, and what is computed with it."""

    owner: Any
    name: str
    old: str
    new: str
    function: str  # of llmc_jax/trials/problems.py
    sizes: list[int]


ATTENTION, T = "attention", 256
SIZES = [1, T, 2, 64]
LAST_TILE = f"(j == {T // attention.ROWS - 1}) & (part.head == p.NH - 1)"
SEEN = "t + (first_row - first_column) >= u"
MEET = "mosaic.meet(barrier)  # the target's column"
WRONG = {
    "dk's sign, in one tile": Mutant(
        attention, "_dkv_kernel", "p, dk * p", f"p, dk * jnp.where({LAST_TILE}, -1, 1) * p", ATTENTION, SIZES
    ),
    "the last row does not look at itself": Mutant(
        attention, "_causal", SEEN, f"({SEEN}) & ~((t + first_row == {T - 1}) & (u + first_column == {T - 1}))",
        ATTENTION, SIZES,
    ),
    "dv of the last row": Mutant(
        attention, "_dkv_kernel", "_store_gradient(p, dv,",
        "_store_gradient(p, dv * jnp.where(mosaic.iota(dv.shape, 0, dot.layout) + j * ROWS == p.T - 1, 0.0, 1.0),",
        ATTENTION, SIZES,
    ),
    "the bias's gradient without a row": Mutant(
        gelu, "_backward_strips", "sums = sums + dx",
        "sums = sums + jnp.where(mosaic.iota(dx.shape, 0, layout) + place[0].start == 31, 0.0, dx)",
        "gelu_backward", [32, 256],
    ),
    "one target of many": Mutant(
        classifier, "_body", "wanted, dloss = targets_ref[i],", "wanted, dloss = (targets_ref[i] + (i == 17)) % 100,",
        "classifier", [32, 100, 128],
    ),
}  # fmt: skip
# What interpret mode says of two warpgroups that do not wait for each other. Where the first fills a slot twice before
# the second waits for it at all, it says so of the barrier, and stops before it looks at the memory.
FOUND = "RACE DETECTED|is waiting at barrier .* for the first time, but barrier is already at phase"
BETWEEN_WARPGROUPS = {
    "a slot is filled before it is released": Mutant(
        attention.Walk, "fetch", "self.p.copies.wait(self.barriers, RELEASED, slot)", "pass", ATTENTION, [1, 512, 1, 64]
    ),
    "the target's column too early": Mutant(classifier, "_body", MEET, "pass  #", "classifier", [1, 8190, 8192]),
}
WITHIN_ONE = {
    "the target's column too early": Mutant(classifier, "_body", MEET, "pass  #", "classifier", [1, 100, 128]),
    "sums before all have written": Mutant(
        mosaic, "store_sums", "values)\n    meet(barrier)", "values)", "gelu_backward", [9, 256]
    ),
}
KERNELS: dict[str, Callable[..., Any]] = {"classifier": classifier.classifier, "gelu_backward": gelu.gelu_backward}


def named(mutants: dict[str, Mutant]) -> list[Any]:
    return [pytest.param(mutant, id=name) for name, mutant in mutants.items()]


def broken(mutant: Mutant, patch: pytest.MonkeyPatch) -> None:
    """Put the changed function where the right one is."""
    right = getattr(mutant.owner, mutant.name)
    text = textwrap.dedent(inspect.getsource(right))
    assert text.count(mutant.old) == 1
    made: dict[str, Any] = {}
    exec(text.replace(mutant.old, mutant.new), right.__globals__, made)
    for owner in (mutant.owner, gelu if mutant.owner is mosaic else mutant.owner):
        if hasattr(owner, mutant.name):
            patch.setattr(owner, mutant.name, made[mutant.name])


def solver(function: str) -> Any:
    """A problem's kernels, traced anew: without their jit, which might know them already."""
    if function == ATTENTION:
        both: tuple[Any, ...] = (attention.attention_forward, attention.attention_backward)
        return tuple(partial(kernel.__wrapped__, interpret=True) for kernel in both)
    kernel: Any = KERNELS[function]
    return partial(kernel.__wrapped__, interpret=True)


def judged(mutant: Mutant) -> list[str]:
    given = problems.problem(mutant.function, "bf16", mutant.sizes, seed=1)
    how: dict[str, Any] = {"promised": True, "interpret": True, "wide": jnp.float64, "rounding": "nearest"}
    return numerics.judged(given, jax.jit(given.bind(solver(mutant.function))), **how)[1]


@pytest.mark.slow
@pytest.mark.parametrize("function", [ATTENTION, *KERNELS])
def test_right_numbers(function: str) -> None:
    """As they are, the same kernels are right at the same sizes."""
    assert not judged(next(mutant for mutant in WRONG.values() if mutant.function == function))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", named(WRONG))
def test_wrong_numbers(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(mutant, monkeypatch)
    assert judged(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", named(BETWEEN_WARPGROUPS))
def test_races_between_warpgroups(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(mutant, monkeypatch)
    try:
        with pytest.raises(Exception, match=FOUND):
            judged(mutant)
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", named(WITHIN_ONE))
def test_races_within_a_warpgroup(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which interpret mode does not see: the numbers are right."""
    broken(mutant, monkeypatch)
    with recorded() as log:
        assert not judged(mutant)
    assert any(map(races, log.values()))
