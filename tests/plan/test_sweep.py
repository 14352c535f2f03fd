"""Sweeps along an option and over GPUs: which configurations they are, and their table."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.plan.answer import Wishes
from llmc_jax.plan.sweep import Row, fitted, parse_sweep, rows_table, swept

ASKED = TrainConfig(
    model="d6", batch_size=8, sequence_length=256, total_batch_size=2**15, devices=4, recompute=0, max_steps=1000
)


def rows_of(text: str, config: TrainConfig = ASKED, gpu: str = "h100", wanted: Wishes | None = None) -> tuple[Row, ...]:
    return swept(config, gpu, parse_sweep(text), wanted or Wishes())


def test_a_row_is_what_the_planner_says() -> None:
    """More recomputing takes less memory and more time; more GPUs, less time for the same updates."""
    levels = [row.answer for row in rows_of("r=0,1,2") if row.answer]
    sizes, times = [each.memory.program for each in levels], [each.step.seconds.typical for each in levels]
    assert len(levels) == 3 and sizes == sorted(sizes, reverse=True) and times == sorted(times)
    counts = [row.answer for row in rows_of("devices=1,2,4") if row.answer]
    times = [each.step.seconds.typical for each in counts]
    assert times == sorted(times, reverse=True) and [each.setting.devices for each in counts] == [1, 2, 4]
    lengths = {each.course.length for each in counts if each.course}
    assert len(lengths) == 1


def test_a_price_of_ones_own_is_that_of_the_asked_gpu_alone() -> None:
    found = rows_of("gpu=h100,a100", gpu="NVIDIA H100 80GB HBM3", wanted=Wishes(price=10.0))
    prices = [row.answer.course.price for row in found if row.answer and row.answer.course]
    assert [price and price.provider == "--price" for price in prices] == [True, False]


@given(
    batch=st.integers(1, 70), sequence=st.sampled_from([64, 1000]), devices=st.integers(1, 9), rows=st.integers(1, 200)
)
def test_the_batch_is_lowered_to_what_the_update_allows(batch: int, sequence: int, devices: int, rows: int) -> None:
    config = replace(
        ASKED, batch_size=batch, sequence_length=sequence, devices=devices, total_batch_size=rows * sequence * devices
    )
    found = fitted(config).batch_size
    assert rows % found == 0 and found <= batch
    assert all(rows % size for size in range(found + 1, batch + 1))
    assert fitted(config, "batch_size") == config
    assert fitted(replace(config, total_batch_size=-1)).batch_size == batch


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("devices=1,2,4", "devices", ("1", "2", "4")),
        ("gpu=h100,a100", "gpu", ("h100", "a100")),
        ("b=8, 16,8", "batch_size", ("8", "16")),
        ("--batch-size=8", "batch_size", ("8",)),
        ("z=0,1,2", "zero_stage", ("0", "1", "2")),
        ("dtype=fp32,bf16", "dtype", ("fp32", "bf16")),
    ],
)
def test_a_sweep_names_an_option_as_its_flags_do(text: str, name: str, values: tuple[str, ...]) -> None:
    found, read = parse_sweep(text)
    assert (found, tuple(read)) == (name, values)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected an option"),
        ("devices=", "expected an option"),
        ("nothing=1", "no such option"),
        ("b=8,x", "x"),
        ("b=0", "0"),
        ("dtype=int8", "int8"),
        ("b=" + ",".join(map(str, range(1, 70))), "at most 64"),
    ],
)
def test_a_sweep_that_is_none_is_refused_in_a_line(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_sweep(text)
    assert said in str(error.value) and "\n" not in str(error.value)


@settings(max_examples=40)
@given(st.text(alphabet="=,-bgpu devics0123", max_size=20))
def test_any_text_is_a_sweep_or_refused(text: str) -> None:
    try:
        found = parse_sweep(text)
    except InputError:
        return
    assert found[0] and all(found[1])


def test_a_value_that_cannot_be_is_a_row_that_says_why() -> None:
    found = rows_of("b=4,3,100000000")
    assert [row.answer is None for row in found] == [bool(row.problem) for row in found] == [False, True, True]
    assert all("\n" not in row.problem for row in found)
    assert [row.problem == "" for row in rows_of("gpu=a100,h1000")] == [True, False]
    shown = rows_table("b", found, 200)
    assert shown.count("cannot be") == 2 and all(row.problem in " ".join(shown.split()) for row in found)


def test_auto_is_the_largest_of_each_row() -> None:
    auto = replace(ASKED, batch_size=AUTO_BATCH, total_batch_size=16 * ASKED.sequence_length)
    found = rows_of("devices=1,2,4", auto)
    assert [row.answer and row.answer.setting.batch_size for row in found] == [16, 8, 4]
