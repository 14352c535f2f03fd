"""benchmarks/gpu_check.sh without a GPU: its plan, what its numerics see, its verdicts, what a crash costs."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import gpu_check, roofline
from benchmarks.gpu import resume, steps, targets
from benchmarks.gpu.plan import PARTS, Item, plan
from benchmarks.gpu.programs import step_times
from benchmarks.gpu.results import DONE, FAILED, SKIPPED, Record, Results, page
from llmc_jax import deviceless, hardware, kernels
from llmc_jax.config import parse_descriptor
from llmc_jax.kernels import GROUPS
from llmc_jax.params import flat_size
from llmc_jax.trials import problems
from llmc_jax.trials.lines import heard, tell
from tests.aot.cases import public_kernels

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
    assert {part for part, _ in names} == set(PARTS)
    assert [part for part, _ in names] == sorted((part for part, _ in names), key=list(PARTS).index)
    assert all(item.fresh for item in items if item.xla_flags)
    json.dumps([item._asdict() for item in items])  # what a process is told


def test_every_kernel_is_checked() -> None:
    """Every public kernel has numerics; what a run chooses between has times that decide it."""
    checked = {item.arguments["function"] for item in plan() if item.part == "numerics"} - {"model"}
    assert checked == set(problems.MODULES)
    for name in public_kernels():
        module, _, function = name.partition(".")
        assert problems.MODULES[function.removesuffix("_forward").removesuffix("_backward")
                                if "attention" in function else function] == module  # fmt: skip
    assert {*targets.COMPARED, "attention"} == set(GROUPS)


def test_sizes_of_the_flat_buffers() -> None:
    sizes = {item.arguments["sizes"][0] for item in plan() if item.arguments.get("function") == "global_norm"}
    assert sizes == {flat_size(parse_descriptor("d12")), flat_size(parse_descriptor("d48"))}


def test_no_step_falls_back_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for can run on an H200; else a line would show the time of something else."""
    monkeypatch.setattr(kernels, "this_machine", lambda: kernels.Machine("gpu", "NVIDIA H200", "9.0"))
    for item in plan():
        if item.module == "steps":
            asked, config = item.arguments, parse_descriptor(item.arguments["model"])
            _, runs = steps.choose(
                config, asked["dtype"], asked.get("kernels", "auto"), asked.get("attention", "auto"),
                asked.get("gelu_fusion", -1), interpret=False,
            )  # fmt: skip
            if asked.get("kernels") == "xla":
                assert "xla: layernorm, gelu, classifier" in runs
            if "attention" in asked:
                assert f"{asked['attention']}" in runs.replace("naive, xla", "naive")


@pytest.mark.slow
def test_every_kernel_of_the_plan_lowers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of the plan's shapes, for an H200."""
    monkeypatch.setattr(problems, "target", lambda: "sm_90")
    done = set()
    for item in plan():
        given = dict(item.arguments)
        ours = given.get("implementation", "pallas") in ("pallas", "mma", "wgmma", "wgmma2")
        if item.module not in ("numerics", "times") or not ours or given["function"] == "model" or "tuning" in given:
            continue
        options = {name: given[name] for name in ("rounding", "master_weights") if name in given}
        how = {"name": given.get("implementation", "pallas"), "form": given.get("form", "")}
        key = str([given["function"], given["dtype"], given["sizes"], options, how])
        if key in done:
            continue
        done.add(key)
        made = {}

        def arrays(given: dict[str, Any] = given, options: Any = options, made: Any = made) -> Any:
            made["problem"] = problems.problem(given["function"], given["dtype"], given["sizes"], 0, **options)
            return made["problem"].arrays

        structs = jax.eval_shape(arrays)
        run = made["problem"].bind(problems.implementation(given["function"], **how))
        deviceless.lower_for(lambda *arrays, run=run: run(*arrays), structs, "h200")
    assert len(done) > 100


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
    text = page(results, targets.summary(results), targets.measured_lines(results, "x.md"))
    assert "not to be believed" in text and "## Wrong" in text
    assert '("sm_90", "classifier"): ("pallas", "x.md"),  # pallas 1,500 us, xla 5,000 us' in text


def test_measured_lines_name_the_fastest(tmp_path: Path) -> None:
    attention = "attention bf16 64x1024x12x64 implementation="
    results = results_of(tmp_path, {
        ("kernels", "adamw_update bf16 124518400"): record(**{"us": 900.0, "xla us": 800.0}),
        ("kernels", "global_norm bf16 124518400"): record(FAILED, "RESOURCE_EXHAUSTED"),
        ("kernels", attention + "wgmma"): record(us=900.0),
        ("kernels", attention + "cudnn"): record(us=1000.0),
        ("kernels", "relu_attention bf16 64x1024x12x64 implementation=mma"): record(us=1.0),
    })  # fmt: skip
    lines = targets.measured_lines(results, "x.md")
    assert '("sm_90", "adamw"): ("xla", "x.md")' in lines and '("sm_90", "attention"): ("flash", "x.md")' in lines
    assert "attention_sizes of pallas_kernels/tuning.py: version wgmma on sm_90" in lines
    assert len(lines.splitlines()) == 3
    results.records["numerics", "attention bf16 2x63x3x64 implementation=wgmma"] = record(verdict="WRONG: …")
    assert '("sm_90", "attention"): ("cudnn", "x.md")' in targets.measured_lines(results, "x.md")


def test_repetition(tmp_path: Path) -> None:
    bits = {"losses": "a", "state": "b"}
    results = results_of(tmp_path, {
        ("repeat", "first"): record(**bits), ("repeat", "again"): record(**bits),
        ("repeat", "-r 1"): record(**bits | {"state": "c"}),
    })  # fmt: skip
    (line,) = targets.repetition(results)
    assert "'again' has the bits of 'first'" in line and "'-r 1' DIFFERS from 'first'" in line


def test_continued_runs(tmp_path: Path) -> None:
    at = {"resumed at": 5, "state": "a"}
    results = results_of(tmp_path, {
        ("resume", "killed, compile cache kept"): record(verdict="right: the same bits", **at),
        ("resume", "killed, compile cache deleted"): record(bits="from step 7 other bits", **at),
        ("resume", "save of d12 bf16"): record(**{"of a 524,288-token step": 0.06}),
    })  # fmt: skip
    (line,) = targets.resumption(results)
    assert "kept': right: the same bits; " in line and "deleted': from step 7 other bits." in line
    assert results.wrong() == {}
    assert "| time that a save adds, d12, bf16 | 5.0 % | 5.0 % | 6.0 % | NOT MET |" in targets.summary(results)
    results.records["resume", "killed, compile cache kept"] = record(verdict="WRONG: from step 6 other bits", **at)
    assert list(results.wrong()) == [("resume", "killed, compile cache kept")]


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
    assert again.copy_rate() == 4000.0
    items = [item, item._replace(name="read"), item._replace(name="more")]
    again.add(items[1], record(SKIPPED, "not here"))
    again.add(items[2], record(FAILED, "crashed"))
    assert gpu_check.left(again, items) == [items[1]]  # what could not be measured is tried again, a failure is not


def test_messages(capsys: pytest.CaptureFixture[str]) -> None:
    tell("DONE", "a | b", {"us": 1.5, "runs": "x\ny"})
    assert heard(capsys.readouterr().out.rstrip("\n")) == ("DONE", "a | b", {"us": 1.5, "runs": "x\ny"})
    assert heard("DONE with it") is None and heard("2026 warning") is None


def test_llmc_output() -> None:
    cuda = """| step    1/20 | loss
step    1/20 | loss 10.98 (+nanz)| norm 15.3 (+nanz)| lr 3.00e-04 | 318.37 ms | 40.9% bf16 MFU | 205656 tok/s
step    2/20 | loss 9.8 (+nanz)| norm 5.31 (+nanz)| lr 3.00e-04 | 118.40 ms | 40.9% bf16 MFU | 553656 tok/s
val loss 9.5
"""
    assert step_times(cuda) == [318.37, 118.40]
    fp32 = """step    1/74: train loss 4.367631 (acc 4.367631) (80.639 ms, 50800 tok/s)
step    2/74: train loss 4.031242 (77.4 ms, 52900 tok/s)
"""
    assert step_times(fp32) == [80.639, 77.4]


# ----- whole runs ---------------------------------------------------------------------------------------------------


def check_in(folder: Path) -> gpu_check.Check:
    (folder / "scratch").mkdir()
    return gpu_check.Check(Results(folder, "tiny"), folder / "scratch", tiny=True)


def test_a_crash_costs_one_line(tmp_path: Path) -> None:
    """A mistake, a process that dies, one that takes too long: all is told, the rest goes on."""
    good = {"what": "read", "sizes": [4096], "dtype": "bf16"}
    items = [
        Item("machine", "mistake", "machine", {"what": "product", "sizes": [1], "dtype": "bf16"}),
        Item("machine", "good", "machine", good),
        Item("machine", "dies", "machine", good, fresh=True, xla_flags="--xla_no_such_flag=1"),
        Item("machine", "too long", "machine", good, fresh=True, seconds=-30),
        Item("machine", "good too", "machine", good),
    ]
    check = check_in(tmp_path)
    assert check.run_part("machine", items, time.monotonic() + 300)
    found = {name: record for (_, name), record in check.results.records.items()}
    assert [found[item.name].status for item in items] == [FAILED, DONE, FAILED, FAILED, DONE]
    assert "ValueError" in found["mistake"].message
    assert "xla_no_such_flag" in found["dies"].message
    assert "not done after" in found["too long"].message
    assert found["good too"].figures["GB/s"] > 0


def test_time_is_up(tmp_path: Path) -> None:
    check = check_in(tmp_path)
    item = Item("machine", "copy", "machine", {"what": "copy", "sizes": [4096], "dtype": "bf16"})
    assert not check.run_part("machine", [item], time.monotonic() + 1)
    assert not check.results.records


def run_check(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "benchmarks/gpu_check.sh"), *words]
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "TMPDIR": scratch}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_command(tmp_path: Path) -> None:
    output = ["--tiny", "--output", str(tmp_path)]
    first = run_check(*output, "machine", "llmc")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "machine: copy: GB/s" in first.stdout and "llmc: d12 bf16 B=32: skipped: $LLMC" in first.stdout
    kept = json.loads((tmp_path / "gpu_tiny.json").read_text())
    assert {(part, name) for part, name, *_ in kept["records"]} == {
        (item.part, item.name) for item in plan(tiny=True) if item.part in ("machine", "llmc")
    }
    listed = run_check(*output, "--list")
    assert "machine: copy: done" in listed.stdout and "step: d12 bf16 B=64: not measured" in listed.stdout
    again = run_check(*output, "--only", "copy")  # unnamed parts: only what is missing, here nothing
    assert "machine: done before" in again.stdout and "machine: copy" not in again.stdout
    assert "no figure here means anything" in first.stdout


def test_summary_of_nothing(tmp_path: Path) -> None:
    summary = targets.summary(results_of(tmp_path, {}))
    assert "| step, d12, bf16 | 560,000 tok/s | 620,000 tok/s |  | not measured |" in summary


def test_the_command_needs_a_gpu_and_known_parts() -> None:
    done = run_check("machine")
    assert done.returncode == 2 and "JAX sees no NVIDIA GPU" in done.stderr
    done = run_check("machines")
    assert done.returncode == 2 and "there is no part machines; the parts are machine, numerics" in done.stderr


@pytest.mark.slow
def test_everything_in_small(tmp_path: Path) -> None:
    done = run_check("--tiny", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "gpu_tiny.json").read_text())
    assert [record[:2] for record in kept["records"]] == [[item.part, item.name] for item in plan(tiny=True)]
    assert "has the bits of 'first'" in done.stdout


# ----- the roofline -------------------------------------------------------------------------------------------------


def roofline_lines(**change: Any) -> list[roofline.Line]:
    shape = roofline.Shape(64, 1024, recompute=0, dtype="bf16", flash=True)
    rates = roofline.estimated("NVIDIA H200", "bf16")._replace(**change)
    return roofline.lines(roofline.step_work(parse_descriptor("d12"), shape), rates, {})


def test_roofline_counts_the_products() -> None:
    """Of which 6 N T are those of the weights, and attention's 7 half squares (llm.c and PaLM count 6 or 12)."""
    config, n, T = parse_descriptor("d12"), 64 * 1024, 1024
    C, L = config.channels, config.num_layers
    found = sum(line.flops for line in roofline_lines())
    weights = hardware.flops_per_token(config, T) - 6 * L * C * T
    matrices = 6 * (12 * L * C * C + config.padded_vocab_size * C)
    attention = 7 * L * C * (T + 1)
    assert found == n * (matrices + attention)
    assert found == pytest.approx(n * (weights + attention), rel=0.01)


def test_roofline_floor() -> None:
    slow = {line.operation: line for line in roofline_lines(bandwidth=1e6) if line.phase == "forward"}
    fast = {line.operation: line for line in roofline_lines(bandwidth=1e20) if line.phase == "forward"}
    assert {line.bound for line in slow.values()} == {"memory"}
    assert fast["qkv"].floor == pytest.approx(12 * 6 * 65536 * 768**2 / (0.7 * 989.4e12))
    assert fast["classifier"].flops == 0 and fast["gelu"].bytes == 12 * 2 * 8 * 65536 * 768


def test_roofline_with_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    operations = [("forward", "qkv", 0.002, 0), ("forward", "qkv", 0.008, 1), ("update", "adamw", 0.1, None)]
    names = ("phase", "operation", "seconds", "layer")
    content = {
        "operations": [dict(zip(names, each, strict=True)) for each in operations],
        "shape": {"batch": 64, "sequence": 1024, "dtype": "bf16"},
        "device": {"kind": "NVIDIA H200"},
    }
    file.write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        roofline.main(["--measured", str(file), "-b", "32"])
    assert "is of NVIDIA H200, batch 64, sequence 1024, dtype bf16" in capsys.readouterr().err
    roofline.main(["--measured", str(file)])
    rows = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("| forward", "| update", "| backward"))
    ]
    assert rows[0].startswith("| update | adamw |") and "| 100.00 |" in rows[0]  # the largest gap first
    assert rows[1].startswith("| forward | qkv |") and "| 10.00 |" in rows[1]


def test_roofline_with_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = results_of(tmp_path, COPY | {
        ("kernels", "gelu_forward bf16 65536x3072"): record(us=250.0),
        ("kernels", "attention bf16 64x1024x12x64 implementation=cudnn"): record(**{
            "forward us": 400.0, "backward us": 1000.0, "forward TFLOP/s": 300.0, "backward TFLOP/s": 290.0}),
    })  # fmt: skip
    results.save()
    roofline.main(["--measured", str(results.json_file)])
    out = capsys.readouterr().out
    assert "measured where gpu_nvidia_h200.json has them" in out
    (gelu,) = [line for line in out.splitlines() if line.startswith("| forward | gelu |")]
    assert "| 2.42 | 2.42 |" in gelu and "| 3.00 |" in gelu  # 9.66 GB at 4 TB/s; twelve layers of 250 us
    with pytest.raises(SystemExit):
        roofline.main(["--measured", str(results.json_file), "--gpu", "NVIDIA B200"])
    assert "is of NVIDIA H200, not of --gpu NVIDIA B200" in capsys.readouterr().err


def test_roofline_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main(["-e", "d12", "-b", "64", "-t", "1024", "--gpu", "NVIDIA H200"])
    assert (ROOT / "benchmarks/results/roofline.md").read_text() == capsys.readouterr().out
