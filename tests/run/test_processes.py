"""Runs of several processes, started as a user starts them: the run of one, ended in every way, and gone on with.

tests/cluster/ has the ways in which a process is lost, all of them, with workers that do not train.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmc_jax.base.errors import ExitCode
from llmc_jax.logs.files import METRICS
from tests.families import TOY
from tests.metrics import read_metrics
from tests.questions import write_questions
from tests.run.test_devices import FIXED, ROOT, start
from tests.same_run import check_same, write_shards
from tests.waiting import wait_until

SECONDS = 300  # after which processes that wait for each other are ended
pytestmark = pytest.mark.slow


class Started(NamedTuple):
    """The processes of a run, by rank: those that a launcher sees."""

    folder: Path
    parents: list[subprocess.Popen[str]]

    def worker(self, rank: int) -> int:
        """The process that trains."""
        words = subprocess.run(["pgrep", "-P", str(self.parents[rank].pid)], capture_output=True, text=True, check=True)
        return int(words.stdout.split()[0])

    def ended(self) -> tuple[list[int], list[str]]:
        """The status of each, and what it said on standard error."""
        said = [parent.communicate(timeout=SECONDS)[1] for parent in self.parents]
        return [parent.returncode for parent in self.parents], said

    def events(self, name: str = METRICS) -> list[dict[str, Any]]:
        path = self.folder / "run" / name
        return read_metrics(path) if path.exists() else []

    def wait_for(self, event: str, step: int) -> None:
        wait_until(lambda: any(each["event"] == event and each["step"] >= step for each in self.events()))

    def lost(self, name: str = METRICS) -> tuple[int, str, str]:
        """Who was lost, how, and in which phase, as a process's log has it."""
        (event,) = [each for each in self.events(name) if each["event"] == "lost"]
        return event["rank"], event["cause"], event["phase"]


@contextmanager
def started(n: int, words: str, folder: Path, **more: str) -> Iterator[Started]:
    """n processes of a run whose folder is `run`, the first ones last. more: words of a rank, `rank1="-l 1"`."""
    place = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    parents: dict[int, subprocess.Popen[str]] = {}
    try:
        for rank in reversed(range(n)):
            own = f"-pn {n} -pr {rank} -pi fs -pf . -o run {more.get(f'rank{rank}', '')}"
            parents[rank] = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *shlex.split(f"{words} {own}")],
                cwd=folder, env=place | {"JAX_PLATFORMS": "cpu"}, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )  # fmt: skip
        yield Started(folder, [parents[rank] for rank in range(n)])
    finally:
        for parent in parents.values():
            parent.kill()
            parent.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", {"train": (1500, 1300), "val": (600,)}, vocab_size=61)
    write_questions(tmp_path / "data" / "questions.bin", vocab_size=61)
    return tmp_path


def test_two_processes_make_the_run_of_one(folder: Path) -> None:
    words = f"{FIXED} -z 1 --export-llmc"
    with started(2, words, folder) as run:
        assert run.ended() == ([0, 0], ["", ""])
    one = start(f"{words} -o one", folder)
    assert (one.code, one.err) == (0, "")
    check_same(folder / "run", folder / "one")
    for name in ("model_00000003.bin", "model_00000006.bin"):
        assert (folder / "run" / name).read_bytes() == (folder / "one" / name).read_bytes()
    (begun,) = (each for each in run.events() if each["event"] == "start")
    assert (begun["config"]["device"]["processes"], begun["config"]["device"]["used"]) == (2, 2)
    other = [each["event"] for each in run.events("rank_00001.jsonl")]
    assert other == ["start", "warnings", "checkpoint", "checkpoint", "end"]
    assert not list(folder.glob("*.json"))  # where process 0 listened is not left


def test_two_processes_train_a_family_of_a_users_file(folder: Path) -> None:
    # without weight decay: where all elements decay, a processor rounds otherwise in parts than in the whole
    words = f"{re.sub(r'-c [0-9.]+', '-c 0', FIXED)} -h 0 -z 2 -e toy-V61-C8-T16 --model {TOY}"
    with started(2, words, folder) as run:
        assert run.ended() == ([0, 0], ["", ""])
    one = start(f"{words} -o one", folder)
    assert (one.code, one.err) == (0, "")
    check_same(folder / "run", folder / "one")


LONG = f"{FIXED} -k constant -v 0 -s 0 --print-every 0 -n 0"


def test_a_run_that_loses_a_process_goes_on_with_others(folder: Path) -> None:
    """Killed with two processes, stopped with four, ended with one: the bits of a run without a break."""
    with started(2, f"{LONG} -x 100000 -n 20", folder) as run:
        run.wait_for("checkpoint", 20)
        run.wait_for("train", 25)
        os.kill(run.worker(0), signal.SIGKILL)
        codes, _ = run.ended()
    assert codes == [ExitCode.PEER_LOST] * 2
    found = run.lost()  # another checkpoint may be under way
    assert found == run.lost("rank_00001.jsonl") and found in ((0, "killed", "step"), (0, "killed", "save"))
    with started(4, f"{LONG} -x 100000 -n 100000 -y 1", folder) as run:
        run.wait_for("resume", 20)
        run.wait_for("train", run.events()[-1]["step"] + 5)
        run.parents[2].send_signal(signal.SIGTERM)
        codes, _ = run.ended()
    assert codes == [ExitCode.STOPPED] * 4
    (stopped,) = {each["step"] for name in (METRICS, "rank_00003.jsonl") for each in run.events(name)[-1:]}
    rest = start(f"{LONG} -x {stopped + 5} -y 1 --devices 1", folder)
    assert rest.code == 0, rest.err
    whole = start(f"{LONG} -x {stopped + 5} -o whole", folder)
    assert whole.code == 0, whole.err
    assert rest.losses == whole.losses


def test_a_process_that_is_stopped_ends_the_run(folder: Path) -> None:
    with started(2, f"{LONG} -x 100000 --peer-timeout 15", folder) as run:
        run.wait_for("train", 5)
        os.kill(run.worker(1), signal.SIGSTOP)
        codes, _ = run.ended()
    assert codes == [ExitCode.PEER_LOST] * 2
    assert run.lost() == (1, "silent", "step")


def test_processes_that_are_told_otherwise_or_read_otherwise_do_not_begin(folder: Path) -> None:
    write_shards(folder / "other", {"val": (700,)}, vocab_size=61)
    with started(2, FIXED, folder, rank1="-l 1e-3 -j other/val_*.bin") as run:
        codes, (said, other) = run.ended()
    assert (codes, other) == ([ExitCode.BAD_INPUT] * 2, "")
    assert [word in said for word in ("-l:", "-j:", "files of -j:", "rank 1")] == [True] * 4
    assert not (folder / "run").exists()
