"""The scripts of docs/launch: a loop that outlives a kill, SLURM's signals and queue, a Kubernetes Job that fits."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from llmc_jax.config.flags import parse_args
from llmc_jax.config.train import TrainConfig
from llmc_jax.run.command import main
from tests.same_run import check_same, steps_of, write_shards
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "docs/launch"
TOO_LONG = 120  # seconds; so that a mistake fails the test instead of holding it for ever
SHARDS = {"train": (20 * 64 + 1,), "val": (600,)}


class Place:
    """A folder with data, and a Python that says which processes it became."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.processes: list[subprocess.Popen[str]] = []
        write_shards(folder, SHARDS)
        files = f"-i {folder}/train_*.bin -j {folder}/val_*.bin"
        self.flags = shlex.split(f"-e L1-NH2-C16-V257-T32 {files} -b 2 -t 32 -l 1e-2 -v 6 -m 2 -s 7 -g 4")
        self.script("python", f'echo $$ >> {folder}/started; exec {sys.executable} "$@"')
        self.environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "OUT": str(self.run), "PYTHON": f"{folder}/python", "PAUSE": "0",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PATH": f"{folder}:{os.environ['PATH']}",
        }  # fmt: skip

    def script(self, name: str, line: str) -> None:
        (self.folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (self.folder / name).chmod(0o755)

    def start(self, name: str, *flags: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [str(LAUNCH / name), *flags], cwd=ROOT, env=self.environment | environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def started(self) -> list[int]:
        """The processes so far."""
        file = self.folder / "started"
        return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    for process in found.processes:  # where a test failed
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
def test_the_loop_outlives_a_kill(place: Place, quick_compilation: None) -> None:
    assert main([*place.flags, "-x", "30", "-n", "3", "-o", str(place.folder / "expected")]) == 0
    loop = place.start("loop.sh", *place.flags, STEPS="30", EVERY="3")
    wait_until(lambda: place.run.exists() and steps_of(place.run, "DONE"), lambda: loop.poll() is None)
    os.kill(place.started()[-1], signal.SIGKILL)
    said, _ = loop.communicate(timeout=TOO_LONG)
    assert loop.returncode == 0, said
    assert len(place.started()) == 2 and "train.py ended with status 137; going on" in said
    check_same(place.run, place.folder / "expected")
    again = place.start("loop.sh", *place.flags, STEPS="30", EVERY="3")  # complete: starts nothing
    assert again.wait(TOO_LONG) == 0 and len(place.started()) == 2


@pytest.mark.parametrize("status", [2, 3, 130])
def test_the_loop_ends_where_another_start_would_not_help(place: Place, status: int) -> None:
    place.script("python", f"echo $$ >> {place.folder}/started; exit {status}")
    loop = place.start("loop.sh", STEPS="30")
    assert loop.wait(TOO_LONG) == status and len(place.started()) == 1


def test_the_loop_ends_after_crashes_that_come_to_nothing(place: Place) -> None:
    """Of five crashes the second has made a checkpoint, so three more are tried."""
    place.script(
        "python",
        f"echo $$ >> {place.folder}/started; mkdir -p {place.run}; "
        f"[ $(wc -l < {place.folder}/started) = 2 ] && touch {place.run}/DONE_00000005; exit 139",
    )
    loop = place.start("loop.sh", STEPS="30", TRIES="3")
    said, _ = loop.communicate(timeout=TOO_LONG)
    assert loop.returncode == 139 and len(place.started()) == 5, said
    assert "3 starts in a row came to no new checkpoint; the last one ended with status 139" in said


def slurm(place: Place, *flags: str, **environment: str) -> "subprocess.Popen[str]":
    place.script("scontrol", f'echo "$@" >> {place.folder}/scontrol.log')
    return place.start("slurm.sh", *place.flags, "-d", "64", *flags, SLURM_JOB_ID="77", **environment)


def queued(place: Place) -> str:
    log = place.folder / "scontrol.log"
    return log.read_text() if log.exists() else ""


@pytest.mark.slow
def test_slurm_stops_saves_and_goes_on(place: Place) -> None:
    """The warning before the time is over, then the next turn."""
    job = slurm(place, "-x", "1000000")
    log = place.run / "main.log"
    wait_until(lambda: log.exists() and log.stat().st_size > 200, lambda: job.poll() is None)
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=TOO_LONG)
    assert job.returncode == 130, said
    assert queued(place) == "requeue 77\n"
    (step,) = steps_of(place.run, "DONE")
    next_turn = slurm(place, "-x", str(step + 2), SLURM_RESTART_COUNT="1")
    said, _ = next_turn.communicate(timeout=TOO_LONG)
    assert next_turn.returncode == 0 and "the run is complete" in said, said
    assert queued(place) == "requeue 77\n"
    assert steps_of(place.run, "DONE") == [step, step + 2]


@pytest.mark.parametrize(
    ("line", "number", "status", "requeued"),
    [
        ("exit 2", None, 2, False),
        ("exit 139", None, 139, True),
        ("exit 130", signal.SIGTERM, 130, False),  # scancel
        ("sleep 1; exit 130", signal.SIGUSR1, 130, True),
        ("exit 0", signal.SIGUSR1, 0, False),  # it was the last step
    ],
)
def test_slurm_queue(place: Place, line: str, number: int | None, status: int, requeued: bool) -> None:
    """line: what the training does, at once or when SIGTERM comes."""
    if number is not None:
        line = f"trap '{line}' TERM; echo $$ >> {place.folder}/started; while :; do sleep 0.1; done"
    place.script("python", line)
    job = slurm(place)
    if number is not None:
        wait_until(place.started, lambda: job.poll() is None)
        job.send_signal(number)
    said, _ = job.communicate(timeout=TOO_LONG)
    assert job.returncode == status, said
    assert queued(place) == ("requeue 77\n" if requeued else "")


def test_slurm_ends_after_so_many_turns(place: Place) -> None:
    place.script("python", "exit 139")
    job = slurm(place, SLURM_RESTART_COUNT="50")
    assert job.wait(TOO_LONG) == 139 and queued(place) == ""


def test_slurm_flags() -> None:
    """What the script gives to train.py is understood, and so is what it asks of SLURM."""
    text = (LAUNCH / "slurm.sh").read_text()
    found = re.search(r"^flags=\((.*?)\)$", text, re.MULTILINE | re.DOTALL)
    assert found
    config = parse_args([*shlex.split(found[1].replace("\n", " ")), "-o", "x", "-y", "1"])
    assert isinstance(config, TrainConfig) and config.checkpoint_every and config.grad_accumulation == 8
    asked = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--requeue", "--signal=B:USR1@120", "--open-mode=append"} <= set(asked)


def test_kubernetes_job() -> None:
    yaml = pytest.importorskip("yaml")
    claim, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (job["kind"], pod["restartPolicy"]) == ("Job", "OnFailure")
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert container["command"][-1] == "train.py"  # no shell, which would keep the signal for itself
    config = parse_args(container["args"])
    assert isinstance(config, TrainConfig) and config.reuse and config.checkpoint_every
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.output_dir.startswith(mounts["runs"]) and config.train_data.startswith(mounts["data"])
    claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
    assert claims.keys() == mounts.keys() and claims["runs"] == claim["metadata"]["name"]
