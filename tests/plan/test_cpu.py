"""The time of a step on a CPU by three measured rates: what each work takes, and how the rates are made of times."""

import json
import math
from pathlib import Path

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import Interval
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.machine.gpus import Machine
from llmc_jax.models.work import Shape, Work, products_flops, step_work
from llmc_jax.plan import cpu
from llmc_jax.plan.cpu import Calibration
from llmc_jax.plan.moments import largest_moment
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.plan.time import StepTime, step_time


def known(flops: float = 1e9, streaming: float = 1e9, computing: float = 1e9) -> Calibration:
    return Calibration("a CPU", 2, "fp32", flops, streaming, computing, Interval(0.9, 1.0, 1.2))


def plan_of(words: str) -> Plan:
    config = parse_args(words.split())
    return make_plan(config, parse_descriptor(config.model), Machine("cpu", "cpu"))


def time_of(words: str, **rates: float) -> StepTime:
    return step_time(plan_of(words), known(**rates))


SMALL = "-e L2-NH2-C64-V500-T64 -b 4 -t 64"


@pytest.mark.parametrize("more", ["", " -r 0", " -r 2", " --recompute-blocks 1", " -d 1024", " --logit-rows 64"])
def test_products_of_a_step_are_all_counted_once(more: str) -> None:
    plan = plan_of(SMALL + more)
    step = step_time(plan, known(streaming=math.inf, computing=math.inf))
    assert step.seconds.typical == pytest.approx(products_flops(plan.model, plan.shape) / 1e9)


@pytest.mark.parametrize(
    ("phase", "operation", "flops", "seconds"),
    [
        ("forward", "fc", 1000, 1000 / 2),  # its bytes are in the rate of products
        ("forward", "attention", 1000, 1000 / 2 + 60 / 5),
        ("backward", "gelu", 0, 60 / 5),
        ("backward", "gradient", 0, 60 / 3),
        ("update", "adamw", 0, 60 / 3),
        ("forward", "weights", 0, 60 / 3),
    ],
)
def test_each_work_has_its_rate(phase: str, operation: str, flops: int, seconds: float) -> None:
    assert known(2, 3, 5).seconds(Work(phase, operation, None, flops, 60)) == pytest.approx(seconds)


def test_what_is_computed_again_takes_its_time() -> None:
    gelu = {r: time_of(f"{SMALL} -r {r}").seconds.typical for r in (0, 1, 2)}
    assert gelu[1] - gelu[0] == pytest.approx(2 * 2 * 4 * 256 * 256 / 1e9, rel=1e-6)  # of two layers n x 4C, both ways
    assert gelu[2] > gelu[1]  # two layernorms, n x C


def test_memory_is_taken_anew_only_where_there_is_much() -> None:
    few, many = (step_time(plan_of(words), known()) for words in (SMALL, "-e d6 -b 2 -t 256"))
    fresh = [
        next(each.seconds.typical for each in step.operations if "fresh" in each.operation) for step in (few, many)
    ]
    _, needed = largest_moment(plan_of("-e d6 -b 2 -t 256"))
    assert fresh[0] == 0 and fresh[1] == pytest.approx(1e-9 * needed.total())


def test_it_is_measured_and_has_no_peak() -> None:
    step = time_of(SMALL)
    assert step.measured and step.mfu() is None and step.kind == "a CPU" and step.exchanges == ()
    assert step.seconds.low == pytest.approx(0.9 * step.seconds.typical)
    assert step.seconds.high == pytest.approx(1.2 * step.seconds.typical)
    two, one = time_of(f"{SMALL} --devices 2 -d 512"), time_of(SMALL)
    assert two.tokens == 512
    floors = [sum(each.floor for each in step.operations if each.phase == "forward") for step in (two, one)]
    assert floors[0] == pytest.approx(2 * floors[1])  # one processor computes for both


def test_a_split_update_is_made_once_and_else_by_each_device() -> None:
    one, both, split = (
        next(each.seconds.typical for each in time_of(words).operations if each.operation == "adamw")
        for words in (SMALL, f"{SMALL} --devices 2 -z 0", f"{SMALL} --devices 2 -z 1")
    )
    assert both == pytest.approx(2 * one) and split == pytest.approx(one, rel=0.01)


# ----- measuring ------------------------------------------------------------------------------------------------------


def test_rates_are_made_of_the_least_times(monkeypatch: pytest.MonkeyPatch) -> None:
    there = known(2e11, 3e10, 5e9)
    model = parse_descriptor(cpu.MODEL)
    works = step_work(model, Shape(cpu.BATCH, model.max_seq_len, recompute=0))
    took = {
        "product": 6 * 512**3 / 2e11,
        "update": 28 * cpu.BUFFER / 3e10,
        "model": sum(there.seconds(work) for work in works if work.phase != "update"),
    }
    monkeypatch.setattr(cpu, "_programs", lambda dtype: {})
    monkeypatch.setattr(cpu, "_turns", lambda runs: {name: [1.5 * each, each, 2 * each] for name, each in took.items()})
    found = cpu.measure("fp32")
    assert (found.flops, found.streaming, found.computing) == pytest.approx(there[3:6])
    assert found.spread.high == pytest.approx(1.5)  # times usually took so much more than the least


@pytest.mark.slow
def test_what_is_measured_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PATIENCE": 0.0, "TURNS": 2, "BUFFER": 2**16, "MODEL": "L1-NH1-C16-V64-T16"}.items():
        monkeypatch.setattr(cpu, name, value)
    here = cpu.measure("fp32")
    assert all(rate > 0 for rate in here[3:6]) and here.spread.low < 1 < here.spread.high
    assert from_json(Calibration, json.loads(json.dumps(to_json(here)))) == here


# ----- kept -----------------------------------------------------------------------------------------------------------


def test_a_calibration_is_kept_and_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    measured: list[str] = []
    monkeypatch.setattr(cpu, "measured_apart", lambda dtype, say: measured.append(dtype) or known())
    for dtype in ("fp32", "fp32", "bf16", "bf16"):
        assert cpu.calibration(dtype) == known()
    assert measured == ["fp32", "bf16"]


def test_a_calibration_that_fails_is_an_error_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="calibration of this CPU failed") as caught:
        cpu.calibration("fp8")
    assert "\n" not in str(caught.value) and not list(tmp_path.rglob("*.json"))
