"""benchmarks/gpu_check.sh without a GPU: its plan, what its numerics see, its verdicts, what a crash costs."""

import difflib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from benchmarks import gpu_check, step_table
from benchmarks.gpu import algorithms, clocks, first, groups, races, resume, solvers, stepping, steps, targets, versus
from benchmarks.gpu.plan import (
    ATTENTION,
    D12_NUMERICS,
    PARTS,
    SIDE_BY_SIDE,
    STEP_PARTS,
    Item,
    expected_seconds,
    plan,
    step_flags,
)  # fmt: skip
from benchmarks.gpu.programs import step_times
from benchmarks.gpu.results import DONE, FAILED, SKIPPED, UNJUDGED, Record, Results, page, result_files, source_digest
from llmc_jax import kernels
from llmc_jax.base.errors import InputError
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.kernels import GROUPS
from llmc_jax.kernels.functions import FILES, PRODUCTS
from llmc_jax.machine import deviceless
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.machine.nvml import GpuReading
from llmc_jax.models.layout import flat_size
from llmc_jax.trials import problems
from llmc_jax.trials.children import END_SECONDS, SAME, NotMeasured, Outcome, Task
from pallas_kernels import gelu, layernorm, tuning
from tests.aot.cases import public_kernels
from tests.machine.test_nvml import FULL, FakeNvml

ROOT = Path(__file__).resolve().parents[1]


def record(status: str = DONE, message: str = "", **figures: Any) -> Record:
    return Record(status, figures, message, "2026-01-01 00:00", "0123456789ab", 1.0)


def results_of(folder: Path, records: dict[tuple[str, str], Record]) -> Results:
    found = Results(folder, "NVIDIA H200")
    found.machine = {"device": "NVIDIA H200", "capability": "9.0"}
    found.records = records
    return found


# ----- the plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [False, True])
def test_plan(tiny: bool) -> None:
    items = plan(tiny)
    names = [(item.part, item.name) for item in items]
    assert len(set(names)) == len(names)
    assert {part for part, _ in names} == set(PARTS) - {"versus"}  # which --vs alone measures
    assert [part for part, _ in names] == sorted((part for part, _ in names), key=list(PARTS).index)
    assert all(item.fresh for item in items if item.xla_flags)
    assert not any("," in item.name for item in items)  # --only takes several names
    for leg in first.LEGS:  # nothing of the first calls may take so long that it alone fills one
        assert all(item.seconds <= 60 * first.MINUTES - 60 for item in first.items_of(leg, items, tiny=tiny))
    sizes = {item.arguments["sizes"][0] for item in items if item.arguments.get("function") == "global_norm"}
    assert tiny or sizes == {flat_size(parse_descriptor("d12")), flat_size(parse_descriptor("d48"))}
    json.dumps([item._asdict() for item in items])  # what a process is told


def test_every_kernel_is_checked() -> None:
    """Every public kernel has numerics; what a run chooses between has times that decide it."""
    checked = {item.arguments["function"] for item in plan() if item.part == "numerics"} - {"model"}
    assert checked == solvers.FUNCTIONS
    decoding = {f"decode.{name}" for name in ("norm_linear", "attention_step", "linear_residual")}  # all in one item
    assert public_kernels() - decoding == {f"{file}.{name}" for name, file in FILES.items()}
    assert "kernels" in {item.arguments["what"] for item in plan() if item.part == "generate"}
    assert {*targets.COMPARED, "attention", *PRODUCTS} == set(GROUPS)
    assert set(ATTENTION) == set(tuning.VERSIONS)


def test_flags_of_a_step() -> None:
    """Every record of a step says, in train.py's flags, which step it is: a peer's that of ours beside it."""
    flags = {(item.part, item.name): step_flags(item) for item in plan()}
    assert flags["step", "d12 bf16 B=64"] == "-e d12 -b 64 -t 1024 -d 65536 -r 0 --dtype bf16"
    assert flags["variants", "-w 0"] == "-e d12 -b 64 -t 1024 -d 65536 -r 0 --dtype bf16 -w 0"
    for B in (64, 32, 16):
        assert flags["torch", f"d12 bf16 B={B}"] == flags["llmc", f"d12 bf16 B={B}"] == flags["step", f"d12 bf16 B={B}"]
    assert flags["torch", "d12 tf32 B=4"] == flags["llmc", "d12 fp32 TF32 B=4"] == flags["step", "d12 fp32 TF32 B=4"]
    assert {key[0] for key, words in flags.items() if words} == set(STEP_PARTS) - {"versus"}
    assert all(parse_args(words.split()).recompute >= 0 for words in flags.values() if words)


def test_how_a_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five groups of twelve steps, of which the first warms up; ours and PyTorch's alike."""
    clock, made = Card({}), []

    def run(count: int) -> None:
        made.append(count)
        clock.now += count * (0.5 if len(made) == 1 else 0.1 if len(made) < 5 else 0.2)

    monkeypatch.setattr(stepping.time, "perf_counter", clock.monotonic)
    assert stepping.seconds_of_a_step(run) == (pytest.approx(0.1), pytest.approx(1.0))
    assert made == [12] * 5


def test_no_step_falls_back_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for can run on an H200; else a line would show the time of something else."""
    monkeypatch.setattr(kernels, "this_machine", lambda: kernels.Machine("gpu", "NVIDIA H200", "9.0"))
    for item in plan():
        if item.module == "steps":
            asked, config = item.arguments, parse_descriptor(item.arguments["model"])
            own = ("model", "B", "dtype", "digest_after", "cache")
            flags = {name: value for name, value in asked.items() if name not in own}
            _, runs = steps.choose(config, asked["dtype"], asked["B"], 1024, **flags)
            if asked.get("kernels") == "xla":
                assert "xla: layernorm, gelu, classifier" in runs
            if "attention" in asked:
                assert f"{asked['attention']}" in runs.replace("naive, xla", "naive")


@pytest.mark.slow
def test_every_kernel_of_the_plan_lowers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first and the last of the plan's shapes, for an H200; in fp16 and fp32 on the first of each kernel."""
    monkeypatch.setattr(solvers, "target", lambda: "sm_90")
    kinds: dict[str, list[dict[str, Any]]] = {}
    for item in plan():
        given = item.arguments
        ours = given.get("implementation", "pallas") in ("pallas", "mma", "wgmma")
        if item.module in ("numerics", "times") and ours and given["function"] != "model":
            names = ("function", "dtype", "rounding", "master_weights", "implementation", "form")
            kinds.setdefault(str([given.get(name) for name in names]), []).append(given)
    assert {items[0]["function"] for items in kinds.values()} == solvers.FUNCTIONS
    for items in kinds.values():
        for given in {str(each): each for each in (items[0], items[-1])}.values():
            if given is items[0] or given["dtype"] == "bf16":
                lowered_for_an_h200(given)


def lowered_for_an_h200(given: dict[str, Any]) -> None:
    made = {}

    def arrays() -> Any:
        options = {name: given[name] for name in ("rounding", "master_weights") if name in given}
        made["problem"] = problems.problem(given["function"], given["dtype"], given["sizes"], 0, **options)
        return made["problem"].arrays

    structs = jax.eval_shape(arrays)
    solver = solvers.implementation(
        given["function"], given.get("implementation", "pallas"), form=given.get("form", "")
    )
    deviceless.lower_for(jax.jit(made["problem"].bind(solver)), structs, "h200")


# ----- results and verdicts -----------------------------------------------------------------------------------------

COPY = {("machine", "copy"): record(**{"GB/s": 4000.0})}
LAYERNORM = "layernorm_forward bf16 65536x768"


@pytest.mark.parametrize(
    "rate, verdict",
    [(3500.0, targets.MET), (3100.0, targets.REACHED), (2900.0, targets.MISSED), (None, targets.UNKNOWN)],
)
def test_verdict(rate: float | None, verdict: str, tmp_path: Path) -> None:
    records = COPY | ({("kernels", LAYERNORM): record(**{"GB/s": rate})} if rate else {})
    target = targets.TARGETS[0]
    assert target.what == "layernorm_forward, C=768"
    found = targets.value(results_of(tmp_path, records), target)
    assert targets.verdict(target, found and found[1]) == verdict


def test_less_is_better_and_ratios(tmp_path: Path) -> None:
    results = results_of(tmp_path, {
        ("start", "d12"): record(**{"cold s": 45.0, "warm s": 20.0}),
        ("step", "d12 bf16 B=32"): record(**{"tok/s": 500e3}),
        ("step", "d12 bf16 B=64"): record(**{"tok/s": 600e3}),
        ("torch", "d12 bf16 B=32"): record(**{"tok/s": 480e3}),
        ("torch", "d12 bf16 B=64"): record(SKIPPED, "no PyTorch"),
    })  # fmt: skip
    found = {target.what: (target, targets.value(results, target)) for target in targets.TARGETS}
    verdicts = {what: targets.verdict(target, each and each[1]) for what, (target, each) in found.items()}
    assert verdicts["command to first step, d12, cold"] == targets.REACHED
    assert verdicts["command to first step, d12, warm"] == targets.MISSED
    assert found["step, d12, bf16"][1] == ("d12 bf16 B=64", 600e3)
    assert found["step, d12, bf16, over PyTorch's"][1] == ("d12 bf16 B=64", 1.25)
    assert verdicts["step, d12, bf16, over llm.c's"] == targets.UNKNOWN


def test_times_of_a_wrong_kernel_are_not_believed(tmp_path: Path) -> None:
    timed = "classifier bf16 32768x50257x50304 form={}"
    results = results_of(tmp_path, COPY | {
        ("numerics", "classifier bf16 63x50257x50257 form=shared"): record(verdict="WRONG: output 0: …"),
        ("numerics", "classifier bf16 63x50257x50257 form=sweeps"): record(verdict="right"),
        ("kernels", timed.format("shared")): record(**{"us": 1000.0, "GB/s": 4000.0, "xla us": 5000.0}),
        ("kernels", timed.format("sweeps")): record(**{"us": 1500.0, "GB/s": 3000.0, "xla us": 5000.0}),
        ("kernels", LAYERNORM): record(**{"us": 1500.0, "GB/s": 3000.0}),
    })  # fmt: skip
    assert targets.best(results, targets.Figure("kernels", "classifier*", "of copy")) == (timed.format("sweeps"), 0.75)
    assert results.is_wrong("kernels", timed.format("shared")) and not results.is_wrong("kernels", LAYERNORM)
    text = page(results, targets.summary(results), targets.measured_lines(results))
    assert "not to be believed" in text and "## Wrong" in text
    assert measured(results) == {"classifier": ("pallas", "xla", 3.33, "NVIDIA H200")}
    results.records["numerics", "classifier bf16 63x50257x50257 form=sweeps"] = record(verdict="WRONG: output 1: …")
    assert measured(results) == {"classifier": ("xla", "", 0.0, "NVIDIA H200")}


def test_which_kernel_a_wrong_item_condemns(tmp_path: Path) -> None:
    """Rows in registers and rows that are streamed are two kernels; what had no memory condemns none."""
    backward, adamw = "layernorm_backward bf16 65536x768", "adamw_update bf16 124518400"
    streamed = "layernorm_backward bf16 1024x12288"
    large = ("numerics", "adamw_update bf16 1557725184 reference=fp32")
    results = results_of(tmp_path, {
        ("numerics", streamed): record(message="a false alarm", verdict="WRONG: output 3"),
        large: record(FAILED, "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"),
    })  # fmt: skip
    assert list(results.wrong()) == [("numerics", streamed)] and list(results.failed()) == [large]
    assert "output 3" in results.wrong()["numerics", streamed] and "false" in results.wrong()["numerics", streamed]
    timed = {name: results.is_wrong("kernels", name) for name in (backward, adamw, "layernorm_backward bf16 64x5000")}
    assert timed == {backward: False, adamw: False, "layernorm_backward bf16 64x5000": True}
    results.records[large] = record(UNJUDGED, "the process ended with status -9")
    assert list(results.failed()) == [large] and not results.is_wrong("kernels", adamw)
    results.records["numerics", "layernorm_backward bf16 63x4096"] = record(verdict="WRONG: output 0")
    results.records[large] = record(FAILED, "ValueError: shapes")
    assert results.is_wrong("kernels", backward) and results.is_wrong("kernels", adamw)


def measured(results: Results) -> dict[str, tuple[Any, ...]]:
    """The lines of MEASURED, read as Python, by operation."""
    lines = "\n".join(["{", targets.measured_lines(results), "}"])
    table = eval(lines, {"Measured": lambda *fields: fields})
    assert {target for target, _ in table} <= {"sm_90"}
    return {operation: fields for (_, operation), fields in table.items()}


def test_measured_lines_name_the_fastest(tmp_path: Path) -> None:
    attention, card = "attention bf16 64x1024x12x64 implementation=", "NVIDIA H200"
    results = results_of(tmp_path, {
        ("kernels", "adamw_update bf16 124518400"): record(**{"us": 900.0, "xla us": 800.0}),
        ("kernels", "global_norm bf16 124518400"): record(FAILED, "RESOURCE_EXHAUSTED"),
        ("kernels", "classifier bf16 8192x50257x50304 form=shared"): record(us=400.0),
        ("kernels", attention + "wgmma"): record(us=900.0),
        ("kernels", attention + "mma"): record(us=950.0),
        ("kernels", attention + "cudnn"): record(us=1080.0),
        ("kernels", "relu_attention bf16 64x1024x12x64 implementation=mma"): record(us=1.0),
        ("step", "d12 bf16 --triton-gemm on B=64"): record(ms=110.0),
    })  # fmt: skip
    expected = {
        "adamw": ("xla", "pallas", 1.12, card), "classifier": ("pallas", "", 0.0, card),
        "attention": ("flash", "cudnn", 1.2, card),
    }  # fmt: skip
    assert measured(results) == expected  # one setting of --triton-gemm says nothing
    assert "version wgmma on sm_90" in targets.measured_lines(results)
    results.records["step", "d12 bf16 --triton-gemm off B=64"] = record(ms=100.0)
    assert measured(results) == expected | {"triton_gemm": ("off", "on", 1.1, card)}
    results.records["numerics", "attention bf16 2x63x3x64 implementation=wgmma"] = record(verdict="WRONG: …")
    assert measured(results)["attention"] == ("flash", "cudnn", 1.14, card)
    results.records["numerics", "attention bf16 2x63x3x64 implementation=mma"] = record(verdict="WRONG: …")
    assert measured(results)["attention"] == ("cudnn", "", 0.0, card)


def test_repetition(tmp_path: Path) -> None:
    bits = {"losses": "a", "state": "b"}
    results = results_of(tmp_path, {
        ("repeat", "first"): record(**bits), ("repeat", "again"): record(**bits),
        ("repeat", "-r 1"): record(**bits | {"state": "c"}),
        ("repeat", "--kernels xla --attention cudnn"): record(**bits),
        ("repeat", "--kernels xla --attention cudnn again"): record(**bits | {"losses": "c"}),
    })  # fmt: skip
    (line,) = targets.repetition(results)
    assert "'again' has the bits of 'first'" in line and "'-r 1' DIFFERS from 'first'" in line
    assert "again' DIFFERS from '--kernels xla --attention cudnn'" in line
    assert {name for part, name in results.records} <= {item.name for item in plan() if item.part == "repeat"}


def test_continued_runs(tmp_path: Path) -> None:
    at = {"resumed at": 5, "state": "a"}
    results = results_of(tmp_path, {
        ("resume", "killed with compile cache kept"): record(verdict="right: the same bits", **at),
        ("resume", "killed with compile cache deleted"): record(bits="from step 7 other bits", **at),
        ("resume", "save of d12 bf16"): record(**{"of a 524,288-token step": 0.06}),
    })  # fmt: skip
    (line,) = targets.resumption(results)
    assert "kept': right: the same bits; " in line and "deleted': from step 7 other bits." in line
    assert results.wrong() == {}
    assert "| time that a save adds, d12, bf16 | 5.0 % | 5.0 % | 6.0 % | NOT MET |" in targets.summary(results)
    results.records["resume", "killed with compile cache kept"] = record(verdict="WRONG: from step 6 other bits", **at)
    assert list(results.wrong()) == [("resume", "killed with compile cache kept")]


def run_folder(folder: Path, losses: list[float], resumed: int | None = None) -> Path:
    folder.mkdir()
    events: list[dict[str, Any]] = [
        {"event": "train", "step": k, "loss": loss, "norm": 1.0, "ms": 5 * k + loss} for k, loss in enumerate(losses)
    ]
    if resumed is not None:
        events.insert(resumed, {"event": "resume", "step": resumed})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_where_a_continued_run_parts(tmp_path: Path) -> None:
    whole = run_folder(tmp_path / "whole", [5.0, 4.0, 3.0])
    assert resume.resumption(run_folder(tmp_path / "same", [5.0, 4.0, 3.0], 1), whole) == (1, None)
    assert resume.resumption(run_folder(tmp_path / "other", [5.0, 4.0, 3.5], 2), whole) == (2, 2)
    assert resume.resumption(run_folder(tmp_path / "short", [5.0, 4.0], 1), whole) == (1, 2)
    with pytest.raises(RuntimeError, match="did not go on"):
        resume.resumption(run_folder(tmp_path / "fresh", [5.0, 4.0, 3.0]), whole)


def test_results_are_kept(tmp_path: Path) -> None:
    item = Item("machine", "copy", "machine", {})
    results_of(tmp_path, {}).add(item, record(**{"GB/s": 4000.0}))
    again = Results(tmp_path, "NVIDIA H200")
    again.read()
    assert again.copy_rate() == 4000.0
    items = [item, item._replace(name="read"), item._replace(name="more")]
    again.add(items[1], record(SKIPPED, "not here"))
    again.add(items[2], record(FAILED, "crashed"))
    assert gpu_check.left(again, items) == [items[1]]  # what could not be measured is tried again, a failure is not


def test_times_of_llmc_s_steps() -> None:
    """As train_gpt2cu and train_gpt2fp32cu print them."""
    cuda = "| step    1/20 | loss\nstep    1/20 | loss 10.98 (+nanz)| norm 15.3 (+nanz)| 318.37 ms | 40.9% bf16\n"
    fp32 = "step    1/74: train loss 4.367631 (acc 4.367631) (80.639 ms, 50800 tok/s)\nval loss 9.5\n"
    assert step_times(cuda + cuda.replace("318.37", "118.40")) == [318.37, 118.40] and step_times(fp32) == [80.639]


def test_the_faster_copy_is_the_ceiling(tmp_path: Path) -> None:
    """XLA's kernel that copies must not flatter the others where a plain copy is faster, nor the other way round."""
    fusion, kernel = ("machine", "copy by a fusion"), ("kernels", LAYERNORM)
    results = results_of(tmp_path, COPY | {kernel: record(**{"GB/s": 3600.0}), fusion: record(**{"GB/s": 3000.0})})
    assert results.shown(*kernel, results.records[kernel])["of copy"] == 0.9
    results.records[fusion] = record(**{"GB/s": 4500.0})
    assert results.shown(*kernel, results.records[kernel])["of copy"] == 0.8
    results.records[fusion] = record(FAILED, "no memory")
    assert results.copy_rate() == 4000.0


def test_variants_are_shown_beside_the_step(tmp_path: Path) -> None:
    key = ("variants", "--logit-rows 0")
    records = {("step", "d12 bf16 B=64"): record(**{"tok/s": 500e3}), key: record(**{"tok/s": 550e3})}
    results = results_of(tmp_path, records)
    assert results.shown(*key, records[key])["of the step"] == pytest.approx(1.1)
    results.records["variants", "as it is"] = record(**{"tok/s": 440e3})
    assert results.shown(*key, records[key])["of the step"] == pytest.approx(1.25)


# ----- the first calls ----------------------------------------------------------------------------------------------


def test_first_calls_take_what_matters() -> None:
    """Every pattern names something; the calls are in order; the whole of numerics is among them, d12's first."""
    items, order = plan(), [*first.PLANNED, first.REST]
    assert [leg.call for leg in first.LEGS] == sorted((leg.call for leg in first.LEGS), key=order.index)
    for leg in first.LEGS:
        for pattern in leg.patterns:
            assert first.items_of(leg._replace(patterns=(pattern,)), items, tiny=False), pattern
    one, two, rest = ({item.part for item in each} for each in first.calls(items).values())
    assert one == {"machine", "numerics", "step", "variants", "llmc", "torch", "kernels", "profile", "start"}
    assert two == {"check", "kernels", "repeat", "resume", "step"} and "numerics" in rest
    assert [item.name for item in items if item.part == "numerics"][: len(D12_NUMERICS)] == list(D12_NUMERICS)
    small = {item.part for each in first.calls(plan(tiny=True), tiny=True).values() for item in each}
    assert small == {leg.part for leg in first.LEGS}


def test_the_first_calls_fit() -> None:
    """Each is planned to end half a minute before its time; every item has an expectation below its limit."""
    items = plan()
    for call in first.PLANNED:
        assert first.CALL + expected_seconds(first.calls(items)[call]) <= 60 * first.MINUTES - 30
    assert all(0 < item.expected < item.seconds for item in items)
    shared = [item for item in items if item.shares]
    assert {item.part for item in shared} == {"numerics"} and not any(item.fresh for item in shared)
    assert expected_seconds(shared[:6]) == pytest.approx(sum(item.expected for item in shared[:6]) / SIDE_BY_SIDE)


class Card:
    """A made-up machine on a made-up clock: what each item takes, or None for one that hangs."""

    def __init__(self, takes: dict[str, float | None]) -> None:
        self.takes, self.now, self.measured = takes, 0.0, []

    def monotonic(self) -> float:
        return self.now

    def children(self, *_: Any) -> "Card":
        return self

    stuck = None

    def close(self) -> None:
        self.now += 1.0

    def measure(self, task: Task, until: float) -> Outcome:
        begin, takes = self.now, self.takes.get(task.name, 10.0)
        limit = begin + task.seconds
        done = begin + takes if takes is not None else float("inf")
        self.now = max(begin, min(done, limit, until))
        kind = "DONE" if self.now == done else "FAILED" if self.now == limit else "TIME"
        if kind == "TIME":
            self.now += END_SECONDS  # to end the process
        self.measured.append(task.name)
        figures = {"verdict": "right", "bits": SAME, "tok/s": 1.0, "GB/s": 1.0, "losses": "a", "state": "b"}
        return Outcome(kind, figures if kind == "DONE" else "hangs", self.now - begin)


def one_call(card: Card, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Results, float]:
    """A call of the command on the made-up machine: its results, and the seconds that it took."""
    began = card.now
    monkeypatch.setattr(gpu_check, "time", card)
    monkeypatch.setattr(gpu_check, "Children", card.children)
    monkeypatch.setattr(gpu_check, "SIDE_BY_SIDE", 1)  # the clock is one for all
    machine = {"device": "NVIDIA H200", "capability": "9.0"}
    monkeypatch.setattr(gpu_check.Check, "describe", lambda _: setattr(card, "now", card.now + 20) or machine)
    gpu_check.main([*words, "--output", str(folder)])
    results = Results(folder, "NVIDIA H200")
    results.read()
    return results, card.now - began


@pytest.mark.parametrize("takes", [170.0, None])
def test_no_call_lasts_longer_than_its_minutes(
    takes: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the items take, and though they hang: seconds at most; and each call gets further."""
    words = ("d12", "65536x768", "16384x12")
    items = [item for item in plan() if any(word in item.name for word in words)]
    asked = {(item.part, item.name) for each in first.calls(items).values() for item in each}
    card = Card(dict.fromkeys((item.name for item in items), takes))
    known = -1
    while True:
        results, seconds = one_call(card, tmp_path, monkeypatch, "first", "--only", ",".join(words))
        assert seconds < 60 * first.MINUTES + 15
        assert (tmp_path / "gpu_nvidia_h200.md").exists()
        if len(results.records) == known:
            break
        known = len(results.records)
    assert results.records.keys() == asked
    again = one_call(card, tmp_path, monkeypatch, "first", "--only", ",".join(words))
    assert again[1] < 60  # nothing is measured again


def test_an_item_longer_than_a_call_does_not_stop_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card({"copy": 400.0})
    results, seconds = one_call(card, tmp_path, monkeypatch, "machine", "--only", "copy,read", "--minutes", "1")
    assert seconds < 75 and results.records["machine", "copy"].status == FAILED
    assert "--minutes" in results.records["machine", "copy"].message
    results, _ = one_call(card, tmp_path, monkeypatch, "--only", "copy,read", "--minutes", "2")
    assert results.records["machine", "read"].status == DONE


def test_results_of_an_earlier_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--from copies what an earlier call left, and goes on from it."""
    card = Card({})
    one_call(card, tmp_path / "a", monkeypatch, "machine", "--only", "copy")
    (tmp_path / "a" / "gpu_nvidia_h200_profile.json").write_text("{}")
    results, _ = one_call(card, tmp_path / "b", monkeypatch, "--only", "copy,read", "--from", str(tmp_path / "a"))
    assert card.measured == ["copy", "copy by a fusion", "read"]
    one_call(card, tmp_path / "b", monkeypatch, "--list")
    listed = capsys.readouterr().out
    assert "machine: copy: 3.6 s; done 20" in listed and "step: d12 bf16 B=64: 20.0 s; not measured" in listed
    assert len(results.records) == 3 and len(results.commands) == 2  # of which --list is none
    assert (tmp_path / "b" / "gpu_nvidia_h200_profile.json").exists()


def test_what_is_held_wrong_gets_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card, mine = Card({}), tmp_path / "mine"
    results, _ = one_call(card, mine, monkeypatch, "machine")
    assert {part for part, _ in results.records} == {"machine"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "gpu_nvidia_a100.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "gpu_nvidia_h200.json").write_text("[1, 2")
    wrong = {
        ("--page", str(tmp_path / "none.json")): "is no gpu_….json",
        ("--page", str(tmp_path)): "is no gpu_….json",
        ("--page", "a.json", "--list"): "one at a time",
        ("versus",): "part versus is what --vs measures",
        ("--page", str(tmp_path / "broken" / "gpu_nvidia_h200.json")): "not what this check writes",
        ("--from", str(tmp_path / "none")): "there is no such folder",
        ("--from", str(tmp_path / "other")): "it has gpu_nvidia_a100.json",
        ("--from", str(tmp_path / "broken"), "--output", str(tmp_path / "new")): "not what this check writes",
        ("--from", str(tmp_path / "broken")): "has a gpu_nvidia_h200.json of its own",
        ("--only", "copy,reed"): "no item's name contains reed; they begin with",
        ("--minutes", "0"): "must be more than 0",
        ("first", "machine"): "name no part beside it",
        ("machines",): "there is no part machines; the parts are machine, numerics",
    }
    for words, told in wrong.items():
        capsys.readouterr()
        try:
            status = gpu_check.main(["--output", str(mine), *words])
        except SystemExit as error:
            status = error.code
        assert status == 2 and told in capsys.readouterr().err, words


# ----- measured beside estimated ------------------------------------------------------------------------------------


def test_estimates_stand_beside_what_was_measured(tmp_path: Path) -> None:
    """The page has both, and names the estimates that were off by more than a tenth, the costliest first."""
    found = groups.Groups("-e d12 -b 64 -r 0", "results/step_table.md", 110.0, 2.5, (
        groups.Group("classifier", 8, 3.5, 3.84), groups.Group("GELU forward", 12, 2.5, 2.8),
        groups.Group("norm", 8, 0.2, 0.1), groups.Group("attention forward", 12, 4.0, 5.5),
        groups.Group("other", 3, None, 0.4), groups.Group("sums of partial sums", 3, 0.02, 0.01),
    ))  # fmt: skip
    results = results_of(tmp_path, {})
    results.groups_file.write_text(json.dumps(found._asdict()))
    assert groups.read(results.groups_file) == found
    (line,) = groups.wrong_estimates(found, "NVIDIA H200")
    places = [line.index(name) for name in ("attention forward (4.00", "GELU forward (2.50", "norm (0.20")]
    assert places == sorted(places)
    assert all(name not in line for name in ("classifier", "other", "sums"))
    summary = gpu_check.write_page(results)
    assert line in summary and "| attention forward | 12 | 4.00 | 5.50 | +38 % |" in results.page.read_text()
    assert groups.wrong_estimates(found._replace(source=""), "NVIDIA H200") == []
    (line,) = groups.wrong_estimates(found._replace(groups=found.groups[:1]), "NVIDIA H200")
    assert "NVIDIA H200" in line and "10 %" in line


def test_the_committed_estimates_are_those_of_the_profiled_step() -> None:
    (item,) = [item for item in plan() if item.part == "profile"]
    estimates, source = groups.estimated(Path("."), None, item.arguments["words"], "NVIDIA H200")
    assert source == "results/step_table.md"
    table = step_table.read_tables(step_table.NOW)["h200 -e d12 -b 64 -r 0"]
    assert sum(estimates.values()) == pytest.approx(1e3 * table.total.seconds)
    assert groups.estimated(Path("."), None, item.arguments["words"], "a card nobody knows") == ({}, "")


# ----- races --------------------------------------------------------------------------------------------------------


def test_what_compute_sanitizer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert races.figures_of(f"{races.FINISHED}\n{clean}", 0) == {"hazards": 0, "errors": 0, "warnings": 0}
    with pytest.raises(RuntimeError, match="status 1"):  # the program raised, of which the tool says nothing
        races.figures_of(clean, 1)
    with pytest.raises(NotMeasured, match="Hopper alone"):
        races.figures_of(f"{races.NOT_HERE}wgmma exists on Hopper alone\n{clean}", 0)
    found = races.figures_of(
        f"{races.FINISHED}\n"
        "========= Error: Race reported between Write access at flash+0x40 and Read access: 4 hazards\n"
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 1
    )  # fmt: skip
    assert found["errors"] == 1 and "flash+0x40" in str(found["first"])
    with pytest.raises(NotMeasured, match="Device not supported"):
        races.figures_of("========= COMPUTE-SANITIZER\n========= Error: Device not supported\n", 1)
    with pytest.raises(RuntimeError, match="status 3: boom"):
        races.figures_of("boom\n", 3)
    monkeypatch.setattr(races, "find", lambda *_: None)
    with pytest.raises(NotMeasured, match="compute-sanitizer is not installed"):
        races.measure("attention", "bf16", [1, 256, 2, 64], "mma")


def test_races_are_looked_for_where_threads_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item's program computes what its item says, at sizes at which a block has shared memory."""
    asked: list[tuple[Any, ...]] = []

    def run(command: list[str], **_: Any) -> Any:
        exec(command[-1])
        said = f"{races.FINISHED}\nRACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(races, "find", lambda *_: races.TOOL)
    monkeypatch.setattr(races.subprocess, "run", run)
    monkeypatch.setattr(races, "run", lambda *given: asked.append(given))
    items = [item.arguments for item in plan() if item.part == "races"]
    assert [races.measure(**arguments)["errors"] for arguments in items] == [0] * len(items)
    assert asked == [
        (each["function"], "bf16", each["sizes"], each.get("implementation", "pallas"), each.get("form", ""))
        for each in items
    ]
    C = {each["function"]: each["sizes"][1] for each in items}
    products = {"head_weights", "linear_gelu_backward"}
    assert {*C} == {"attention", "layernorm_backward", "gelu_backward", "classifier", *products}
    assert layernorm.plan_rows(C["layernorm_backward"], tuning.sizes("sm_90").layernorm_backward).rows > 1
    assert gelu.plan_strips(C["gelu_backward"], 8, tuning.sizes("sm_90").gelu_block).at_once > 1
    assert {each["form"] for each in items if each["function"] == "classifier"} == {"shared", "sweeps"}


# ----- one checkout beside another ----------------------------------------------------------------------------------


def patch_of(folder: Path, file: str, before: str, after: str) -> Path:
    """A patch from one text of a file to another."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{file}", f"b/{file}")
    (folder / "change.patch").write_text("".join(lines))
    return folder / "change.patch"


EPS_FILE = "llmc_jax/ops/layernorm.py"


def test_the_other_side(tmp_path: Path) -> None:
    """A checkout's packages, or this one's with a patch, measured by this one's benchmarks."""
    text = (ROOT / EPS_FILE).read_text()
    changed = text.replace("EPS = 1e-5", "EPS = 1e1")
    folders = [tmp_path / name for name in ("patched", "same", "none", "no checkout", "does not apply", "docs")]
    for folder in folders:
        folder.mkdir()
    side = versus.other_side(patch_of(tmp_path, EPS_FILE, text, changed), folders[0])
    assert (side / EPS_FILE).read_text() == changed and (side / "benchmarks").resolve() == ROOT / "benchmarks"
    assert source_digest(versus.other_side(ROOT, folders[1])) == source_digest(ROOT) != source_digest(side)
    wrong = [
        (tmp_path / "missing", "no such folder"), (tmp_path, "it has no llmc_jax"),
        (patch_of(folders[4], EPS_FILE, changed, text), "does not apply"),
        (patch_of(folders[5], "README.md", "a\n", "b\n"), "changes nothing"),
    ]  # fmt: skip
    for (given, told), folder in zip(wrong, folders[2:], strict=True):
        with pytest.raises(InputError, match=told) as error:
            versus.other_side(given, folder)
        assert "\n" not in str(error.value)


def test_sides_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ABBA in two processes that keep their step; where both do not fit, each turn in a process of its own."""
    done, memory = [], {"both": True}

    class Side:
        def __init__(self, environment: dict[str, str], folder: Path) -> None:
            self.name, self.alone = "this" if folder == ROOT else "other", environment["processes"] == "1"

        def measure(self, task: Task, _: float) -> Outcome:
            done.append(self.name)
            if self.name == "other" and not (self.alone or memory["both"]):
                return Outcome("FAILED", "RESOURCE_EXHAUSTED: 7 GiB", 1.0)
            ms = {"this": 100.0, "other": 90.0 + len(done)}[self.name]
            return Outcome("DONE", {"ms": ms, "loss": 4.5}, 1.0)

        def close(self) -> None:
            done.append("close")

    monkeypatch.setattr(versus, "Children", Side)
    (item,) = versus.items_of([each for each in plan() if (each.part, each.name) == ("step", "d48 bf16 B=16")], ROOT)
    assert item.arguments["steps"] == 12 and step_flags(item).startswith("-e d48 -b 16")

    def compare() -> Outcome:
        done.clear()
        return versus.compare(item, tmp_path, lambda processes: {"processes": str(processes)}, 1e9)

    figures = compare().content
    assert done == ["this", "other", "other", "this"] * (versus.TURNS // 2) + ["close"] * 2
    assert figures["ms"] == 100.0 and figures["other ms"] == 96.5 and figures["other / this"] == pytest.approx(0.965)
    assert figures["spread"] == pytest.approx(0.09 / 0.965) and figures["compiled"] == "once"
    memory["both"] = False
    assert compare().content["compiled"] == "in each turn"
    assert done[4:] == ["this", "close", "other", "close", "other", "close", "this", "close"] + ["close"] * 2
    monkeypatch.setattr(Side, "measure", lambda *_: Outcome("FAILED", "TypeError: no", 1.0))
    assert compare() == Outcome("FAILED", "this side: TypeError: no", 1.0)


def test_choices_of_algorithms_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process with a compile cache of its own; the file of the fastest is kept, and loaded by a last one."""
    done, caches, again = [], set(), {"algorithms": "- 7 5"}
    ms = {"choice 1": 103.0, "choice 2": 101.0, "choice 3": 102.0}
    found = {"choice 1": "- 7 3", "choice 2": "- 7 5", "choice 3": "- 7 3"}

    class Side:
        def __init__(self, environment: dict[str, str]) -> None:
            assert not any(Path(environment["JAX_COMPILATION_CACHE_DIR"]).iterdir())
            caches.add(environment["JAX_COMPILATION_CACHE_DIR"])
            assert 3 * float(environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < MEMORY_SHARE

        def measure(self, task: Task) -> Outcome:
            given = dict(task.arguments)
            option, file = given.pop("option"), Path(given.pop("file"))
            assert given == {"what": "step", "model": "d12", "steps": 12}
            done.append((option == algorithms.LOAD, task.name))
            if option == algorithms.DUMP:
                file.write_text(task.name)
            else:
                assert file.read_text() == task.name
            figures = {"ms": ms[task.name], "algorithms": found[task.name], "loss": 4.5}
            return Outcome("DONE", figures | (again if option == algorithms.LOAD else {}), 1.0)

        def close(self) -> None:
            done.append("close")

    monkeypatch.setattr(algorithms, "Children", Side)
    monkeypatch.setenv("GPU_CHECK_OUTPUT", str(tmp_path))
    arguments: dict[str, Any] = {"what": "compare", "tunings": 3, "model": "d12", "steps": 12}
    figures = algorithms.measure(**arguments)
    names = [(False, name) for name in ms]
    assert done[:9] == [*names, *names, *names[::-1]] and len(caches) == 4
    assert done[3 + 3 * algorithms.ROUNDS :] == ["close"] * 3 + [(True, "choice 2")] + ["close"] * 4
    (file,) = tmp_path.glob("algorithms_*.txt")
    assert file.read_text() == "choice 2" and figures["file"] == file.name
    assert figures["ms"] == 101.0 and figures["ms of each"] == "103.00, 101.00, 102.00"
    assert (figures["products"], figures["not timed"], figures["chosen otherwise"]) == (3, 1, 1)
    assert figures["loaded"].startswith("the same")
    lines = (
        '"gemm_backend_config":{"selected_algorithm":"7","beta":0',
        '"gemm_backend_config":{"beta":0',
        "dot(%a, %b)",
    )
    assert (
        algorithms.algorithms_of("\n".join((*lines, '{"beta":0,"selected_algorithm":"-1"},"gemm_backend_config"')))
        == "7 - -1"
    )
    again["algorithms"] = "- 7 3"
    assert algorithms.measure(**arguments)["loaded"].startswith("OTHER")
    monkeypatch.setattr(Side, "measure", lambda *_: Outcome("FAILED", "TypeError: no", 1.0))
    with pytest.raises(RuntimeError, match=r"^choice 1: TypeError: no$"):
        algorithms.measure(**arguments)


@pytest.mark.slow
def test_a_patch_beside_this_checkout(tmp_path: Path) -> None:
    text = (ROOT / EPS_FILE).read_text()
    patch = patch_of(tmp_path, EPS_FILE, text, text.replace("EPS = 1e-5", "EPS = 1e1"))
    done = run_check("--tiny", "--output", str(tmp_path), "--vs", str(patch))
    assert done.returncode == 0, done.stdout + done.stderr
    ((part, name, status, figures, *_),) = json.loads((tmp_path / "gpu_tiny.json").read_text())["records"]
    assert (part, name, status) == ("versus", "d12 bf16 B=64 beside change.patch", DONE)
    assert figures["turns"] == versus.TURNS and figures["loss"] != figures["other loss"]


# ----- whole runs ---------------------------------------------------------------------------------------------------


def test_what_is_not_timed_shares_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many at once as there are processes; a crash costs one item; what is alone has the card and its memory."""
    together, begun = threading.Barrier(SIDE_BY_SIDE), []
    failures = {"3": "FAILED", "fresh": "UNJUDGED"}

    def measure(task: Task, _: float) -> Outcome:
        if task.name.isdigit():
            together.wait(timeout=3)
        kind = failures.get(task.name, "DONE")
        return Outcome(kind, {"us": 1.0} if kind == "DONE" else "crashed", 0.1)

    def child(environment: dict[str, str], _: Path) -> SimpleNamespace:
        begun.append((environment["XLA_PYTHON_CLIENT_MEM_FRACTION"], environment.get("XLA_FLAGS")))
        return SimpleNamespace(measure=measure, close=lambda: None, stuck=None)

    monkeypatch.setattr(gpu_check, "Children", child)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    check = gpu_check.Check(Results(tmp_path, "tiny"), tmp_path, tiny=True)
    items = [Item("numerics", f"{k}", "numerics", {}, shares=True) for k in range(2 * SIDE_BY_SIDE)]
    alone = [Item("machine", name, "machine", {}) for name in ("alone", "fresh", "last")]
    alone[1] = alone[1]._replace(fresh=True, xla_flags="--xla_some=1")
    assert check.run_items("numerics", [*items, *alone], time.monotonic() + 60)
    found = {name: record.status for (_, name), record in check.results.records.items()}
    expected = {item.name: DONE for item in (*items, *alone)} | {"3": FAILED, "fresh": UNJUDGED}
    assert found == expected and check.results.records["numerics", "3"].message == "crashed"
    assert begun == [*[("0.300", None)] * SIDE_BY_SIDE, ("0.92", None), ("0.92", "--xla_some=1"), ("0.92", None)]
    check.results.machine["compute_mode"] = "Exclusive_Process"
    assert check.lanes == 1


def reading(busy: int | None, mhz: int | None = None, watts: float | None = None, cap: str | None = None) -> GpuReading:
    nothing = dict.fromkeys(GpuReading._fields)
    return GpuReading(**nothing | {"compute_percent": busy, "clock_mhz": mhz, "power_watts": watts, "cap": cap})


def test_the_clock_of_a_busy_card() -> None:
    """Readings of an idle card do not count; what a card does not say is left out."""
    busy = [reading(100, 1755, 698.0, "power"), reading(97, 1650, 700.0, "power"), reading(60, 1980, 500.0, "no")]
    assert clocks.figures_of([reading(0, 345, 120.0, "no"), *busy, reading(None, 100)]) == {
        "SM MHz": 1755, "SM MHz least": 1650, "W": 698.0, "cap": "power 67 %",
    }  # fmt: skip
    assert clocks.figures_of([reading(100, cap="no")]) == {"cap": "no"}
    assert clocks.figures_of([]) == clocks.figures_of([reading(3, 345)]) == {}


def test_the_clock_stands_beside_what_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> Outcome:
        time.sleep(0.05)
        return Outcome("DONE", {"us": 1.0}, 0.05)

    child = SimpleNamespace(measure=measure, close=lambda: None, stuck=None)
    monkeypatch.setattr(gpu_check, "Children", lambda *_: child)
    monkeypatch.setattr(clocks, "EVERY", 0.005)
    check = gpu_check.Check(Results(tmp_path, "tiny"), tmp_path, tiny=True)
    check.read_card = lambda: reading(100, 1755)
    check.run_items("x", [Item("kernels", "timed", "", {}), Item("numerics", "not", "", {}, shares=True)], 1e99)
    found = {name: record.figures for (_, name), record in check.results.records.items()}
    assert found == {"timed": {"us": 1.0, "SM MHz": 1755, "SM MHz least": 1755}, "not": {"us": 1.0}}
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    read = clocks.reader("0000:65:00.0")
    assert read is not None and read() == FULL and ("nvmlDeviceGetHandleByPciBusId", b"0000:65:00.0") in nvml.asked
    nvml.answers["nvmlInit"] = FakeNvml.NVMLError(12)
    assert clocks.reader("0000:65:00.0") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clocks.reader("0000:65:00.0") is None
    with clocks.sampled(None) as readings:
        assert readings == []


def run_check(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "benchmarks/gpu_check.sh"), *words]
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "TMPDIR": scratch}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_command_without_a_gpu() -> None:
    done = run_check("machine")
    assert done.returncode == 2 and "JAX sees no NVIDIA GPU" in done.stderr


def test_the_page_of_a_card_that_is_not_here(tmp_path: Path) -> None:
    """Made where JAX cannot be imported."""
    results = results_of(tmp_path, COPY | {("kernels", LAYERNORM): record(**{"us": 50.0, "GB/s": 3600.0})})
    results.save()
    before = results.json_file.read_bytes()
    code = "import sys; sys.modules['jax'] = None; from benchmarks import gpu_check; sys.exit(gpu_check.main())"
    command = [sys.executable, "-c", code, "--page", str(results.json_file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(results.page)), done.stderr
    assert results.json_file.read_bytes() == before
    text = results.page.read_text()
    assert "| layernorm_forward, C=768 | 75.0 % | 85.0 % | 90.0 % |" in text
    shown = [line for line in text.splitlines() if line.startswith(("## kernels", "## machine", "| what"))]
    assert len(shown) == 3 and all("NVIDIA H200" in line for line in shown)


def test_the_committed_page_is_that_of_its_results(tmp_path: Path) -> None:
    for file in result_files(ROOT / "benchmarks/results"):
        for each in file.parent.glob(f"{file.stem}*.json"):
            shutil.copyfile(each, tmp_path / each.name)
        assert gpu_check.page_of(tmp_path / file.name).read_text() == file.with_suffix(".md").read_text(), file.name


@pytest.mark.slow
def test_everything_in_small(tmp_path: Path) -> None:
    done = run_check("--tiny", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "gpu_tiny.json").read_text())
    names = [tuple(record[:2]) for record in kept["records"]]
    assert sorted(names) == sorted((item.part, item.name) for item in plan(tiny=True))
    assert "has the bits of 'first'" in done.stdout and "no figure here means anything" in done.stdout
    assert "machine: copy: GB/s" in done.stdout and "llmc: d12 bf16 B=32: skipped: $LLMC" in done.stdout
