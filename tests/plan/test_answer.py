"""The answer as a whole: what was asked reaches its parts, and its report fits the screen."""

import json
from typing import Any

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import Interval
from llmc_jax.config.train import TrainConfig
from llmc_jax.library import estimate
from llmc_jax.machine import cards, gpus
from llmc_jax.machine.device import Device
from llmc_jax.machine.gpus import machine_of
from llmc_jax.plan import answer as answers
from llmc_jax.plan import compiled
from llmc_jax.plan import time as times
from llmc_jax.plan.answer import Answer, as_json
from llmc_jax.plan.asked import asked_config, checked_model
from llmc_jax.plan.memory import KINDS, Memory, computed
from llmc_jax.plan.network import network_of
from llmc_jax.plan.report import amount, as_text, spread, three
from tests.plan.test_cpu import known

D12 = "-e d12 -b 64 -d 524288"


def planned(flags: str, gpu: str, network: float | None = None) -> Answer:
    """Return the answer without a search for the largest -b."""
    return answers.answer(asked_config(flags), gpu, answers.Wishes(network=network), largest=False)


@pytest.fixture(scope="module")
def eight() -> Answer:
    return estimate(f"{D12} -z 1 -x 1000", gpu="h100", devices=8, price=2.5)


def test_what_was_asked_reaches_every_part(eight: Answer) -> None:
    setting, step, course = eight.setting, eight.step, eight.course
    assert (setting.devices, setting.zero_stage, setting.micro_batches, setting.dtype) == (8, 1, 1, "bf16")
    assert eight.place.name == "h100" and step.kind == eight.place.machine.kind == "NVIDIA H100 80GB HBM3"
    assert step.tokens == setting.tokens == 524288 and step.exchanges
    assert set(eight.memory.kinds) == set(KINDS) and eight.memory.available == eight.place.available
    assert course is not None and course.length.steps == 1000 and course.price is not None
    assert course.usd is not None and course.usd.typical == pytest.approx(2.5 * course.gpu_hours.typical)


def test_the_largest_are_the_largest(eight: Answer) -> None:
    """A larger -b of the same updates would not fit, or there is none."""
    found = estimate("-e d24 -d 524288", gpu="a100-40")
    assert len(found.largest) == 6 and sum(row.fastest for row in found.largest) == 1
    for row in found.largest:
        flags = f"-e d24 -d 524288 -r {row.recompute} --recompute-blocks {row.recompute_blocks}"
        assert row.batch_size is not None and row.program is not None and found.place.available is not None
        assert row.program <= found.place.available
        assert not planned(f"{flags} -b {2 * row.batch_size}", "a100-40").memory.fits
    assert {row.zero_stage for row in eight.largest} == {0, 1, 2}


def test_a_slower_network_between_machines_costs_time(eight: Answer) -> None:
    times = [planned(f"{D12} -d 1048576 --devices 16", "h100", gbit).step.seconds.typical for gbit in (10, 400)]
    assert times[0] > times[1]
    slow = planned(f"{D12} -z 1 --devices 8", "h100", 10).network
    assert slow is not None and slow.between == 10e9 / 8 and planned(D12, "h100").network is None
    assert planned(f"{D12} -z 1 --devices 8", "h100", 1).step.seconds == eight.step.seconds  # one machine


def test_data_that_nobody_named_says_nothing_of_a_runs_length() -> None:
    assert estimate(D12, gpu="h100").course is None
    by_tokens = estimate(D12, gpu="h100", tokens=1e9).course
    assert by_tokens is not None and (by_tokens.length.steps, by_tokens.length.source) == (1907, "--tokens")
    named = estimate("--preset gpt2-124M", gpu="h100", devices=8).course
    assert named is not None and (named.length.steps, named.length.source) == (19560, "published")


def test_what_is_beside_a_compiled_program_is_of_the_card_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiler(monkeypatch)
    found, known = (estimate(D12, gpu="rtx4090", devices=2, quick=quick) for quick in (False, True))
    assert found.memory.source == "compiled" and found.memory.outside == known.memory.outside


def test_b_auto_is_the_largest_that_fits() -> None:
    found = estimate("-e d24 -b auto -d 524288", gpu="a100-40")
    here = next(row for row in found.largest if row[:3] == (1, 0, 0))
    assert found.setting.batch_size == here.batch_size and found.setting.auto_batch and found.memory.fits
    none = estimate("-e d48 -b auto -d 524288", gpu="rtx4090")
    assert none.setting.batch_size == 1 and not none.memory.fits


def test_a_configuration_will_do_for_flags() -> None:
    config = TrainConfig(model="d12", batch_size=64, total_batch_size=524288)
    assert estimate(config, gpu="h100").setting == estimate(D12, gpu="h100").setting


@pytest.mark.parametrize("devices", [3, 300])
def test_devices_that_an_update_cannot_be_shared_by_are_refused(devices: int) -> None:
    with pytest.raises(InputError):
        estimate(D12, gpu="h100", devices=devices)


# ----- the device at hand ---------------------------------------------------------------------------------------------


def test_a_cpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices share its memory and its cores."""
    for module in (times, answers):
        monkeypatch.setattr(module, "calibration", lambda *asked: known())
    one, two = (estimate(f"-e L2-NH2-C64 -b 2 -t 64 -d 256 --devices {n}") for n in (1, 2))
    assert one.place.name is None and one.step.measured and one.step.mfu() is None
    assert one.memory.available is not None and two.memory.available == one.memory.available // 2
    assert two.step.seconds.typical > one.step.seconds.typical
    assert one.place.machine.kind in as_text(one, operations=True, width=80)


def test_several_devices_of_a_cpu_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "compiled_apart", lambda *asked: pytest.fail("it is"))
    config = asked_config("-e L2-NH2-C64 -t 64 --devices 2")
    asked = answers.Planner(checked_model(config), answers.place_of(None), network_of("cpu"))
    with pytest.raises(InputError):
        asked.compiled(config)


# ----- compiled -------------------------------------------------------------------------------------------------------

LONG = "-e d24 -b 4"


def with_compiler(monkeypatch: pytest.MonkeyPatch, more: int = 0) -> list[tuple[str, int]]:
    """Let the compiler find so many bytes more than is computed; return the GPU and -b that it is asked for."""
    asked: list[tuple[str, int]] = []

    def found(gpu: str, config: TrainConfig, model: Any, say: object) -> Memory:
        asked.append((gpu, config.batch_size))
        kinds = computed(compiled.plan_for(gpu, config, model)).kinds
        return Memory("compiled", "", kinds, more, (), None, None)

    monkeypatch.setattr(answers, "compiled_apart", found)
    return asked


def test_the_compiler_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    by_shape = estimate(LONG, gpu="a100-40")
    asked = with_compiler(monkeypatch, 5)
    found = estimate(LONG, gpu="a100-40", quick=False)
    assert found.memory == by_shape.memory._replace(source="compiled", moment="", unexplained=5)
    assert (found.largest, asked) == (by_shape.largest, [("a100-40", 4)])


def test_without_a_compiler_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "compiled_apart", without_compiler)
    found = estimate(LONG, gpu="a100-40", quick=False)
    assert found.memory == estimate(LONG, gpu="a100-40").memory and found.memory.source == "computed"
    assert any("none is here" in line for line in found.not_known)


def without_compiler(*asked: object) -> Memory:
    raise InputError("none is here")


# ----- the device at hand ---------------------------------------------------------------------------------------------


def gpu_here(monkeypatch: pytest.MonkeyPatch, kind: str, memory: int) -> None:
    """Let the device at hand be a GPU, of whose memory JAX may take so many bytes."""
    device = Device("gpu", kind, 2, memory, 8, "Linux")
    monkeypatch.setattr(answers, "configure", lambda: None)
    monkeypatch.setattr(answers, "describe_device", lambda: device)
    monkeypatch.setattr(answers, "this_machine", lambda: machine_of(kind))


def test_a_gpu_at_hand_is_planned_as_one_that_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = estimate(D12, gpu="h100", devices=2)
    gpu_here(monkeypatch, elsewhere.place.machine.kind, elsewhere.place.available or 0)
    found = estimate(D12)
    assert found.memory == elsewhere.memory and found.memory.fits
    assert found.step == elsewhere.step and found.largest == elsewhere.largest


def test_and_its_program_is_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_here(monkeypatch, "NVIDIA H100 80GB HBM3", 70 << 30)
    asked = with_compiler(monkeypatch)
    estimate(D12, quick=False)
    assert asked == [("h100", 64)]


def test_a_gpu_at_hand_that_no_compiler_knows_elsewhere_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = next(kind for kind in gpus.GPUS if cards.name_of(kind) is None)
    gpu_here(monkeypatch, kind, 30 << 30)
    found = estimate("-e d12 -b 4 --dtype fp16", quick=False)
    assert found.memory.source == "computed" and any(kind in line for line in found.not_known)
    assert found.memory.fits  # of the rest of a card that is not known nothing is asked


# ----- as text and JSON -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("flags", "gpu"),
    [(f"{D12} -z 2 --devices 8 -x 9", "h100"), ("-e d48 -b 4", "rtx4090"), ("--preset llmc-cpu", "b200")],
)
def test_the_report_fits_the_screen(flags: str, gpu: str, width: int) -> None:
    found = estimate(flags, gpu=gpu)
    report = as_text(found, operations=True, width=width)
    assert max(map(len, report.splitlines())) <= width
    assert found.place.machine.kind in report
    assert all(f"\n{kind} " in report for kind, size in found.memory.kinds.items() if size)
    assert all(f" {each.operation} " in report for each in found.step.operations)


def test_json_holds_what_the_parts_compute(eight: Answer) -> None:
    found = json.loads(json.dumps(as_json(eight)))
    assert found["memory"]["fits"] is True
    assert found["memory"]["program"] == sum(found["memory"]["kinds"].values()) + found["memory"]["unexplained"]
    rates = found["step"]["tokens_per_second"]
    assert rates["typical"] == pytest.approx(524288 / found["step"]["seconds"]["typical"])
    assert rates["low"] < rates["typical"] < rates["high"]
    assert set(found["step"]["mfu"]) == {"llm.c", "palm"} and found["step"]["measured"] is False


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits_that_count(value: float, shown: str) -> None:
    assert three(value) == shown


def test_amounts_and_spreads() -> None:
    assert [amount(value) for value in (7, 512_300, 3.124e6, 1.03e10)] == ["7.00", "512k", "3.12M", "10.3B"]
    assert spread(Interval(0.104, 0.117, 0.134)) == "117 ms (104 to 134)"
    assert spread(Interval(5000, 7200, 9000)) == "2.00 hours (1.39 to 2.50)"
