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
from llmc_jax.machine.gpus import machine_of
from llmc_jax.plan.fits import DoesNotFit, check_fits, check_program, smaller_batch
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan, Repeat, make_plan
from llmc_jax.plan.search import sizes as sizes_of

GIB = 2**30
CPU, RTX_4090, H200 = Machine("cpu", "cpu"), machine_of("NVIDIA GeForce RTX 4090"), machine_of("NVIDIA H200")


def planned(words: str, machine: Machine = CPU, memory: int | None = None) -> Plan:
    config = parse_args(words.split())
    return make_plan(config, parse_descriptor(config.model), machine, memory=memory)


def refused(words: str, machine: Machine, memory: int) -> str:
    with pytest.raises(DoesNotFit) as caught:
        check_fits(planned(words, machine, memory))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_refusal_says_the_flags_as_one_types_them() -> None:
    plan = planned("-e d12 -b 512 -t 1024")
    assert f" -b {smaller_batch(plan, int(0.75 * 24 * GIB))} -d 524288 fits" in refused(
        "-e d12 -b 512 -t 1024", CPU, 24 * GIB
    )


def test_what_a_step_needs_at_least_decides() -> None:
    need = planned("-e d12 -b 4 -t 64").needed.total
    check_fits(planned("-e d12 -b 4 -t 64", memory=need))
    check_fits(planned("-e d48 -b 512 -t 1024"))  # nothing says how much there is
    with pytest.raises(DoesNotFit):
        check_fits(planned("-e d12 -b 4 -t 64", memory=need - 1))


def test_a_refusal_has_what_is_needed() -> None:
    message = refused("-e gpt3:c12288 -b 4 -t 64", CPU, 24 * GIB)
    assert f"{20 * 174_604_836_864 / GIB:,.1f} GiB" in message  # the state alone: 3,252.3 GiB
    assert "174,604,836,864 parameters" in message and "has 24.0 GiB" in message and "by estimate" not in message


@pytest.mark.parametrize(
    ("words", "machine", "memory"),
    [
        ("-e d12 -b 512 -t 1024", CPU, 24 * GIB),
        ("-e d24 -b 64 -t 1024 -d 1048576 --devices 8", RTX_4090, 22 * GIB),
        ("-e d48 -b 96 -t 1024 -d 786432 -r 0", H200, 60 * GIB),
        ("-e d12 -b 256 -t 1024 --devices 2 -z 1 --reduction fixed", RTX_4090, 12 * GIB),
    ],
)
def test_what_is_offered_fits_and_no_larger_batch_does(words: str, machine: Machine, memory: int) -> None:
    plan = planned(words, machine)
    size, tokens = smaller_batch(plan, memory), plan.config.tokens_per_step
    assert size is not None
    config = replace(plan.config, batch_size=size, total_batch_size=tokens)
    validate(config)
    assert config.tokens_per_step == tokens
    assert computed(make_plan(config, plan.model, machine)).program <= memory
    for more in (each for each in sizes_of(config) if size < each < plan.config.batch_size):
        larger = make_plan(replace(config, batch_size=more), plan.model, machine)
        assert computed(larger).program > min(memory, 0.9 * computed(plan).program)


def test_a_run_that_goes_on_keeps_its_batch() -> None:
    plan = planned("-e d12 -b 32 -t 1024 -y 1 -o run", RTX_4090)
    assert smaller_batch(plan, 8 * GIB)
    assert smaller_batch(plan._replace(repeat=Repeat(Path("run"), plan.resolved)), 8 * GIB) is None


@given(st.integers(1, 64), st.sampled_from([64, 256]), st.integers(1, 40), st.sampled_from([CPU, RTX_4090, H200]))
def test_where_a_smaller_batch_fits_one_is_offered(batch: int, length: int, gib: int, machine: Machine) -> None:
    plan = planned(f"-e d12 -b {batch} -t {length}", machine)
    one = planned(f"-e d12 -b 1 -t {length} -d {batch * length}", machine)
    fits = computed(one).program <= min(gib * GIB, 0.9 * computed(plan).program)
    assert batch == 1 or not fits or smaller_batch(plan, gib * GIB)


def test_what_the_compiler_says_scales_the_estimates() -> None:
    plan = planned("-e d12 -b 64 -t 1024 -r 2", RTX_4090, 20 * GIB)
    least = computed(plan).program
    check_program(plan, 20 * GIB)
    batches = []
    for taken in (int(1.01 * least), 2 * least, 4 * least):
        with pytest.raises(DoesNotFit, match=r" -b (\d+) -d 65536 fits") as caught:
            check_program(plan, max(taken, 20 * GIB + 1))
        batches.append(int(str(caught.value).partition(" estimate -b ")[2].split()[0]))
    assert batches == sorted(batches, reverse=True) and batches[0] > batches[-1]
