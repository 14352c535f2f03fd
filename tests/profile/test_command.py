"""The command itself: what it prints and writes, and the one line that it says to what it cannot do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.machine import device as hardware
from llmc_jax.profile import measure, modes, trace
from llmc_jax.profile.command import OWN, main

MODEL = ["-e", "L2-NH2-C32-V300-T16", "-b", "2", "-t", "16"]


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    assert main(list(words)) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = run(capsys, "--help")
    assert all(f"  {own.flags[0]}" in text for own in OWN)
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("words", [["--help"], [*MODEL, "--calculate", "--json", "all.json"]], ids=["help", "table"])
def test_a_reader_that_leaves_early_ends_it_quietly(
    words: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as lost:
        monkeypatch.setattr("sys.stdout", lost)
        assert main(words) == 0
    assert capfd.readouterr().err == ""
    assert (tmp_path / "all.json").exists() == ("--json" in words)  # what a file was asked for is written all the same


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps"], "its value must follow"),
        (["--steps", "0"], "at least 1"),
        (["--steps", "x"], "must be a whole number"),
        (["--layers=2"], "takes no value"),
        (["--vs", "speed=1"], "there is no flag"),
        (["-i", "x"], "reads no data"),
        (["--output-dir=x"], "--output-dir: a profile writes no run"),
        (["--no-such-flag"], "unknown flag"),
        (["-b", "0"], "at least 1"),
        (["-t", "99"], "the model knows 16 positions"),
        (["--trace", "{file}/x"], "a trace cannot be written there"),
        (["--json", "{file}/x/y.json"], "there is no folder"),
        (["--read", "{file}.none"], "has no program.hlo.txt"),
        (["--calculate", "--device", "h1000"], "'h1000'"),
        (["--calculate", "-e", "no-such.bin"], "no such file"),
        (["--calculate", "--json", "."], ".: cannot be written: it is a folder"),
        (["--calculate", "--json", "{file}/x.json"], "there is no folder"),
        (["--calculate", "--device", "Tesla T4", "--dtype", "bf16"], "does not compute in bf16"),
    ],
)
def test_one_line_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "file").write_text("")
    _, error = run(capsys, *MODEL, *(word.format(file=tmp_path / "file") for word in words), status=2)
    assert said in error and error.startswith("llmc-jax profile: ") and len(error.splitlines()) == 1


def test_a_gpu_may_have_its_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (run(capsys, *MODEL, "--calculate", "--device", name)[0] for name in ("h200", "NVIDIA H200"))
    assert short == long


def test_calculate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "d12.json"
    words = ("-e", "d12", "-b", "4", "-t", "64", "--calculate", "--kernels", "pallas", "--strict-kernels", "--json")
    text, _ = run(capsys, *words, str(out))
    assert "124,475,904" in text
    assert "floor ms" not in text
    plain = json.loads(out.read_text())
    scalars = 8 + 4 * (2 * 128 + 1)  # two counters; the window of the outliers and its count
    assert plain["memory_bytes"]["state"] == 3 * 4 * 124_518_400 + scalars
    assert sum(each["flops"] for each in plain["operations"]) == plain["products_flops"]


def test_calculate_takes_hugging_faces_folder_and_shapes_before_folders(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(__file__).resolve().parents[1] / "golden" / "hugging_face"
    sizes = json.loads((folder / "config.json").read_text())
    run(capsys, "-e", str(folder), "-b", "2", "-t", "8", "--calculate", "--json", str(tmp_path / "hf.json"))
    found = json.loads((tmp_path / "hf.json").read_text())["activation_bytes"]
    monkeypatch.chdir(tmp_path)
    shape = f"L{sizes['n_layer']}-NH{sizes['n_head']}-C{sizes['n_embd']}-V{sizes['vocab_size']}-T{sizes['n_positions']}"
    Path(shape).mkdir()  # as `-o` with such a name leaves it
    run(capsys, "-e", shape, "-b", "2", "-t", "8", "--calculate", "--json", "shape.json")
    assert json.loads(Path("shape.json").read_text())["activation_bytes"] == found


def test_calculate_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 and attention without the T x T matrix by themselves; floors from the table of GPUs."""
    text, _ = run(capsys, "-e", "d12", "-b", "64", "-t", "1024", "--calculate", "--device", "NVIDIA H200", "--layers")
    assert "803,478,528 per token" in text
    assert "floor ms" in text and "without the T x T matrix" in text
    step = next(line for line in text.splitlines() if line.split()[:1] == ["step"])
    assert 53.5 < float(step.split()[-1].replace(",", "")) < 100  # 52.9 TFLOP at 989 TFLOP/s, and what waits for memory


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run writes."""
    folder = tmp_path_factory.mktemp("profile")
    words = ["--steps", "3", "--traced", "2", "--layers", "--trace", str(folder / "trace")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "array_bytes", lambda cache, memory: 1 << 20)
        assert main([*MODEL, *words, "--json", str(folder / "out.json")]) == 0
    return folder


def test_every_operation_of_the_model_is_in_the_table(measured: Path) -> None:
    plain: dict[str, Any] = json.loads((measured / "out.json").read_text())
    found = {(each["phase"], each["operation"], each["layer"]) for each in plain["operations"]}
    for layer in (0, 1):
        for operation in ("ln1", "qkv", "attention", "attproj", "ln2", "fc", "gelu", "fcproj"):
            assert {("forward", operation, layer), ("backward", operation, layer)} <= found
    assert {("forward", "head", None), ("forward", "classifier", None), ("update", "adamw", None)} <= found
    assert {("forward", "embedding", None), ("backward", "embedding", None), ("update", "norm", None)} <= found
    assert plain["operations"] and not plain["problem"]


def test_times_add_up_to_the_step(measured: Path) -> None:
    plain = json.loads((measured / "out.json").read_text())
    total = sum(each["seconds"] for each in plain["operations"])
    rest = plain["unknown_seconds"] + plain["idle_seconds"]
    assert total + rest == pytest.approx(plain["step_seconds"], rel=0.01)
    assert plain["unknown_seconds"] < 0.02 * plain["step_seconds"]
    assert plain["tokens"] == 32 and plain["memory_used"]["overwritten"] > 0


def test_the_rates_that_the_floors_come_from(measured: Path) -> None:
    """The fastest product is at least as fast as all together; what is in the caches has no floor."""
    plain = json.loads((measured / "out.json").read_text())
    rates = plain["rates"]
    assert rates["measured"] and rates["cache"] == hardware.cache_bytes()
    assert rates["flops"] >= rates["products"] > 0 and rates["memory"] >= rates["reading"] > 0
    assert {each["bound"] for each in plain["operations"] if not each["flops"] and each["bytes"]} == {"cache"}
    assert json.loads((measured / "trace/step.json").read_text())["roof"]["cache"] == rates["cache"]


def test_the_table_of_a_trace_from_before(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((measured / "out.json").read_text())
    text, _ = run(capsys, "--read", str(measured / "trace"), "--layers", "--json", str(measured / "again.json"))
    again = json.loads((measured / "again.json").read_text())
    assert again == {name: before[name] for name in again}
    assert "attention" in text and "products" in text
    assert list((measured / "trace").glob("plugins/profile/*/*.trace.json.gz"))


def test_a_trace_without_the_names_of_kernels(
    measured: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading it is refused in a line; measuring has all but the table."""
    graph = trace.Trace((trace.Span("command_buffer", 0.0, 1e6, "Stream #1"),), ((0.0, 1e6),), True)
    monkeypatch.setattr(modes, "read_trace", lambda *_: graph)
    text, error = run(capsys, "--read", str(measured / "trace"), status=2)
    assert text == "" and "100 %" in error and len(error.splitlines()) == 1
    monkeypatch.setattr(measure, "array_bytes", lambda cache, memory: 1 << 20)
    text, error = run(capsys, *MODEL, "--steps", "1", "--traced", "1", "--json", str(tmp_path / "j"))
    assert "100 %" in error and len(error.splitlines()) == 1
    found = json.loads((tmp_path / "j").read_text())
    assert "tok/s" in text and found["seconds"]["runs"] == 1 and found["problem"] and not found["operations"]


def test_what_is_traced_on_a_gpu_is_a_program_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Here with another option of XLA in place of the one for CUDA graphs, which a CPU does not know."""
    monkeypatch.setattr(measure, "array_bytes", lambda cache, memory: 1 << 20)
    monkeypatch.setattr(measure.compiling, "without_graphs", lambda *_: (("xla_cpu_enable_fast_min_max", True),))
    run(capsys, *MODEL, "--steps", "1", "--traced", "1", "--json", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["traced_without_graphs"] and found["operations"] and not found["problem"]
