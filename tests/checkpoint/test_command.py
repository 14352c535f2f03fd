"""`llmc-jax checkpoint`: table, exit status; and that checking needs neither orbax nor JAX."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.command import main
from tests.checkpoint.damage import flip

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("template")
    for step, loss in ((100, 3.51234), (200, None)):
        arrays = {
            "params/wte": np.full((128, 64), step, np.float32),
            "copy/wte": np.zeros((128, 64), ml_dtypes.bfloat16),
            "step": np.array(step, np.int32),
        }
        facts = {"format": 2, "step": step, "val_loss": loss, "model": {"channels": 64}, "order": list(range(20))}
        store.seal(store.begin(run, step, arrays, facts))
    return run


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def test_all_good(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    head, first, second, verdict = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "size", "val", "loss", "health"]
    assert first.split() == ["100", f"{store.entry(run, 100).bytes / 1000:.2f}", "kB", "3.5123", "good"]
    assert second.split()[3:] == ["-", "good"]
    assert verdict == "2 checkpoints, 0 bad"


def test_a_flipped_bit_and_a_missing_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run / "state_00000100" / "tensors" / "copy.wte" / "c" / "0" / "0", 100)
    (run / "state_00000200" / "run.json").unlink()
    assert main(["verify", str(run)]) == 2
    _, first, second, verdict = capsys.readouterr().out.splitlines()
    assert first.endswith("  BAD: tensors/copy.wte/c/0/0: damaged: elements 0 to 8,191 are not what was saved")
    assert second.endswith("  BAD: run.json: is missing")
    assert verdict == "2 checkpoints, 2 bad"
    assert main(["verify", "--quick", str(run)]) == 2
    _, first, second, verdict = capsys.readouterr().out.splitlines()
    assert first.endswith("  complete, contents not read")
    assert verdict == "2 checkpoints, 1 bad"


def test_a_missing_done_is_told_and_no_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "DONE_00000200").unlink()
    for flags, health in (([], "good"), (["--quick"], "complete, contents not read")):
        assert main(["verify", *flags, str(run)]) == 0
        _, first, second, _ = capsys.readouterr().out.splitlines()
        assert first.endswith(f"  {health}") and f"  {health}; DONE_00000200 is missing" in second
    flip(run / "state_00000200" / "run.json", 0)
    assert main(["verify", "--json", str(run)]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] == str(run) and found["contents_read"] is True
    first, second = found["checkpoints"]
    size, facts = store.entry(run, 100).bytes, ("step", "bytes", "val_loss", "problem", "done", "healthy")
    assert [first[name] for name in facts] == [100, size, 3.51234, None, True, True]
    assert (second["done"], second["healthy"]) == (False, False)


def test_one_state_folder(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(run / "state_00000100", run / "best")  # under another name, with no DONE_ file
    assert main(["verify", str(copy)]) == 0
    flip(copy / "MANIFEST.json", 100)
    assert main(["verify", str(copy)]) == 2
    assert "BAD: MANIFEST.json: damaged" in capsys.readouterr().out
    monkeypatch.chdir(run / "state_00000100")
    assert main(["verify", "."]) == 0


def test_folders_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["verify", f"{tmp_path}/nowhere"], "nowhere: there is no such folder"),
        (["verify", str(tmp_path)], f"{tmp_path}: has no checkpoint"),
        (["verify", "--json", str(tmp_path)], f"{tmp_path}: has no checkpoint"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("llmc-jax checkpoint: ") and error.endswith(f"{expected}\n"), words
    (tmp_path / "file").touch()
    assert main(["verify", str(tmp_path / "file")]) == 2
    assert "file: cannot be read: Not a directory" in capsys.readouterr().err
    for name in ("DONE_00000010", "model_00000010.bin", "state_00000010_00000.bin"):
        (tmp_path / name).touch()
    assert main(["verify", str(tmp_path)]) == 2
    assert "its state_*.bin files are llm.c's" in capsys.readouterr().err


def test_as_a_program_it_needs_neither_orbax_nor_jax(run: Path) -> None:
    """Names that the terminal cannot show are escaped."""
    (run / "state_00000100" / "ä").touch()
    code = (
        "import runpy, sys; sys.modules['jax'] = sys.modules['orbax'] = None; "
        "sys.argv[1:1] = ['checkpoint']; runpy.run_module('llmc_jax', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "verify", str(run)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr == "" and "2 checkpoints, 1 bad" in done.stdout
    assert r"BAD: \xe4: is not part of the checkpoint" in done.stdout
