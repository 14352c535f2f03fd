"""The time of a step on a CPU by measured rates: interpolated between them, the step's parts by their own sizes."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import Interval
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.machine.gpus import Machine
from llmc_jax.models.work import products_flops
from llmc_jax.plan import cpu
from llmc_jax.plan.cpu import Calibration, Rates
from llmc_jax.plan.moments import largest_moment
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.plan.time import StepTime, step_time

GRID = Rates(((64, 256, 1024), (128, 768)), (1e9, 2e9, 2e9, 4e9, 3e9, 8e9))
sizes = st.integers(1, 10**6)


def known(rate: float = 1e9) -> Calibration:
    """A CPU that does 1e9 of everything in a second, whatever the sizes."""
    cases = cpu._cases("fp32")
    rates = {
        name: Rates(case.axes, (rate,) * math.prod(len(axis) for axis in case.axes)) for name, case in cases.items()
    }
    return Calibration("a CPU", 2, "fp32", rates, 0.0, 0.0, Interval(0.9, 1.0, 1.2))


def plan_of(words: str) -> Plan:
    config = parse_args(words.split())
    return make_plan(config, parse_descriptor(config.model), Machine("cpu", "cpu"))


def time_of(words: str, **change: Any) -> StepTime:
    return step_time(plan_of(words), known()._replace(**change))


def test_a_measured_size_has_its_own_rate() -> None:
    for place, rate in zip(itertools.product(*GRID.axes), GRID.rates, strict=True):
        assert GRID.at(*place) == pytest.approx(rate)
    assert GRID.at(128, 128) == pytest.approx(math.sqrt(1e9 * 2e9))  # half way in logarithms
    assert GRID.at(1, 10**6) == pytest.approx(2e9)  # beyond the edge as at the edge


@given(sizes, sizes)
def test_a_rate_lies_between_those_measured(rows: int, columns: int) -> None:
    assert min(GRID.rates) * 0.999 <= GRID.at(rows, columns) <= max(GRID.rates) * 1.001


SMALL = "-e L2-NH2-C64-V500-T64 -b 4 -t 64"


@pytest.mark.parametrize("more", ["", " -r 0", " -r 2", " --recompute-blocks 1", " -d 1024", " --logit-rows 64"])
def test_products_of_a_step_are_all_counted_once(more: str) -> None:
    """Half of the FLOPs of each, which are two for a multiplication and an addition; a linear's backward has two."""
    plan = plan_of(SMALL + more)
    step = step_time(plan, known())
    linear = ("qkv", "attproj", "fc", "fcproj", "head")
    flops = sum(each.flops for each in step.operations if each.operation in linear)
    scores = 8 * plan.shape.micro_batches * 64 * 64  # of each attention: B NH T T
    attentions = sum(each.seconds.typical / (scores / 1e9) for each in step.operations if each.operation == "attention")
    assert attentions == pytest.approx(2 * (3 if "blocks" in more else 2))
    assert flops < products_flops(plan.model, plan.shape)  # and attention's
    seconds = {(each.phase, each.operation): each.seconds.typical for each in step.operations}
    assert seconds["forward", "head"] == pytest.approx(seconds["backward", "head"])  # as one amount, at one rate
    assert seconds["forward", "fc"] == pytest.approx(256 * 64 * 256 * 2 * plan.shape.micro_batches / 1e9)


def test_what_is_computed_again_takes_its_time() -> None:
    gelu = {r: time_of(f"{SMALL} -r {r}").seconds.typical for r in (0, 1, 2)}
    assert gelu[1] - gelu[0] == pytest.approx(2 * 256 * 256 / 1e9, rel=1e-6)  # of two layers n x 4C
    assert gelu[2] - gelu[1] == pytest.approx(2 * 2 * 256 * 64 / 1e9, rel=1e-6)  # two layernorms, n x C


def test_memory_is_taken_anew_only_where_there_is_much() -> None:
    few, many = (step_time(plan_of(words), known()._replace(fresh=1e-9)) for words in (SMALL, "-e d6 -b 2 -t 256"))
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


def test_turns_go_on_while_times_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def turns_of(*seconds: float) -> int:
        taken = iter([*seconds, *[seconds[-1]] * 99])
        monkeypatch.setattr(cpu, "_one_turn", lambda run: next(taken))
        return len(cpu._turns({"once": lambda: None})["once"])

    assert turns_of(1.0) == cpu.TURNS
    assert turns_of(1.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0) == 7  # until half of them are near the least
    assert turns_of(1.0, 2.0) == cpu.MOST_TURNS


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


@pytest.mark.slow
def test_every_case_runs_and_its_turns_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one size of each, the smallest, and as few runs as there can be."""
    cases = {
        name: case._replace(axes=tuple(axis[:1] for axis in case.axes)) for name, case in cpu._cases("fp32").items()
    }
    for name, value in {"PATIENCE": 0.0, "TURNS": 2, "MOST_TURNS": 2, "BLOCK": 2**16}.items():
        monkeypatch.setattr(cpu, name, value)
    monkeypatch.setattr(cpu, "_cases", lambda dtype: cases)
    here = cpu.measure("fp32")
    assert set(here.rates) == set(cases) and all(rate > 0 for rates in here.rates.values() for rate in rates.rates)
    assert here.spread.low < 1 < here.spread.high
    assert from_json(Calibration, json.loads(json.dumps(to_json(here)))) == here
