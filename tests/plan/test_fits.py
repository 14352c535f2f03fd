"""Whether a step fits, and what is offered where it does not."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.config.checks import validate
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.kernels import Machine
from llmc_jax.machine.target import machine_of
from llmc_jax.plan.fits import DoesNotFit, Remedy, check_fits, check_program, remedies
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan, Repeat, make_plan
from llmc_jax.plan.search import sizes as sizes_of

GIB = 2**30
CPU, RTX_4090, H200 = Machine("cpu", "cpu"), machine_of("NVIDIA GeForce RTX 4090"), machine_of("NVIDIA H200")


def planned(words: str, machine: Machine = CPU, memory: int | None = None) -> Plan:
    config = parse_args(words.split())
    return make_plan(config, parse_descriptor(config.model), machine, memory=memory)


def refused(words: str, machine: Machine, memory: int) -> tuple[str, tuple[Remedy, ...]]:
    with pytest.raises(DoesNotFit) as caught:
        check_fits(planned(words, machine, memory))
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.remedies


def test_a_refusal_says_the_flags_as_one_types_them() -> None:
    message, found = refused("-e d12 -b 512 -t 1024", CPU, 24 * GIB)
    assert f": -b {found[0]['batch_size']} -d 524288, or " in message


def test_what_a_step_needs_at_least_decides() -> None:
    need = planned("-e d12 -b 4 -t 64").needed.total
    check_fits(planned("-e d12 -b 4 -t 64", memory=need))
    check_fits(planned("-e d48 -b 512 -t 1024"))  # nothing says how much there is
    with pytest.raises(DoesNotFit):
        check_fits(planned("-e d12 -b 4 -t 64", memory=need - 1))


def test_a_refusal_has_what_is_needed() -> None:
    message, found = refused("-e gpt3:c12288 -b 4 -t 64", CPU, 24 * GIB)
    assert f"{20 * 174_604_836_864 / GIB:,.1f} GiB" in message  # the state alone: 3,252.3 GiB
    assert "174,604,836,864 parameters" in message and "has 24.0 GiB" in message
    assert found == () and "; lower -b or -t, or take a smaller model; " in message


@pytest.mark.parametrize(
    ("words", "machine", "memory"),
    [
        ("-e d12 -b 512 -t 1024", CPU, 24 * GIB),
        ("-e d24 -b 64 -t 1024 -d 1048576 --devices 8", RTX_4090, 22 * GIB),
        ("-e d48 -b 96 -t 1024 -d 786432 -r 0", H200, 60 * GIB),
        ("-e d24 -b 96 -t 1024 -ge 1 -r 0", RTX_4090, 22 * GIB),  # which does not go with -r 1
        ("-e d12 -b 256 -t 1024 --devices 2 -z 1 --reduction fixed", RTX_4090, 12 * GIB),
    ],
)
def test_what_is_offered_fits_and_no_larger_batch_does(words: str, machine: Machine, memory: int) -> None:
    plan = planned(words, machine)
    found = remedies(plan, memory)
    tokens, sizes = plan.config.tokens_per_step, list[int]()
    for remedy in found:
        config = replace(parse_args(words.split()), **remedy)
        validate(config)
        assert config.tokens_per_step == tokens
        assert computed(make_plan(config, plan.model, machine)).program <= memory
        sizes.append(config.batch_size)
        for more in (
            each
            for each in sizes_of(replace(config, total_batch_size=tokens))
            if config.batch_size < each <= plan.config.batch_size
        ):
            larger = make_plan(replace(config, batch_size=more), plan.model, machine)
            assert computed(larger).program > min(memory, 0.9 * computed(plan).program)
    # what takes more work or exchange is offered for a larger batch alone
    alone = [each.keys() <= {"batch_size", "total_batch_size"} for each in found]
    assert alone[0] and not any(alone[1:]) and all(size > sizes[0] for size in sizes[1:])


def test_a_run_that_goes_on_is_offered_what_keeps_its_batch() -> None:
    plan = planned("-e d12 -b 32 -t 1024 -y 1 -o run", RTX_4090)
    assert "batch_size" in remedies(plan, 8 * GIB)[0]
    again = plan._replace(repeat=Repeat(Path("run"), plan.resolved))
    assert remedies(again, 8 * GIB) == ({"recompute_blocks": 1},)


def test_no_larger_model_is_offered_where_the_memory_was_full_all_the_same() -> None:
    plan = planned("-e L1-NH1-C16-V257-T16 -b 1 -t 16")
    assert remedies(plan, 24 * GIB) == ()


@given(st.integers(1, 64), st.sampled_from([64, 256]), st.integers(1, 40), st.sampled_from([CPU, RTX_4090, H200]))
def test_where_a_smaller_batch_fits_one_is_offered(batch: int, length: int, gib: int, machine: Machine) -> None:
    plan = planned(f"-e d12 -b {batch} -t {length}", machine)
    one = planned(f"-e d12 -b 1 -t {length} -d {batch * length}", machine)
    found = remedies(plan, gib * GIB)
    if batch > 1 and computed(one).program <= min(gib * GIB, 0.9 * computed(plan).program):
        assert "batch_size" in found[0]


def test_what_the_compiler_says_scales_the_estimates() -> None:
    plan = planned("-e d12 -b 64 -t 1024 -r 2", RTX_4090, 20 * GIB)
    least = computed(plan).program
    check_program(plan, 20 * GIB)
    batches = []
    for taken in (int(1.01 * least), 2 * least, 4 * least):
        with pytest.raises(DoesNotFit) as caught:
            check_program(plan, max(taken, 20 * GIB + 1))
        batches.append(next(each["batch_size"] for each in caught.value.remedies))
    assert batches == sorted(batches, reverse=True) and batches[0] > batches[-1]
