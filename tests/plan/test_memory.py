"""A step's memory by kind: computed beside what the compiler says of the same step, and whether it fits."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.machine.cards import CARDS
from llmc_jax.plan import compiled, memory
from llmc_jax.plan.memory import CPU, KINDS, Memory, Part, computed
from llmc_jax.plan.moments import largest_moment

GIB = 2**30


# What the compiler said of steps on many GPUs: benchmarks/plan_memory.py.
RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks/results/plan_memory.json").read_text())
# The arrays of the same programs at the moment that needs most, counted by kind out of XLA's buffer assignment.
KINDS_OF_ARRAYS = json.loads(Path(__file__).with_name("compiled_kinds.json").read_text())


def computed_of(row: dict[str, Any]) -> Memory:
    """What is computed of a step that was compiled before there were products of ours."""
    return computed(compiled.plan_for(row["gpu"], f"{row['flags']} --products xla"))


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['gpu']} {row['flags']}")
def test_computed_is_what_the_compiler_says(row: dict[str, Any]) -> None:
    found = computed_of(row)
    assert found.program == pytest.approx(row["program"], rel=0.1)
    assert set(found.kinds) == set(KINDS) and found.unexplained == 0


@pytest.mark.parametrize("row", KINDS_OF_ARRAYS, ids=lambda row: f"{row['gpu']} {row['flags']}")
def test_computed_kinds_are_those_of_the_compiled_arrays(row: dict[str, Any]) -> None:
    found = computed_of(row)
    for kind in ("optimizer", "batch"):  # of the state nothing is estimated
        assert found.kinds[kind] == pytest.approx(row["kinds"][kind], rel=0.01, abs=10_000)
    for kind in ("parameters", "activations", "logits"):
        assert found.kinds[kind] == pytest.approx(row["kinds"][kind], abs=0.03 * found.program), kind


def test_and_mostly_much_nearer() -> None:
    errors = [abs(computed_of(row).program / row["program"] - 1) for row in RECORDED if row["held_out"]]
    assert statistics.median(errors) < 0.03


OF_LENGTH = "-e L4-NH4-C128-V257-T512 -b 8 -t 512"
ON_A_CPU = {
    OF_LENGTH: "last layer",  # activations are most of it
    "-e L4-NH4-C128-T128 -b 8 -t 128 --logit-rows 128": "head",
    "-e L4-NH4-C512-V257-T64 -b 1 -t 64": "gradient",
    f"{OF_LENGTH} -r 0": "head",
    f"{OF_LENGTH} -r 2": "last layer",
    f"{OF_LENGTH} -d 16384": "last layer",
    f"{OF_LENGTH} --recompute-blocks 1": "last layer",
    f"{OF_LENGTH} --recompute-blocks 2": "last layer",  # those of two blocks at a time
    "-e L4-NH4-C512-V257-T64 -b 1 -t 64 --optimizer muon": "update",
    "-e d12 -b 2 -t 256": "head",
}
QUICK = list(ON_A_CPU)[:1]  # the compiler's word on processors is recorded too
FARTHER = ["-e d12 -b 2 -t 256"]  # the plan is 11 % below


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("flags", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow)
                                   for each in ON_A_CPU])  # fmt: skip
def test_a_processor_s_program_within_five_percent(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the compiler's total is split as computed."""
    plan = compiled.plan_for(CPU, flags)
    found, program = computed(plan), compiled.compile_step(plan, CPU)
    compilers = program.memory
    monkeypatch.setattr(compiled, "compile_step", lambda *_: program)
    by_compiler = memory.compiled(plan, CPU)
    assert by_compiler == found._replace(source="compiled", unexplained=compilers.total - found.program)
    assert by_compiler.program == compilers.total
    assert found.moment == ON_A_CPU[flags]
    assert found.program == pytest.approx(compilers.total, rel=0.05)
    _, needed = largest_moment(plan)
    assert needed.total() == pytest.approx(compilers.temporaries, rel=0.12 if flags in FARTHER else 0.05)


def memory_of(program: int, available: int | None, card: int | None = None, beside: int = 0) -> Memory:
    kinds = dict.fromkeys(KINDS, 0) | {"parameters": program}
    return Memory("computed", "head", kinds, 0, (Part("context", beside, "a guess"),), available, card)


def test_what_fits() -> None:
    assert memory_of(10, 10).fits and not memory_of(11, 10).fits
    assert memory_of(10, 10).spare == 0 and memory_of(11, 10).spare == -1
    assert memory_of(10, None).fits is None and memory_of(10, None).spare is None


def test_what_is_beside_the_program_must_fit_beside_the_allocator_s_share() -> None:
    assert memory_of(5, 90, 100, beside=10).fits
    assert not memory_of(5, 90, 100, beside=11).fits
    assert memory_of(5, 90, 100, beside=11).total == 16


def test_available_is_the_allocator_s_share_of_the_card_where_nothing_else_is_given() -> None:
    plan = compiled.plan_for("h100", "-e d12 -b 4")
    assert computed(plan).available == int(0.92 * CARDS[plan.machine.kind].memory)
    assert computed(plan._replace(available=7 * GIB)).available == 7 * GIB


def test_beside_the_program_are_the_context_and_between_gpus_nccl() -> None:
    one = computed(compiled.plan_for("h100", "-e d12 -b 4"))
    several = computed(compiled.plan_for("h100", "-e d12 -b 4 --devices 8"))
    assert [part.bytes for part in one.outside] == [3 * 132 * 2**20] and all(part.source for part in several.outside)
    assert several.outside[0] == one.outside[0] and 500e6 < several.outside[1].bytes < 1.6e9
    assert one.total == one.program + one.beside and one.fits
    assert computed(compiled.plan_for(CPU, "-e d6")).outside == ()
