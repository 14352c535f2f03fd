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

from llmc_jax.models import family
from llmc_jax.trials import children, worker
from llmc_jax.trials.children import ROOT, Children, Outcome, Stuck, Task
from tests.families import TOY, shape_of

FAKE = """
import os, signal, sys, time
from llmc_jax.trials.children import NotMeasured, running

def measure(what, seconds=0.0, shape=None):
    if shape:
        from llmc_jax.models.layout import num_parameters
        return {"parameters": num_parameters(shape)}
    if what == "mistake":
        raise ValueError("no such shape")
    if what == "spoilt":
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    if what == "skipped":
        raise NotMeasured("not here")
    if what == "abort":
        os.abort()
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "disk":
        raise OSError(28, "No space left on device")
    if what == "hangs":
        with running():
            time.sleep(60)
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
        names = ["mistake", "good", "skipped", "good", "spoilt", "good", "abort", "exit", "good"]
        found = [running.measure(task(name)) for name in names]
        found.append(running.measure(task("hangs", 2.0)))
        found.append(running.measure(task("good")))
        found += [running.measure(task(name)) for name in ("killed", "disk", "good")]
        yield found


def test_each_failure_costs_one_task(outcomes: list[Outcome]) -> None:
    kinds = ["FAILED", "DONE", "SKIPPED", "DONE", "FAILED", "DONE", "FAILED", "FAILED", "DONE", "FAILED", "DONE"]
    kinds += ["UNJUDGED", "UNJUDGED", "DONE"]
    assert [each.kind for each in outcomes] == kinds
    processes = [each.content["pid"] for each in outcomes if each.kind == "DONE"]
    assert processes[0] == processes[1] and len(set(processes)) == 5


def test_a_process_knows_the_family_of_a_users_file(fake: dict[str, str]) -> None:
    """Of the one that began it, whose shapes are among the tasks."""
    shape = shape_of("toy-V61-C8-T16", TOY)
    with closing(Children(fake | {family.VARIABLE: str(TOY)})) as running:
        found = running.measure(Task("shape", "fake_measurement", {"what": "shape", "shape": shape}, 20.0))
    assert (found.kind, found.content) == ("DONE", {"parameters": 976})


def test_what_is_told(outcomes: list[Outcome]) -> None:
    assert outcomes[0].content == "ValueError: no such shape" and outcomes[2].content == "not here"
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in outcomes[4].content
    assert "status -6" in outcomes[6].content
    assert "status 3" in outcomes[7].content and "last words" in outcomes[7].content
    assert outcomes[9].content == "not done after 2 s" and 2.0 <= outcomes[9].ran <= outcomes[9].seconds < 60
    assert "status -9" in outcomes[11].content and "No space left" in outcomes[12].content


COMPILED, RAN, DONE = ("RUNNING", True), ("RUNNING", False), ("DONE", 1)


@pytest.mark.parametrize("answers, kind, ran", [
    ([(41, DONE)], "UNJUDGED", 0),
    ([(39, COMPILED), (39, RAN), (39, DONE)], "DONE", 0),
    ([(39, COMPILED), (41, RAN)], "FAILED", 40),
    ([(1, COMPILED), (1, RAN), (41, COMPILED)], "UNJUDGED", 0),
    ([(39, COMPILED), (39, RAN), (39, COMPILED), (39, RAN)], "TIME", 33),
])  # fmt: skip
def test_a_hang_is_one_of_what_is_compiled(
    answers: list[tuple[int, Any]], kind: str, ran: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 40 s; all is over after 150 s. answers: seconds until each."""
    clock = [1000.0]

    def ask(_: Task | None, within: float) -> tuple[str, Any]:
        seconds, answer = answers.pop(0)
        late = clock[0] + seconds > within
        clock[0] = within if late else clock[0] + seconds
        return ("TIME", None) if late else answer

    monkeypatch.setattr(children.time, "monotonic", lambda: clock[0])
    running = Children({})
    monkeypatch.setattr(running, "_child", ())
    monkeypatch.setattr(running, "ask", ask)
    monkeypatch.setattr(running, "close", lambda: None)
    found = running.measure(task("any", 40.0), 1150.0)
    assert (found.kind, found.ran) == (kind, ran)


@pytest.mark.parametrize("words, of_the_machine", [
    ("JaxRuntimeError: RESOURCE_EXHAUSTED: 5 GB", True),
    ("JaxRuntimeError: INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
    ("JaxRuntimeError: INTERNAL: ptxas exited with non-zero error code 9, output: ", True),  # a raw wait status
    ("JaxRuntimeError: INTERNAL: ptxas exited with 137", True),
    ("JaxRuntimeError: INTERNAL: ptxas exited with non-zero error code 65280, output: fatal", False),
    ("JaxRuntimeError: INTERNAL: ptxas exited with non-zero error code 139, output: ", False),  # it crashed
    ("the process ended with status -6: terminate called after throwing an instance of 'std::bad_alloc'", True),
    ("JaxRuntimeError: INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", False),
])  # fmt: skip
def test_what_says_nothing_of_a_kernel(words: str, of_the_machine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: bytes) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(worker.pickle, "loads", fails)
    assert worker._measured(b"")[0] == ("UNJUDGED" if of_the_machine else "FAILED")


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
running.ask(Task("long", "fake_measurement", {"what": "good", "seconds": 600.0}, 600.0), 0.0)
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=fake, cwd=ROOT, check=False)
    child = int(done.stdout.split()[0])
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {child} is still there")
