"""The run folder: llm.c's log lines, metrics at full precision, and what happens when something is in the way."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax import runlog
from llmc_jax.errors import FormatError, InputError
from llmc_jax.runlog import RunLog, create_run_folder, read_metrics

OPTIONS = {"learning_rate": 3e-4, "output_dir": Path("out"), "inputs": ("a", "b"), "seed": None}
MODEL = {"num_layers": 2, "channels": 32}


def _log(folder: Path, reuse: bool = False) -> RunLog:
    return RunLog(folder, OPTIONS, MODEL, reuse=reuse, device={"kind": "cpu"})


def _train(log: RunLog, step: int, loss: Any = 4.0, **changes: Any) -> None:
    fields = {"norm": 1.0, "lr": 1e-4, "ms": 12.5, "tokens_per_second": 5e3, "tokens": (step + 1) * 256}
    log.train(step, loss=loss, **{**fields, **changes})


# ---- the folder


def test_new_folders_of_one_second_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runlog.time, "strftime", lambda _: "20250102-030405")
    folders = [create_run_folder("", "gpt3:c768", reuse=False) for _ in range(3)]
    assert [str(f) for f in folders] == [
        "runs/20250102-030405-gpt3-c768",
        "runs/20250102-030405-gpt3-c768-2",
        "runs/20250102-030405-gpt3-c768-3",
    ]
    assert all(f.is_dir() for f in folders)


@pytest.mark.parametrize("name", ["", "../..", "/a/b/c.bin", "x" * 500, "d12\n"])
def test_any_name_makes_a_folder_inside_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = create_run_folder("", name, reuse=False)
    assert folder.parent == Path("runs") and folder.resolve().parent == tmp_path.resolve() / "runs"


def test_a_folder_with_files_is_refused_unless_reused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert create_run_folder(str(empty), "d12", reuse=False) == empty
    (empty / "main.log").write_text("s:0 tel:1.0000\n")
    with pytest.raises(InputError, match=r"choose another -o, or -y 1"):
        create_run_folder(str(empty), "d12", reuse=False)
    (empty / "model_00000002.bin").write_bytes(b"")
    (empty / "model_00000010.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"start from its weights with -e \S+model_00000010\.bin$"):
        create_run_folder(str(empty), "d12", reuse=False)
    assert create_run_folder(str(empty), "d12", reuse=True) == empty
    assert create_run_folder(str(tmp_path / "a/b/c"), "d12", reuse=False).is_dir()
    assert list((tmp_path / "a/b/c").iterdir()) == []  # the trial of writing left nothing


def test_a_file_in_the_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").write_text("")
    for output_dir in ("runs", "runs/inside", ""):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match="a file is in the way"):
            create_run_folder(output_dir, "d12", reuse=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot write"):
        create_run_folder(str(tmp_path), "d12", reuse=True)


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> NoReturn:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(runlog.tempfile, "TemporaryFile", fail)
    with pytest.raises(InputError, match=r"cannot write to the folder \(Read-only file system\)"):
        create_run_folder(str(tmp_path / "out"), "d12", reuse=False)


# ---- the lines


def test_main_log_is_llmcs(tmp_path: Path) -> None:
    with _log(tmp_path) as log:
        log.val(0, loss=11.00918, batches=20)
        _train(log, 0, loss=np.float32(11.009131), lr=8.571428e-07, norm=15.3666)
        _train(log, 1, loss=float("nan"), norm=float("inf"), skipped=True)
    assert (tmp_path / "main.log").read_bytes() == (
        b"s:0 tel:11.0092\ns:0 trl:11.0091 lr:0.000001 norm:15.37\ns:1 trl:nan lr:0.000100 norm:inf\n"
    )


def test_events_are_written_before_the_log_is_closed(tmp_path: Path) -> None:
    log = _log(tmp_path)
    log.event("start", tokens=0)
    log.val(0, loss=5.5, batches=3)
    _train(log, 0, loss=5.25)
    log.sample(1, "def f():\n    \x1b", tokens=64)
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"event": "start", "tokens": 0},
        {"event": "val", "step": 0, "loss": 5.5, "batches": 3},
        {
            "event": "train",
            "step": 0,
            "loss": 5.25,
            "norm": 1.0,
            "lr": 1e-4,
            "ms": 12.5,
            "tokens_per_second": 5e3,
            "skipped": False,
            "tokens": 256,
        },
        {"event": "sample", "step": 1, "tokens": 64, "text": "def f():\n    \x1b"},
    ]
    assert (tmp_path / "samples.txt").read_text() == "step 1, 64 tokens\n---\ndef f():\n    \x1b\n---\n"
    log.close()


@given(st.floats(width=32))
def test_a_float32_comes_back_with_the_same_bits(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    folder = tmp_path_factory.mktemp("run")
    with _log(folder) as log:
        _train(log, 0, loss=np.float32(value))
    line = (folder / "metrics.jsonl").read_text()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (event,) = read_metrics(folder / "metrics.jsonl")
    back = np.float32(event["loss"])
    assert back.tobytes() == np.float32(value).tobytes() or (math.isnan(back) and math.isnan(value))


def test_reuse_continues_the_files_and_a_new_run_empties_them(tmp_path: Path) -> None:
    for reuse, expected in ((False, [0]), (True, [0, 0]), (False, [0])):
        with _log(tmp_path, reuse) as log:
            _train(log, 0)
        assert [e["step"] for e in read_metrics(tmp_path / "metrics.jsonl")] == expected
        assert len((tmp_path / "main.log").read_text().splitlines()) == len(expected)


@pytest.mark.parametrize("torn", [b"", b'{"event": "tr', b"x" * 200_000])
def test_a_torn_last_line_is_dropped_on_reading_and_on_reuse(tmp_path: Path, torn: bytes) -> None:
    with _log(tmp_path) as log:
        _train(log, 0)
    for name in ("metrics.jsonl", "main.log"):
        with (tmp_path / name).open("ab") as file:
            file.write(torn)
    assert [e["step"] for e in read_metrics(tmp_path / "metrics.jsonl")] == [0]
    with _log(tmp_path, reuse=True) as log:
        _train(log, 1)
    assert [e["step"] for e in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    lines = (tmp_path / "main.log").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["s:0", "s:1"]


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"event"')
    _log(tmp_path, reuse=True).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@given(st.binary(max_size=300))
def test_reading_any_bytes_gives_events_or_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_bytes(b'{"event": "val", "step": 0, "loss": "nan"}\n' + data)
    try:
        events = read_metrics(path)
    except FormatError as error:
        assert "line" in str(error) and str(path) in str(error)
    else:
        assert math.isnan(events[0]["loss"])
        assert len(events) == 1 + data.count(b"\n")


def test_damage_within_the_file_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "val"}\nnot json\n{"event": "val"}\n')
    with pytest.raises(FormatError, match="line 2"):
        read_metrics(path)
    path.write_text("[1]\n")
    with pytest.raises(FormatError, match="not a JSON object"):
        read_metrics(path)
    with pytest.raises(InputError, match="cannot read"):
        read_metrics(tmp_path / "missing")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["main.log", "metrics.jsonl"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with _log(tmp_path, reuse=True) as log, pytest.raises(InputError, match=f"{name}: .*No space left"):
        _train(log, 0)


def test_a_folder_in_place_of_a_log_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "main.log").mkdir()
    with pytest.raises(InputError, match=r"main\.log: cannot open"):
        _log(tmp_path, reuse=True)


# ---- the configuration


def test_config_holds_options_shape_and_versions(tmp_path: Path) -> None:
    _log(tmp_path).close()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["options"] == {"learning_rate": 3e-4, "output_dir": "out", "inputs": ["a", "b"], "seed": None}
    assert config["model"] == MODEL
    assert config["device"] == {"kind": "cpu"}
    assert {"python", "jax", "jaxlib", "numpy", "llmc-jax"} == set(config["versions"])
    assert config["versions"]["numpy"] == np.__version__
    assert config["command_line"] and config["platform"] and config["started"]


def test_reuse_keeps_the_earlier_configurations(tmp_path: Path) -> None:
    for step in range(3):
        RunLog(tmp_path, {"run": step}, MODEL, reuse=step > 0).close()
    names = ["config-1.json", "config-2.json", "config.json"]
    assert [json.loads((tmp_path / n).read_text())["options"]["run"] for n in names] == [0, 1, 2]


def test_git_state_tells_the_commit_and_changes(tmp_path: Path) -> None:
    assert runlog.git_state(tmp_path) is None

    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert runlog.git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "modified": False}
    (tmp_path / "file").write_text("2")
    state = runlog.git_state(tmp_path)
    assert state is not None and state["modified"]


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.bin"
    runlog.write_atomic(path, b"old")

    def fail(_: int) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(InputError, match=r"out\.bin: cannot write it: No space left"):
        runlog.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]
    monkeypatch.undo()
    runlog.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
