"""The command itself: what it prints and writes, and the one line that it says to what it cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.library import estimate
from llmc_jax.plan.answer import Answer, as_json
from llmc_jax.plan.command import OWN, main
from llmc_jax.plan.network import BETWEEN

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["-e", "L2-NH2-C64-V300-T64", "-b", "2", "-t", "64", "--gpu", "h100", "--quick"]


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    assert main(list(words)) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    text, _ = run(capsys, *words, "--quick", "--json", "-")
    return json.loads(text)


def test_help_names_every_flag_and_needs_no_jax(tmp_path: Path) -> None:
    code = "import sys; from llmc_jax.plan.command import main; main(['--help']); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"  {own.flags[0]}" in done.stdout for own in OWN)
    assert max(map(len, done.stdout.splitlines())) <= 110
    assert f"between machines (default: {BETWEEN})" in " ".join(done.stdout.split())
    assert done.stdout.isascii()  # as those of the other programs: any terminal can show it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h1000"], "h1000"),
        (["--gpu"], "its value must follow"),
        (["-e", "d13"], "-e d13: no such model"),
        (["-e", "none.bin"], "-e none.bin: no such file"),
        (["-e", "{file}"], "{file}: "),
        (["-t", "99"], "the model knows 64 positions"),
        (["-d", "100"], "-d 100: an update's tokens must be a multiple of 128"),
        (["-d", "256", "--devices", "3"], "times 3 devices"),
        (["--devices", "0"], "--devices 0: "),
        (["--devices", "-1"], "--devices -1: "),
        (["--price", "nan"], "--price nan: price must be a number"),
        (["--price", "-1"], "--price -1: "),
        (["--tokens", "many"], "--tokens many: "),
        (["--network", "0"], "--network 0: network must be above 0"),
        (["--sweep", "devices=1,2", "--operations"], "--operations and --sweep"),
        (["--sweep", "devices"], "--sweep devices: "),
        (["--sweep", "speed=1"], "--sweep speed: "),
        (["--json", "{file}/a.json"], "there is no folder"),
        (["--json", "."], "it is a folder"),
        (["--nonsense"], "--nonsense: unknown flag"),
    ],
)
def test_one_line_says_what_is_wrong(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"no checkpoint at all")
    text, error = run(capsys, *SMALL, *(word.format(file="file") for word in words), status=2)
    (line,) = error.splitlines()
    assert line.startswith("llmc-jax plan: ") and said.format(file="file") in line and not text


def test_every_problem_of_its_own_flags_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, error = run(capsys, *SMALL, "--price", "nan", "--tokens", "x", "--network", "-3", status=2)
    assert [flag in error for flag in ("--price", "--tokens", "--network")] == [True] * 3


def test_the_json_is_what_the_function_returns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    report, _ = run(capsys, *SMALL, "--json", str(path))
    found = estimate(SMALL[:-3], gpu="h100")
    assert isinstance(found, Answer)
    assert json.loads(path.read_text()) == json.loads(json.dumps(as_json(found)))
    assert "NVIDIA H100" in report


def test_a_sweep_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    rows = planned(capsys, *SMALL, "--sweep", "b=2,3")["sweep"]
    assert [(row["value"], row["config"]["batch_size"]) for row in rows] == [("2", 2), ("3", 3)]
    assert all(row["answer"]["memory"]["fits"] for row in rows)


def test_a_reader_that_leaves_early_ends_it_quietly(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as lost:
        monkeypatch.setattr("sys.stdout", lost)
        assert main(SMALL) == 0
    assert capfd.readouterr().err == ""


def test_presets_and_launches_of_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """llm.c's launch needs neither its data nor its eight GPUs here."""
    found = planned(capsys, "--preset", "gpt2-124M", "--gpu", "a100", "-pn", "8")["setting"]
    assert (found["model"], found["devices"], found["zero_stage"], found["micro_batches"]) == ("d12", 8, 1, 1)
    assert found["tokens"] == 524288


def test_what_does_not_fit_is_an_answer_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "-e", "d48", "-b", "4", "--gpu", "rtx4090")
    assert found["memory"]["fits"] is False and found["memory"]["spare"] < 0
    assert {row["batch_size"] for row in found["largest"]} == {None}
    assert all(row["program"] > found["memory"]["available"] for row in found["largest"])
