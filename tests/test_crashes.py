"""A run that is killed, loses its power or meets an error at any point, and that still is the run nobody disturbed."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from llmc_jax.checkpoint import store
from llmc_jax.logs.files import CURVES, KERNELS
from llmc_jax.report import beside as writer
from llmc_jax.run.beside import Beside
from tests.crash_points import (
    ERRORS,
    Copy,
    Ended,
    Outcome,
    Point,
    Recorder,
    copy_folder,
    failing,
    opened,
    promised,
    trained,
    watched,
)
from tests.same_run import check_same, differences, healthy, leftovers, steps_of, write_shards

ROOT = Path(__file__).resolve().parents[1]
TOO_LONG = 300  # seconds, for whatever should happen; so that a mistake fails the test instead of holding it for ever
STEP_LINE = re.compile(r"\s*step\s+(\d+)/")
QUICKLY = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as quick_compilation has it in this process
pytestmark = pytest.mark.usefixtures("quick_compilation")

# Two micro-batches of 64 tokens an update; 25 of them an epoch, so that epochs end within steps; two shards.
SHARDS = {"train": (11 * 64 + 1, 14 * 64 + 30), "val": (600,)}
FLAGS = shlex.split(
    "-e L1-NH2-C16-V257-T32 -i data/train_*.bin -j data/val_*.bin -b 2 -t 32 -d 128 -l 1e-2 -u 5 -q 0.1 "
    "-sl 3 -sg 3 -v 5 -m 4 -s 7 -g 8 -n 3 -nk 2 -y 1 --print-every 1"
)


class Kill(NamedTuple):
    """When a process is killed."""

    when: str  # start-up: of its own; step, save: after that many steps, at any time, within a save
    after: float  # seconds for start-up, else the number of the step that comes first
    delay: float = 0.0  # seconds from then on
    files: int = 1  # of a save: which must be there


class Life:
    """One process of the run, and what it has said so far."""

    def __init__(self, folder: Path, run: str, steps: int, cache: Path | None = None) -> None:
        environment = os.environ | QUICKLY
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
            return self.process.wait(TOO_LONG)
        finally:
            self.end()

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
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "".join(self.said)
            if kill.when == "start-up":
                come = time.monotonic() - self.began >= kill.after
            else:
                come = self.step >= kill.after and (kill.when == "step" or self.saving() >= kill.files)
            if come:
                time.sleep(kill.delay)
                return self.process.poll() is None
            time.sleep(0.0005)
        return False

    def saving(self) -> int:
        """How many files and folders there are of a checkpoint that is being written."""
        return sum(1 for path in self.run.glob(".state_*.tmp") for _ in path.rglob("*"))


def where_it_died(life: Life) -> str:
    """What the process was doing when it was killed."""
    if life.step == 0:
        return "start-up"
    return "save" if leftovers(life.run) else "step"


# ----- every point ----------------------------------------------------------------------------------------------------

STEPS = 12

# Of the points of a run, eleven that are looked at in `make test`.
ELEVEN_POINTS = (
    "fsync new/run/.config.json.*.tmp",
    "rename new/run/.kernels.json.*.tmp -> new/run/kernels.json",
    "open new/run/metrics.jsonl",
    "half a write new/run/main.log s:2 trl",
    "half a write new/run/metrics.jsonl train 2",
    "rename new/run/.state_00000003.*.tmp -> new/run/state_00000003",
    "open new/run/.DONE_00000003.*.tmp",
    "rename new/run/.DONE_00000003.*.tmp -> new/run/DONE_00000003",
    "write new/run/metrics.jsonl checkpoint 3",
    "half a write new/run/metrics.jsonl checkpoint 3",
    "fsync new/run/.curves.png.*.tmp",
)

# Where a run was killed, of which the start after it is looked at point by point.
RESTARTS = {
    "before anything was complete": "half a write new/run/main.log s:2 trl",
    "after a checkpoint": "half a write new/run/metrics.jsonl train 5",
    "with a name and without DONE": "open new/run/.DONE_00000006.*.tmp",
    "while one is removed": "mkdir new/run/.state_00000012.*.tmp",
    "when all was done": "end",
}


class Recording(NamedTuple):
    """A run and the copies that were made of its folder."""

    folder: Path  # where it has its data, and room for copies
    run: Path
    points: list[Point]
    copies: list[Copy]
    found: dict[tuple[str, bool], Copy]  # by point, and whether the power was cut


def words(folder: Path, run: Path) -> list[str]:
    """The command line of a run in this process."""
    data = folder / "data"
    return [*FLAGS, "-i", f"{data}/train_*.bin", "-j", f"{data}/val_*.bin", "-x", str(STEPS), "-o", str(run)]


def record(folder: Path, name: str, start: Copy | None = None, until: str = "", more: Sequence[str] = ()) -> Recording:
    """Train to the end, with a copy at each point; of one that starts anew up to its first line `until`.

    more: further flags.
    """
    base, over = folder / name / "base", False
    run = base / "new" / "run"  # two folders that the program makes
    if start is None:
        base.mkdir(parents=True)
    else:
        copy_folder(start.folder, base)

    def wanted(point: Point) -> bool:
        nonlocal over
        over = over or bool(until and point.which.startswith(until))
        return not over

    requests: list[str] = []

    def finish(_: Beside) -> None:
        """Draw the picture in this process, whose points are recorded, and not in one beside it."""
        writer.write(CURVES, writer.Request(*json.loads(requests[0])))

    recorder = Recorder(base, run, folder / name / "aside", wanted)
    with pytest.MonkeyPatch.context() as patch, recorder.recording():
        patch.setattr(Beside, "_begun", lambda _, request: requests.append(request))
        patch.setattr(Beside, "finish", finish)
        ended = trained([*words(folder, run), *more])
    assert ended.status == 0, ended
    return Recording(folder, run, recorder.points, recorder.copies, recorder.found)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """A run that nobody disturbs, watched at each of its points."""
    folder = tmp_path_factory.mktemp("points")
    write_shards(folder / "data", SHARDS)
    return record(folder, "undisturbed")


def cloned(folder: Path, copy: Copy) -> Path:
    """The run in a clone of a copy, in the place of the clone before; its checkpoints are links."""
    shutil.rmtree(clone := folder / "clone", ignore_errors=True)
    copy_folder(copy.folder, clone, lambda path, target: target.symlink_to(path))
    return clone / "new" / "run"


def outcomes(folder: Path, copies: Iterable[Copy]) -> dict[Outcome, Copy]:
    """Open every copy; the first one of each distinct outcome. Fails with all that could not go on as they should."""
    found: dict[Outcome, Copy] = {}
    wrong = []
    for copy in copies:
        run = cloned(folder, copy)
        outcome = opened(run, words(folder, run))
        if outcome.problem or outcome.left or outcome.step < copy.promised:
            wrong.append(
                f"{'power cut' if copy.cut else 'killed'} at {copy.point}, {copy.promised} promised: {outcome}"
            )
        found.setdefault(outcome, copy)
    assert not wrong, "\n".join(wrong)
    return found


def check_continued(folder: Path, copies: Iterable[Copy], reference: Path) -> None:
    """Continue each copy, the first in a process of its own, and compare it with the undisturbed run."""
    for k, copy in enumerate(copies):
        place = Path(tempfile.mkdtemp(dir=folder)) / "base"
        copy_folder(copy.folder, place)
        run = place / "new" / "run"
        if k == 0:
            life = Life(folder, str(run.relative_to(folder)), STEPS)
            assert life.wait() == 0, f"{copy}: {''.join(life.said)}"
        else:
            ended = trained(words(folder, run))
            assert ended.status == 0, f"{copy}: {ended}"
        check_same(run, reference)
        healthy(run)


def test_eleven_points(recorded: Recording) -> None:
    copies = [recorded.found[point, cut] for point in ELEVEN_POINTS for cut in (False, True)]
    found = outcomes(recorded.folder, dict.fromkeys(copies))
    assert {outcome.step for outcome in found} == {0, 3, STEPS}
    check_continued(recorded.folder, found.values(), recorded.run)


@pytest.mark.slow
def test_every_point_of_a_run(recorded: Recording) -> None:
    """What a run leaves that is killed, or loses its power, at any of its points can be continued, to the same bits."""
    places = {point.place for point in recorded.points}
    assert len(recorded.points) > 80 and len(places) > 30, places
    found = outcomes(recorded.folder, recorded.copies)
    print(f"{len(recorded.points)} points, {len(recorded.copies)} copies, {len(found)} outcomes")
    assert {outcome.step for outcome in found} == {0, 3, 6, 9, 12}
    check_continued(recorded.folder, found.values(), recorded.run)


@pytest.mark.slow
def test_every_point_of_a_restart(recorded: Recording) -> None:
    """The same of runs that start anew where another was killed, up to the first checkpoint of their own."""
    found: dict[Outcome, Copy] = {}
    for name, point in RESTARTS.items():
        again = record(recorded.folder, name, recorded.found[point, False], until="checkpoint")
        check_same(again.run, recorded.run)
        found |= outcomes(recorded.folder, again.copies)
        print(f"{name}: {len(again.points)} points, {len(again.copies)} copies, {len(found)} outcomes so far")
    check_continued(recorded.folder, found.values(), recorded.run)


@pytest.mark.slow
def test_at_every_point_a_start_takes_the_kernels_of_the_run(recorded: Recording) -> None:
    """They are on the disk before the first step, and a start that would choose otherwise takes them from there."""
    rows = record(recorded.folder, "rows", until="checkpoint 6", more=["--logit-rows", "8"])
    known, taken = set[tuple[object, ...]](), 0
    for copy in rows.copies:
        run = copy.folder / "new" / "run"
        there, log = run / KERNELS, run / "metrics.jsonl"
        begun = steps_of(run, "state") or (log.exists() and b'"event": "train"' in log.read_bytes())
        assert there.exists() or not begun, copy
        state = (there.exists(), *steps_of(run, "state"), *steps_of(run, "DONE"), copy.cut)
        if state in known:
            continue
        known.add(state)
        run = cloned(rows.folder, copy)
        outcome = opened(run, [*words(rows.folder, run), "--logit-rows", "-1"])
        found = json.loads((run / KERNELS).read_bytes())["logit_rows"]
        assert (outcome.problem, found) == ("", 8 if there.exists() else 0), copy
        taken += found == 8
    assert taken >= 4, known


# ----- errors ---------------------------------------------------------------------------------------------------------


def check_failed(ended: Ended, code: int, run: Path, reference: Path) -> Iterator[str]:
    """What is wrong with a run that met an error: it went on to the same end, or ended with status 2 and a line."""
    if ended.status == 0:
        yield from differences(run, reference)
    elif ended.status != 2:
        yield f"status {ended.status}"
    elif not ended.complaint.startswith("train.py: ") or os.strerror(code) not in ended.complaint:
        yield f"it says {ended.complaint!r}"
    if "Traceback" in ended.said + ended.complaint:
        yield "a traceback"


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
def test_an_error_at_every_place(recorded: Recording, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that fails costs no checkpoint, says what failed, and the run can be continued to the same bits.

    EIO and EACCES come once, ENOSPC stays: nothing can be written from then on. The run saves twice, and removes the
    first checkpoint at its end.
    """
    monkeypatch.setattr(sys, "argv", ["train.py"])
    fewer = ["-n", str(STEPS // 2), "-nk", "1"]
    whole = recorded.folder / error / "whole"
    whole.mkdir(parents=True)
    points: list[Point] = []
    with watched(whole, points.append):
        assert trained([*words(recorded.folder, whole / "new" / "run"), *fewer]).status == 0
    wrong, copies = [], []
    places = dict.fromkeys(point.place for point in points)
    for k, place in enumerate(places):
        base = recorded.folder / error / str(k)
        run = base / "new" / "run"
        base.mkdir(parents=True)
        at = failing(place, ERRORS[error], lasting=error == "ENOSPC")
        with watched(base, at):
            try:
                ended = trained([*words(recorded.folder, run), *fewer])
            except Exception as problem:
                wrong.append(f"{place}: {problem!r}")
                continue
        wrong += [f"{place}: {each}" for each in check_failed(ended, ERRORS[error], run, recorded.run)]
        copies.append(Copy(Point(f"{error} at", place), False, base, promised(run)))
    assert not wrong, "\n".join(wrong)
    found = outcomes(recorded.folder, copies)
    print(f"{error} at {len(places)} places, {len(found)} outcomes")
    check_continued(recorded.folder, found.values(), recorded.run)


# The program with known names for what is hidden, so that a tracer of system calls can be told of them.
TRACED = """
import secrets, sys
from llmc_jax.run.command import main
secrets.token_hex = lambda count: "0" * 2 * count
sys.exit(main())
"""


def no_tracer() -> str:
    """Return why no system call can be made to fail here; empty where one can."""
    if shutil.which("strace") is None:
        return "strace, which makes single system calls fail, is not installed"
    probe = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "strace may not trace processes here"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "error", "step"),
    [
        ("write,writev", "ENOSPC", 6),
        ("write,writev", "ENOSPC", STEPS),
        ("fsync", "EIO", STEPS),
        ("open,openat", "EACCES", STEPS),
    ],
)
def test_an_error_inside_a_save(recorded: Recording, calls: str, error: str, step: int) -> None:
    """A save in which a system call fails costs that checkpoint alone; the last one is an error."""
    if why := no_tracer():
        pytest.skip(why)
    base = recorded.folder.resolve() / f"{error} in {step}"
    run, report = base / "new" / "run", base / "strace.txt"
    base.mkdir()
    tensor = run / f".state_{step:08d}.00000000.tmp" / "tensors" / "params"
    paths = [f"{tensor}/{name}" for name in ("c/0", "zarr.json")]
    tracer = ["strace", "-f", "-qq", "-o", str(report), *(word for path in paths for word in ("-P", path))]
    tracer += ["-e", f"trace={calls}", "-e", f"inject={calls}:error={error}"]
    environment = os.environ | QUICKLY | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*tracer, sys.executable, "-c", TRACED, *words(recorded.folder, run)],
        env=environment, capture_output=True, text=True, timeout=TOO_LONG, check=False,
    )  # fmt: skip
    assert "(INJECTED)" in report.read_text()
    report.unlink()
    assert "Traceback" not in ended.stdout + ended.stderr
    assert os.strerror(ERRORS[error]) in (ended.stderr if step == STEPS else ended.stdout)
    assert ended.returncode == (2 if step == STEPS else 0)
    if step < STEPS:
        check_same(run, recorded.run)
        assert step not in steps_of(run, "DONE")
    else:
        assert leftovers(run) == []
        check_continued(recorded.folder, [Copy(Point(calls, "a save"), False, base, promised(run))], recorded.run)


# ----- kills at random moments ----------------------------------------------------------------------------------------

LONG = 120  # steps


def draw(rng: random.Random, when: str, start_up: float, reached: int, lives: int) -> Kill:
    """A random moment: so far on that the kills to come spread over what is left of the run."""
    if when == "start-up":
        return Kill(when, rng.uniform(0.1, start_up))
    after = rng.randint(reached + 1, reached + max(1, 2 * (LONG - reached) // (lives + 2)))
    return Kill(when, after, rng.uniform(0, 0.1))


def kill_and_resume(folder: Path, kinds: list[str], start_up: float) -> Counter[str]:
    """Starts the run anew after each kill, as llm.c's launch loops do, until it completes; returns where they fell."""
    rng, died = random.Random(2), Counter[str]()
    run, saves = folder / "killed", kinds.count("save")
    whole = sum(1 for _ in store.state_folder(folder / "reference", LONG).rglob("*"))
    shares = iter(rng.sample(range(1, saves + 1), saves))  # of a checkpoint, each once
    remains: list[str] = []
    for lives, when in zip(range(len(kinds), 0, -1), kinds, strict=True):
        reached = max([0, *steps_of(run, "DONE")]) if run.exists() else 0
        life = Life(folder, "killed", LONG, folder / "cache")
        try:
            kill = draw(rng, when, start_up, reached, lives)
            if when == "save":
                kill = kill._replace(delay=0, files=next(shares) * whole // (saves + 1))
            come = life.comes_to(kill)
        finally:
            life.end()
        assert come and life.process.returncode == -signal.SIGKILL, f"{kill}: {''.join(life.said)}"
        died[where_it_died(life)] += 1
        if life.step:  # it trained, so it has removed what the one before left
            assert not set(remains) & set(leftovers(run))
        remains = leftovers(run) if run.exists() else []
        if run.exists():
            good = {entry.step: entry.problem for entry in store.entries(run)}
            assert all(good.get(step, "gone") is None for step in steps_of(run, "DONE")), good
    life = Life(folder, "killed", LONG, folder / "cache")
    assert life.wait() == 0, "".join(life.said)
    return died


@pytest.mark.slow
def test_a_run_killed_twenty_times(tmp_path: Path) -> None:
    """At ten points of a save, and at random; its cache is its own, which a kill may hit too."""
    kinds = [*["start-up"] * 5, *["step"] * 5, *["save"] * 10]
    random.Random(1).shuffle(kinds)
    write_shards(tmp_path / "data", SHARDS)
    reference = Life(tmp_path, "reference", LONG)
    assert reference.wait() == 0, "".join(reference.said)
    died = kill_and_resume(tmp_path, kinds, reference.first_step)
    print(f"killed {died.total()} times: {dict(died)}")
    assert died["start-up"] >= 2 and died["save"] >= 10, died
    check_same(tmp_path / "killed", tmp_path / "reference")
    for run in (tmp_path / "killed", tmp_path / "reference"):
        assert healthy(run) == steps_of(run, "state") == steps_of(run, "DONE")
    assert steps_of(tmp_path / "killed", "state") == steps_of(tmp_path / "reference", "state")
