"""The command itself: what it prints and writes, and the one line that it says to what it cannot do."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc_jax.plan.efficiency import Roof
from llmc_jax.plan.program import Program
from llmc_jax.profile import measure, modes, trace
from llmc_jax.profile.command import OWN, main

RATES = Roof(1e11, 1e10)
MODEL = ["-e", "L2-NH2-C32-V300-T16", "-b", "2", "-t", "16"]


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    assert main(list(words)) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = run(capsys, "--help")
    assert all(f"  {own.flags[0]}" in text for own in OWN)
    assert max(map(len, text.splitlines())) <= 110


def test_a_reader_that_leaves_early_ends_it_quietly(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as lost:
        monkeypatch.setattr("sys.stdout", lost)
        assert main(["--help"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps"], "its value must follow"),
        (["--steps", "0"], "at least 1"),
        (["--steps", "x"], "must be a whole number"),
        (["--vs", "speed=1"], "there is no flag"),
        (["-i", "x"], "reads no data"),
        (["--output-dir=x"], "--output-dir: a profile writes no run"),
        (["--no-such-flag"], "unknown flag"),
        (["-b", "0"], "at least 1"),
        (["-t", "99"], "the model knows 16 positions"),
        (["--trace", "{file}/x"], "a trace cannot be written there"),
        (["--json", "{file}/x/y.json"], "there is no folder"),
    ],
)
def test_one_line_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "file").write_text("")
    _, error = run(capsys, *MODEL, *(word.format(file=tmp_path / "file") for word in words), status=2)
    assert said in error and error.startswith("llmc-jax profile: ") and len(error.splitlines()) == 1


@pytest.fixture(scope="module", autouse=True)
def known_rates() -> Iterator[None]:
    """This CPU was measured before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "calibration", lambda *_: SimpleNamespace(roof=RATES))
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one run writes."""
    folder = tmp_path_factory.mktemp("profile")
    words = ["--steps", "3", "--traced", "2", "--trace", str(folder / "trace")]
    assert main([*MODEL, *words, "--json", str(folder / "out.json")]) == 0
    return folder


@pytest.mark.slow
def test_every_operation_of_the_model_is_in_the_table(measured: Path) -> None:
    plain: dict[str, Any] = json.loads((measured / "out.json").read_text())
    found = {(each["phase"], each["operation"]) for each in plain["operations"]}
    for operation in ("embedding", "ln1", "qkv", "attention", "attproj", "ln2", "fc", "gelu", "fcproj"):
        assert {("forward", operation), ("backward", operation)} <= found
    assert {("forward", "head"), ("forward", "classifier"), ("update", "adamw"), ("update", "norm")} <= found
    assert plain["operations"] and not plain["problem"]


def test_times_add_up_to_the_step(measured: Path) -> None:
    plain = json.loads((measured / "out.json").read_text())
    total = sum(each["seconds"] for each in plain["operations"])
    rest = plain["unknown_seconds"] + plain["idle_seconds"]
    assert total + rest == pytest.approx(plain["step_seconds"], rel=0.01)
    assert plain["unknown_seconds"] < 0.02 * plain["step_seconds"]
    assert plain["roof"] == RATES._asdict() and any(each["floor"] for each in plain["operations"])
    assert plain["tokens"] == 32 and plain["memory_used"]["overwritten"] > 0


def test_a_trace_is_kept_with_what_it_is_of(measured: Path) -> None:
    assert Program((measured / "trace" / trace.PROGRAM).read_text()).name.startswith("jit_")
    assert list((measured / "trace").glob("plugins/profile/*/*.trace.json.gz"))


def test_a_trace_without_the_names_of_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All but the table is there."""
    graph = trace.Trace((trace.Span("command_buffer", 0.0, 1e6, "Stream #1"),), ((0.0, 1e6),))
    monkeypatch.setattr(modes, "read_trace", lambda *_: graph)
    text, error = run(capsys, *MODEL, "--steps", "1", "--traced", "1", "--json", str(tmp_path / "j"))
    assert "100 %" in error and len(error.splitlines()) == 1
    found = json.loads((tmp_path / "j").read_text())
    assert "tok/s" in text and found["seconds"]["runs"] == 1 and found["problem"] and not found["operations"]


@pytest.mark.slow
def test_what_is_traced_on_a_gpu_is_a_program_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Here with another option of XLA in place of the one for CUDA graphs, which a CPU does not know."""
    monkeypatch.setattr(measure.compiling, "without_graphs", lambda *_: (("xla_cpu_enable_fast_min_max", True),))
    run(capsys, *MODEL, "--steps", "1", "--traced", "1", "--json", str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["traced_without_graphs"] and found["operations"] and not found["problem"]
