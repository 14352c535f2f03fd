"""The state of a run: from its events, and from whether its process is still there."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.logs import state
from llmc_jax.logs.state import DIED, RUNNING, UNKNOWN, RunState, Seen, after, own_process, read_state, run_state

NOW = 1_800_000_000.0


def start(kind: str = "start", step: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "step": step, "steps": 100, "host": "elsewhere", "pid": 7, "time": NOW, **fields}


def train(step: int, at: float) -> dict[str, Any]:
    return {"event": "train", "step": step, "loss": 3.0, "time": NOW + at}


def of(*events: dict[str, Any], now: float = NOW, runs: bool | None = None) -> RunState:
    with patch.object(state, "is_there", lambda *_: runs):
        return run_state(reduce(after, events, Seen()), now)


@pytest.fixture(scope="module")
def sleeper() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_steps_done_and_planned_and_the_last_event() -> None:
    found = of(start(), train(0, 1), train(1, 2), now=NOW + 5, runs=True)
    assert (found.state, found.step, found.steps, found.last, found.silent) == (RUNNING, 2, 100, NOW + 2, 3.0)
    assert (found.started, found.host) == (NOW, "elsewhere")
    assert found.event == train(1, 2)


@pytest.mark.parametrize("outcome", ["done", "stopped", "diverged", "bad_input"])
def test_a_run_has_ended_as_its_last_event_says(outcome: str) -> None:
    end = {"event": "end", "step": 2, "outcome": outcome, "time": NOW + 3}
    found = of(start(), train(0, 1), train(1, 2), end, runs=True)
    assert (found.state, found.step, found.ended) == (outcome, 2, True)
    later = of(start(), end, {"event": "tracker", "time": NOW + 4}, runs=False)
    assert later.state == outcome  # what is written behind it changes nothing
    assert of(start(), end, start("resume", 2), runs=True).state == RUNNING  # but another start does


def test_without_an_end_the_process_tells() -> None:
    assert of(start(), train(0, 1), now=NOW + 1e6, runs=True).state == RUNNING  # however silent it is
    died = of(start(), train(0, 1), now=NOW + 2, runs=False)
    assert (died.state, died.ended, died.last, died.event) == (DIED, True, NOW + 1, train(0, 1))


def test_where_no_process_can_be_seen_silence_leaves_the_state_unknown() -> None:
    events = [start(), *(train(step, 40.0 * step) for step in range(1, 4))]
    usual = state.PAUSES * 40.0
    assert of(*events, now=NOW + 120 + usual).state == RUNNING
    silent = of(*events, now=NOW + 121 + usual)
    assert (silent.state, silent.ended, silent.silent) == (UNKNOWN, False, usual + 1)


def test_compiling_may_take_long() -> None:
    assert of(start(), now=NOW + state.COMPILING).state == RUNNING
    assert of(start(), train(0, 1), now=NOW + state.COMPILING).state == UNKNOWN


def test_older_files_have_no_times_and_no_process(tmp_path: Path) -> None:
    found = of({"event": "start", "step": 0, "steps": 9}, {"event": "train", "step": 3, "loss": 1.0})
    assert (found.state, found.step, found.steps, found.last, found.silent) == (UNKNOWN, 4, 9, None, None)
    assert read_state(tmp_path).state == UNKNOWN and read_state(tmp_path).event is None


@given(st.lists(st.dictionaries(
    st.sampled_from(["event", "step", "steps", "time", "pid", "host", "outcome", "machine"]),
    st.sampled_from(["start", "resume", "train", "end"]) | st.none() | st.booleans() | st.integers() | st.floats()
    | st.text(max_size=3) | st.lists(st.integers(), max_size=1),
), max_size=6))  # fmt: skip
def test_events_of_any_shape_have_a_state(events: list[dict[str, Any]]) -> None:
    found = run_state(reduce(after, events, Seen()), NOW)
    assert isinstance(found.state, str)
    assert found.silent is None or found.silent >= 0


# ---- the process


def process_of(number: int, **fields: Any) -> dict[str, Any]:
    return {**own_process(), "pid": number, **fields}


def test_a_process_is_there_until_it_is_not(sleeper: subprocess.Popen) -> None:
    assert state.is_there(process_of(os.getpid()), time.time()) is True
    assert state.is_there(process_of(sleeper.pid), time.time()) is True
    gone = subprocess.Popen([sys.executable, "-c", ""])
    while psutil.Process(gone.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert state.is_there(process_of(gone.pid), time.time()) is False  # nobody has asked for its status yet
    gone.wait()
    assert state.is_there(process_of(gone.pid), time.time()) is False


def test_a_process_that_began_later_has_only_its_number(sleeper: subprocess.Popen) -> None:
    began = psutil.Process(sleeper.pid).create_time()
    assert state.is_there(process_of(sleeper.pid), began - 60) is False
    assert state.is_there(process_of(sleeper.pid), began) is True


@pytest.mark.parametrize(
    "fields",
    [{"host": "elsewhere"}, {"machine": "another boot/1"}, {"pid": None}, {"pid": "7"}, {"pid": -1}, {"pid": 0}],
)
def test_elsewhere_no_process_is_asked_for(fields: dict[str, Any]) -> None:
    assert state.is_there(process_of(os.getpid(), **fields), time.time()) is None


@pytest.mark.parametrize(("error", "found"), [(PermissionError, None), (ProcessLookupError, False)])
def test_of_a_process_that_is_hidden_silence_tells(
    error: type[OSError], found: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_seen(pid: int) -> None:
        raise psutil.NoSuchProcess(pid)

    def kill(pid: int, number: int) -> None:
        assert number == 0
        raise error

    monkeypatch.setattr(psutil, "Process", none_seen)
    monkeypatch.setattr(os, "kill", kill)
    assert state.is_there(process_of(7), time.time()) is found


def test_a_number_that_no_process_has_is_no_error() -> None:
    assert state.is_there(process_of(10**30), time.time()) in (True, False)


def test_the_state_of_a_folder(tmp_path: Path, sleeper: subprocess.Popen) -> None:
    began = time.time()
    events = [start(**process_of(sleeper.pid), time=began), {**train(4, 0), "time": began}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "en')
    found = read_state(tmp_path)
    assert (found.state, found.step, found.host) == (RUNNING, 5, platform.node())
