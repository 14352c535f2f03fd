"""A run that SIGKILL ends again and again, at start, in steps, in saves, and that still is the run nobody disturbed."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from llmc_jax.checkpoint import store
from tests.same_run import check_same, leftovers, steps_of, write_shards

ROOT = Path(__file__).resolve().parents[1]
TOO_LONG = 300  # seconds, for whatever should happen; so that a mistake fails the test instead of holding it for ever
STEP_LINE = re.compile(r"\s*step\s+(\d+)/")

# Two micro-batches of 64 tokens an update; 25 of them an epoch, so that epochs end within steps; two shards.
SHARDS = {"train": (11 * 64 + 1, 14 * 64 + 30), "val": (600,)}
FLAGS = shlex.split(
    "-e L2-NH2-C32-V257-T32 -i data/train_*.bin -j data/val_*.bin -b 2 -t 32 -d 128 -l 1e-2 -u 5 -q 0.1 "
    "-sl 3 -sg 3 -v 5 -m 4 -s 7 -g 8 -n 3 -nk 2 -y 1 --print-every 1"
)


class Kill(NamedTuple):
    """When a process is killed."""

    when: str  # start-up: of its own; step, save, done: after that many steps, at any time, within a save, at its end
    after: float  # seconds for start-up, else the number of the step that comes first
    delay: float = 0.0  # seconds from then on


class Life:
    """One process of the run, and what it has said so far."""

    def __init__(self, folder: Path, run: str, steps: int, cache: Path | None = None) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if cache is not None:
            environment["LLMC_JAX_CACHE"] = str(cache)
        command = [sys.executable, "-u", str(ROOT / "train.py"), *FLAGS, "-x", str(steps), "-o", run]
        self.run, self.began = folder / run, time.monotonic()
        self.step, self.first_step = 0, 0.0  # the last one that it printed; seconds until the first
        self.said: list[str] = []
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if match := STEP_LINE.match(line):
                self.first_step = self.first_step or time.monotonic() - self.began
                self.step = int(match[1])

    def wait(self) -> int:
        """The exit status."""
        try:
            code = self.process.wait(TOO_LONG)
        finally:
            self.end()
        return code

    def end(self) -> None:
        """Ends it at once, if it has not ended, and reads what is left."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def comes_to(self, kill: Kill) -> bool:
        """Waits for the moment; False if the process ended before."""
        deadline = time.monotonic() + TOO_LONG
        complete = set(steps_of(self.run, "DONE")) if self.run.exists() else set()
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "".join(self.said)
            if kill.when == "start-up":
                come = time.monotonic() - self.began >= kill.after
            else:
                come = self.step > 0 and self.step >= kill.after
            if come and kill.when == "save":
                come = self.saving()
            elif come and kill.when == "done":
                come = bool(set(steps_of(self.run, "DONE")) - complete)
            elif not come:
                complete = set(steps_of(self.run, "DONE")) if self.run.exists() else set()
            if come:
                time.sleep(kill.delay)
                return self.process.poll() is None
            time.sleep(0.0005)
        return False

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        with os.scandir(self.run) as entries:
            return any(entry.name.startswith(".") and entry.is_dir() for entry in entries)


def where_it_died(life: Life) -> str:
    """What the process was doing when it was killed."""
    if life.step == 0:
        return "start-up"
    if life.run.exists() and leftovers(life.run):
        return "save"
    if set(steps_of(life.run, "state")) - set(steps_of(life.run, "DONE")):
        return "between state and DONE"
    return "step"


def draw(rng: random.Random, when: str, start_up: float, reached: int, steps: int, lives: int) -> Kill:
    """A random moment: so far on that the kills to come spread over what is left of the run."""
    if when == "start-up":
        return Kill(when, rng.uniform(0.1, start_up))
    after = rng.randint(reached + 1, reached + max(1, 2 * (steps - reached) // (lives + 2)))
    return Kill(when, after, rng.uniform(0, 0.03 if when == "done" else 0.1))


def kill_and_resume(
    folder: Path, kinds: list[str], steps: int, start_up: float, seed: int, cache: Path | None = None
) -> tuple[Counter[str], Life]:
    """Starts the run anew after each kill, as llm.c's launch loops do, until it completes.

    Returns where the kills fell, and the life that ended by itself.
    """
    rng, died = random.Random(seed), Counter[str]()
    for lives, when in zip(range(len(kinds), 0, -1), kinds, strict=True):
        run = folder / "killed"
        reached = max([0, *steps_of(run, "DONE")]) if run.exists() else 0
        life = Life(folder, "killed", steps, cache)
        try:
            kill = draw(rng, when, start_up, reached, steps, lives)
            come = life.comes_to(kill)
        finally:
            life.end()
        assert come and life.process.returncode == -signal.SIGKILL, f"{kill}: {''.join(life.said)}"
        died[where_it_died(life)] += 1
        if run.exists():
            good = {entry.step: entry.problem for entry in store.entries(run)}
            assert all(good.get(step, "gone") is None for step in steps_of(run, "DONE")), good
    life = Life(folder, "killed", steps, cache)
    assert life.wait() == 0, "".join(life.said)
    return died, life


def check_killed_run(
    folder: Path, kinds: list[str], steps: int, seed: int, cache: Path | None = None
) -> tuple[Counter[str], Life]:
    """The run without disturbance, the one with kills, and that they are the same."""
    write_shards(folder / "data", SHARDS)
    reference = Life(folder, "reference", steps)
    assert reference.wait() == 0, "".join(reference.said)
    died, last = kill_and_resume(folder, kinds, steps, reference.first_step, seed, cache)
    print(f"killed {died.total()} times: {dict(died)}")
    check_same(folder / "killed", folder / "reference")
    for run in (folder / "killed", folder / "reference"):
        assert leftovers(run) == []
        assert steps_of(run, "state") == steps_of(run, "DONE")
        assert all(entry.problem is None for entry in store.entries(run))
    assert steps_of(folder / "killed", "state") == steps_of(folder / "reference", "state")
    return died, last


def test_a_run_killed_three_times(tmp_path: Path) -> None:
    died, _ = check_killed_run(tmp_path, ["save", "start-up", "step"], steps=15, seed=3)
    assert died.total() == 3


@pytest.mark.slow
def test_a_run_killed_twenty_times(tmp_path: Path) -> None:
    """The killed run compiles for itself, into a cache that a kill may hit too."""
    kinds = [*["start-up"] * 5, *["step"] * 6, *["save"] * 6, *["done"] * 3]
    random.Random(1).shuffle(kinds)
    died, _ = check_killed_run(tmp_path, kinds, steps=120, seed=2, cache=tmp_path / "cache")
    assert died.total() == 20
    assert died["start-up"] >= 2 and died["save"] >= 2, died
