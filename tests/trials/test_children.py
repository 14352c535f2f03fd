"""Measuring processes that fail in every way: each failure costs one task, and the rest goes on in a new process."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.trials import children
from llmc_jax.trials.children import ROOT, Children, Outcome, Stuck, Task

FAKE = """
import os, signal, sys, time
from llmc_jax.trials.figures import NotMeasured

def measure(what, seconds=0.0):
    if what == "mistake":
        raise ValueError("no such shape")
    if what == "spoilt":
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    if what == "skipped":
        raise NotMeasured("not here")
    if what == "abort":
        os.abort()
    if what == "exit":
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    print("chatter that is no message")
    time.sleep(seconds)
    return {"pid": os.getpid()}
"""


def task(what: str, limit: float = 20.0, **more: Any) -> Task:
    return Task(what, "fake_measurement", {"what": what, **more}, limit)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which a child finds the module above."""
    folder = tmp_path_factory.mktemp("fake")
    folder.joinpath("fake_measurement.py").write_text(FAKE)
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def outcomes(fake: dict[str, str]) -> Iterator[list[Outcome]]:
    """One run of all."""
    with closing(Children(fake)) as running:
        names = ["good", "mistake", "skipped", "good", "spoilt", "good", "abort", "exit", "good"]
        found = [running.measure(task(name)) for name in names]
        found.append(running.measure(task("hangs", 1.0, seconds=60.0)))
        found.append(running.measure(task("good")))
        yield found


def test_each_failure_costs_one_task(outcomes: list[Outcome]) -> None:
    kinds = ["DONE", "FAILED", "SKIPPED", "DONE", "SPOILT", "DONE", "SPOILT", "SPOILT", "DONE", "SPOILT", "DONE"]
    assert [each.kind for each in outcomes] == kinds
    processes = [each.content["pid"] for each in outcomes if each.kind == "DONE"]
    assert processes[0] == processes[1] and len(set(processes)) == 4


def test_what_is_told(outcomes: list[Outcome]) -> None:
    assert outcomes[1].content == "ValueError: no such shape" and outcomes[2].content == "not here"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in outcomes[4].content
    assert "status -6" in outcomes[6].content
    assert "status 3" in outcomes[7].content and "last words" in outcomes[7].content
    assert outcomes[9].content == "not done after 1 s" and 1.0 <= outcomes[9].seconds < 60


def test_time_is_up(fake: dict[str, str]) -> None:
    """What the end of everything interrupts has failed in no way."""
    with closing(Children(fake)) as running:
        assert running.measure(task("good"), time.monotonic() - 1).kind == "TIME"
        assert running.measure(task("good"), time.monotonic() + 20).kind == "DONE"


def test_a_process_that_does_not_die_is_reported(fake: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been killed and is waited for, but not for ever."""
    monkeypatch.setattr(children, "END_SECONDS", 0.1)
    running = Children(fake)
    running.measure(task("good"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(subprocess.Popen, "wait", _never)
        running.close()
    assert running.stuck is not None
    with pytest.raises(Stuck):
        running.measure(task("good"))


def _never(self: Any, timeout: float) -> int:
    raise subprocess.TimeoutExpired("child", timeout)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_a_child_ends_when_its_parent_is_gone(fake: dict[str, str], tmp_path: Path) -> None:
    code = """
import os
from llmc_jax.trials.children import Children, Task
running = Children(dict(os.environ))
print(running.measure(Task("good", "fake_measurement", {"what": "good"}, 20.0)).content["pid"], flush=True)
running._child.ask(Task("long", "fake_measurement", {"what": "good", "seconds": 600.0}, 600.0), 0.0)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=fake, cwd=ROOT, check=False)
    child = int(done.stdout.split()[0])
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {child} is still there")
