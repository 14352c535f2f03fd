"""The run folder: llm.c's log lines, metrics at full precision, and what happens when something is in the way."""

import errno
import fcntl
import itertools
import json
import math
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.contents import Counters
from llmc_jax.run.figures import StepFigures
from llmc_jax.run.folder import RunLog, config_record, create_run_folder, cut_logs, locked, write_config
from tests.metrics import read_metrics

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # however busy the machine is


def refuses(number: int) -> Callable[..., NoReturn]:
    """A function of the system that ends with this error."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return refuse


def full_at(nth: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the system whose call of this number finds the disk full."""
    calls = itertools.count(1)
    return lambda *given: (refuses(errno.ENOSPC) if next(calls) == nth else call)(*given)


def _train(log: RunLog, step: int, loss: Any = 4.0, **changes: Any) -> None:
    figures = StepFigures(step, loss, norm=1.0, lr=1e-4, ms=12.5, tokens_per_second=5e3, tokens=(step + 1) * 256)
    log.train(figures._replace(**changes))


@pytest.fixture(autouse=True, scope="module")
def _no_clock() -> Iterator[None]:
    """Two runs of these tests are one moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 0.0)
        yield


# ---- the folder


def test_new_folders_of_one_second_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20250102-030405")
    folders = [create_run_folder("", "gpt3:c768", reuse=False)[0] for _ in range(3)]
    assert [str(f) for f in folders] == [f"runs/20250102-030405-gpt3-c768{number}" for number in ("", "-2", "-3")]
    assert all(f.is_dir() for f in folders)


@pytest.mark.parametrize("name", ["", "../..", "/a/b/c.bin", "x" * 500, "d12\n"])
def test_any_name_makes_a_folder_inside_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _ = create_run_folder("", name, reuse=False)
    assert folder.parent == Path("runs") and folder.resolve().parent == tmp_path.resolve() / "runs"


def test_a_folder_with_files_is_refused_unless_reused(tmp_path: Path) -> None:
    assert create_run_folder(str(tmp_path), "d12", reuse=False) == (tmp_path, [])
    (tmp_path / "main.log").write_text("s:0 tel:1.0000\n")
    with pytest.raises(InputError, match=r"choose another -o, or -y 1"):
        create_run_folder(str(tmp_path), "d12", reuse=False)
    assert create_run_folder(str(tmp_path), "d12", reuse=True) == (tmp_path, [])
    assert create_run_folder(str(tmp_path / "a/b/c"), "d12", reuse=False)[1] == [
        tmp_path / n for n in ("a/b/c", "a/b", "a")
    ]
    assert list((tmp_path / "a/b/c").iterdir()) == []  # the trial of writing left nothing


@pytest.mark.parametrize("output_dir", ["", "a/b"])
def test_a_folder_of_no_use_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuses(errno.ENOSPC))
    for there in ([], ["a"], ["a/b", "runs"]):
        for name in there:
            (tmp_path / name).mkdir(exist_ok=True)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(InputError, match="No space left on device"):
            create_run_folder(output_dir, "d12", reuse=False)
        assert sorted(tmp_path.rglob("*")) == before


# ---- the lines


def test_main_log_is_llmcs(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.val(0, loss=11.00918, batches=20)
        _train(log, 0, loss=np.float32(11.009131), lr=8.571428e-07, norm=15.3666)
        _train(log, 1, loss=float("nan"), norm=float("inf"), skipped=True)
    assert (tmp_path / "main.log").read_bytes() == (
        b"s:0 tel:11.0092\ns:0 trl:11.0091 lr:0.000001 norm:15.37\ns:1 trl:nan lr:0.000100 norm:inf\n"
    )


def test_events_are_written_before_the_log_is_closed(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.event("start", tokens=0)
        log.val(0, loss=5.5, batches=3)
        _train(log, 0, loss=5.25)
        log.sample(1, "def f():\n    \x1b", tokens=64)
        step = {"loss": 5.25, "norm": 1.0, "lr": 1e-4, "ms": 12.5, "tokens_per_second": 5e3, "skipped": False}
        expected = [
            {"event": "start", "tokens": 0},
            {"event": "val", "step": 0, "loss": 5.5, "batches": 3},
            {"event": "train", "step": 0, **step, "tokens": 256},
            {"event": "sample", "step": 1, "tokens": 64, "text": "def f():\n    \x1b"},
        ]
        assert read_metrics(tmp_path / "metrics.jsonl") == [{**each, "time": 0.0} for each in expected]
        assert (tmp_path / "samples.txt").read_text() == "step 1, 64 tokens\n---\ndef f():\n    \x1b\n---\n"


@UNHURRIED
@given(st.floats(width=32))
def test_a_float32_comes_back_with_the_same_bits(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    folder = tmp_path_factory.mktemp("run")
    with RunLog(folder) as log:
        _train(log, 0, loss=np.float32(value))
    line = (folder / "metrics.jsonl").read_text()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (event,) = read_metrics(folder / "metrics.jsonl")
    back = np.float32(event["loss"])
    assert back.tobytes() == np.float32(value).tobytes() or (math.isnan(back) and math.isnan(value))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["main.log", "metrics.jsonl"])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    with RunLog(tmp_path) as log, pytest.raises(InputError, match=f"{name}: .*No space left"):
        _train(log, 0)


def test_a_pipe_in_place_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "main.log").mkdir()  # a folder is none either
    with pytest.raises(InputError, match=r"main\.log: cannot open"):
        RunLog(tmp_path)
    (tmp_path / "main.log").rmdir()
    os.mkfifo(tmp_path / "main.log")
    with pytest.raises(InputError, match=r"main\.log: cannot open"):
        RunLog(tmp_path)
    reader = os.open(tmp_path / "main.log", os.O_RDONLY | os.O_NONBLOCK)
    with RunLog(tmp_path) as log:  # somebody reads it
        log.val(0, loss=1.0, batches=1)
        log.sync()
        assert os.read(reader, 100) == b"s:0 tel:1.0000\n"
    os.close(reader)


# ---- the logs of a run that is continued


class Planned(NamedTuple):
    """What a run does; 0: never."""

    val_every: int
    sample_every: int
    save_every: int
    gpu_every: int
    texts: tuple[str, ...]
    broken: frozenset[int]  # steps that are not finite


TEXTS = st.text(max_size=12) | st.sampled_from(["---\n", "\ud800", "\u2028\x85\r", ""])
plans = st.builds(
    Planned, *[st.integers(0, 4)] * 4,
    texts=st.lists(TEXTS, min_size=1, max_size=4).map(tuple),
    broken=st.frozensets(st.integers(0, 12), max_size=3),
)  # fmt: skip


def write_run(
    folder: Path, plan: Planned, last: int, validated: bool = True, sampled: bool = True, evaluated: bool = True
) -> Path:
    """The logs of a run that ends after `last` steps; there too it validates, evaluates and samples, or was stopped
    before.
    """

    def due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    folder.mkdir()
    with RunLog(folder) as log:
        log.event("start", step=0, steps=100)
        for step in range(last + 1):
            if due(plan.val_every, step) and (validated or step < last):
                log.val(step, loss=5 - step / 7, batches=3)
            if step > 0 and due(plan.val_every, step) and (evaluated or step < last):
                log.accuracy(step, items=7, correct=3, correct_norm=step % 7)
            if due(plan.sample_every, step) and (sampled or step < last):
                log.sample(step, plan.texts[step % len(plan.texts)], tokens=step)
            if due(plan.save_every, step):
                log.event("checkpoint", step=step, path=f"state_{step:08d}")
            if step < last:
                loss = math.nan if step in plan.broken else 5 - step / 7
                _train(log, step, loss=np.float32(loss), skipped=step in plan.broken)
                if due(plan.gpu_every, step + 1):
                    log.event("gpu", step=step, watts=300.0)
    return folder


def counters_at(step: int, validated: bool, sampled: bool, evaluated: bool) -> Counters:
    """Return what a checkpoint says was done at its step."""
    return Counters(
        *(0, 0, None), *(step if done else -1 for done in (validated, sampled)), 0, step if evaluated else -1
    )


def logs_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("main.log", "metrics.jsonl", "samples.txt")}


@UNHURRIED
@given(plan=plans, end=st.integers(0, 12), data=st.data(), torn=st.sampled_from([b"", b'{"event": "tr', b"s:3 tr"]))
def test_cut_logs_are_those_of_a_run_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, plan: Planned, end: int, data: st.DataObject, torn: bytes
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    step = data.draw(st.integers(0, end), "step")
    done = data.draw(st.tuples(*[st.booleans()] * 3), "validated, sampled, evaluated")
    found = write_run(folder / "found", plan, end)
    expected = logs_of(write_run(folder / "expected", plan, step, *done))
    for name in ("main.log", "metrics.jsonl"):
        with (found / name).open("ab") as file:
            file.write(torn)
    for _ in range(2):  # a second time changes nothing: a run may be killed right after the first
        cut_logs(found, step, counters_at(step, *done))
        assert logs_of(found) == expected
    (found / "samples.txt").write_bytes(b"whatever was there when the run was killed")
    cut_logs(found, step, counters_at(step, *done))
    assert logs_of(found) == expected
    assert sorted(path.name for path in found.iterdir()) == ["main.log", "metrics.jsonl", "samples.txt"]
    cut_logs(found, None)
    assert set(logs_of(found).values()) == {b""}


def test_llmcs_own_log_is_cut_too(tmp_path: Path) -> None:
    """llm.c validates before the update of a step, as we do, and writes HellaSwag's accuracy as eval."""
    lines = [
        "s:0 tel:11.0317", "s:0 eval:0.2487", "s:0 trl:11.0317 lr:0.000001 norm:15.37",
        "s:1 trl:10.9 lr:0.000002 norm:15.1",
        "s:2 tel:10.5", "s:2 eval:0.2490", "s:2 trl:10.4 lr:0.000003 norm:9.00",
        "s:3 trl:nan lr:0.000004 norm:-nan", "s:4 tel:9.8",
    ]  # fmt: skip
    cases = [
        (0, "", 0), (0, "validated", 1), (0, "validated evaluated", 2), (1, "", 3), (2, "sampled", 4),
        (2, "validated", 5), (2, "validated evaluated", 6), (3, "validated", 7), (4, "validated", 9), (10**9, "", 9),
    ]  # fmt: skip
    for step, done, count in cases:
        (tmp_path / "main.log").write_text("".join(f"{line}\n" for line in lines))
        cut_logs(tmp_path, step, Counters(**dict.fromkeys(done.split(), step)))
        assert (tmp_path / "main.log").read_text().splitlines() == lines[:count], (step, done)
    assert [path.name for path in tmp_path.iterdir()] == ["main.log"]  # what is not there is not made


def test_a_whole_log_of_llmc(shared: Path, tmp_path: Path) -> None:
    whole = (shared / "data" / "llmc_124M_8xH100_main.log").read_bytes()
    path = tmp_path / "main.log"
    path.write_bytes(whole)
    last = int(whole.rstrip(b"\n").split(b"\n")[-1].split()[0][2:])
    assert last > 10_000
    cut_logs(tmp_path, last + 1)
    assert path.read_bytes() == whole
    cut_logs(tmp_path, 10_000, counters_at(10_000, True, True, True))
    assert whole.startswith(path.read_bytes())
    after = whole[len(path.read_bytes()) :].split(b"\n")[0]
    assert after.startswith(b"s:10000 trl:")


def test_lines_that_cannot_be_understood_stay(tmp_path: Path) -> None:
    odd_log = ["# a note of mine", "s:9 abc:1", "s:-1 trl:2", "s:99999999999999999999999 trl:1", "", "s:9", "\udcff"]
    odd_events = [
        "not json", "[1]", "7", '{"event": "val"}', '{"event": "x"}', '{"event": 3, "step": 9}', '{"step": 9}', "",
        '{"event": "val", "st', '{"event": "val", "step": "9"}', '{"event": "val", "step": 9.5}',
        "[" * 100_000, "\udcff",
    ]  # fmt: skip
    log = "".join(f"{line}\n" for line in [*odd_log, "s:9 trl:1 lr:1 norm:1"])
    (tmp_path / "main.log").write_text(log, errors="surrogateescape")
    events = [*odd_events, '{"event": "train", "step": 9}', '{"event": "sample", "step": 2}']
    text = "".join(f"{line}\n" for line in events).encode(errors="surrogateescape")
    (tmp_path / "metrics.jsonl").write_bytes(text)
    cut_logs(tmp_path, 5)
    assert (tmp_path / "main.log").read_text(errors="surrogateescape").splitlines() == odd_log
    left = (tmp_path / "metrics.jsonl").read_bytes().decode(errors="surrogateescape").split("\n")
    assert left == [*odd_events, '{"event": "sample", "step": 2}', ""]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_cut_that_fails_leaves_whole_files_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    plan = Planned(1, 1, 2, 0, ("a", "b"), frozenset())
    found = write_run(tmp_path / "found", plan, 6)
    before, after = logs_of(found), logs_of(write_run(tmp_path / "expected", plan, 3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_at(nth, os.replace))
        with pytest.raises(InputError, match="No space left on device"):
            cut_logs(found, 3, counters_at(3, True, True, True))
    half = logs_of(found)
    assert [half[name] == before[name] for name in half] == [k + 1 >= nth for k in range(3)]
    assert [half[name] == after[name] for name in half] == [k + 1 < nth for k in range(3)]
    assert not [path for path in found.iterdir() if path.name.startswith(".")]
    cut_logs(found, 3, counters_at(3, True, True, True))
    assert logs_of(found) == after


def test_a_sync_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLog(tmp_path) as log:
        monkeypatch.setattr(os, "fsync", refuses(errno.EIO))
        with pytest.raises(InputError, match=r"main\.log: cannot write to it: Input/output error"):
            log.sync()


def test_a_line_that_cannot_be_written_leaves_no_half(tmp_path: Path) -> None:
    """Else the next event would be glued to it, and the file could not be read again."""
    with RunLog(tmp_path) as log:
        _train(log, 0)
        before = (tmp_path / "main.log").read_bytes()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limit[1]))  # so much more can be written
        try:
            with pytest.raises(InputError, match=r"main\.log: cannot write to it"):
                _train(log, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert (tmp_path / "main.log").read_bytes() == before
        _train(log, 1)
    assert (tmp_path / "main.log").read_bytes().count(b"\n") == 2


def test_a_log_that_leads_nowhere_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "main.log").symlink_to(os.devnull)
    cut_logs(tmp_path, 0)
    with RunLog(tmp_path) as log:
        _train(log, 0)
        log.sync()
    assert (tmp_path / "main.log").is_symlink()
    assert [each["step"] for each in read_metrics(tmp_path / "metrics.jsonl")] == [0]


# ---- one process at a time


def test_a_lock_ends_with_its_block_however_it_ends(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path):
        for _ in range(2):  # a refusal leaves no lock of its own, and takes none away
            with pytest.raises(InputError, match="another process is training in this folder"), locked(tmp_path):
                pytest.fail("the folder is locked twice")
        (tmp_path / "other").mkdir()
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path):
        pass


def test_a_folder_that_is_held_knows_where_it_is(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    with locked(run) as held:
        held.check()
        run.rename(other)
        assert not held.is_there()
        run.mkdir()  # another one
        with pytest.raises(InputError, match=f"^{re.escape(str(run))}: is no longer the folder"):
            held.check()
        run.rmdir()
        other.rename(run)
        held.check()
        run.rmdir()
        with pytest.raises(InputError, match="is no longer the folder"):
            held.check()


def test_a_folder_replaced_while_it_is_locked_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with monkeypatch.context() as patch, pytest.raises(InputError, match="is no longer the folder"):
        patch.setattr(fcntl, "flock", lambda *_: run.rename(tmp_path / "other"))
        with locked(run):
            pytest.fail("it is locked where it no longer is")


@pytest.mark.parametrize("name", ["main.log", "metrics.jsonl", "samples.txt"])
def test_a_log_that_was_replaced_is_not_written(tmp_path: Path, name: str) -> None:
    """It would be lost with the file that only this process still has."""
    path = tmp_path / name
    with RunLog(tmp_path) as log:

        def write() -> None:
            _train(log, 0)
            log.sample(0, "a", 1)

        write()
        path.rename(tmp_path / "moved")
        for _ in range(2):
            with pytest.raises(InputError, match=f"{name}: is no longer the file that this run writes"):
                write()
            path.write_text("of somebody else")
        (tmp_path / "moved").replace(path)
        write()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_file_systems_without_locks_guard_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with locked(tmp_path) as held:
        assert held.guarded
    monkeypatch.setattr(fcntl, "flock", refuses(number))
    with locked(tmp_path) as held, locked(tmp_path):
        assert not held.guarded
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_lock_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", refuses(number))
    with pytest.raises(InputError, match=rf"cannot be locked \({os.strerror(number)}\)"), locked(tmp_path):
        pytest.fail("it is not locked")


# ---- the configuration


def test_a_configuration_holds_what_json_can_hold(tmp_path: Path) -> None:
    options = {"learning_rate": 3e-4, "output_dir": Path("out"), "inputs": ("a", "b"), "seed": None}
    write_config(tmp_path, config_record(options, {"channels": 32}, {"kind": "cpu"}))
    config = json.loads((tmp_path / "config.json").read_bytes())
    assert config["options"] == {"learning_rate": 3e-4, "output_dir": "out", "inputs": ["a", "b"], "seed": None}
    assert (config["model"], config["device"]) == ({"channels": 32}, {"kind": "cpu"})
    assert {"python", "jax", "jaxlib", "numpy", "llmc-jax"} == set(config["versions"])
    assert config["command_line"] and config["platform"] and config["started"]
    assert all(isinstance(value, str) for value in config["environment"].values())


def test_the_command_line_is_kept_without_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "-i", "https://me:secret@host/x", "-o", "a@b"])
    assert config_record({}, {}, {})["command_line"].endswith(" -i https://…@host/x -o a@b")


@pytest.mark.parametrize("nth", [1, 2])
def test_of_the_configuration_and_the_kernels_both_are_written_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    write_config(tmp_path, {"start": 1}, {"kernels": 1})
    monkeypatch.setattr(Path, "write_bytes", full_at(nth, Path.write_bytes))
    with pytest.raises(InputError, match=r"json: cannot write it: No space left"):
        write_config(tmp_path, {"start": 2}, {"kernels": 2})
    assert json.loads((tmp_path / "config.json").read_bytes()) == {"start": 1}
    assert json.loads((tmp_path / "kernels.json").read_bytes()) == {"kernels": 1}
    assert len(list(tmp_path.iterdir())) == 2
    write_config(tmp_path, {"start": 3}, {"kernels": 3})
    assert json.loads((tmp_path / "kernels.json").read_bytes()) == {"kernels": 3}
