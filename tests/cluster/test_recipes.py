"""The ways of docs/processes.md to start several processes: mpirun itself, and scripts whose launchers are stand-ins.

Each trains a tiny model, on the CPU of this machine. One process with two devices makes the run that all must make.
"""

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.base.errors import ExitCode
from llmc_jax.cluster.launchers import Member, member_of
from llmc_jax.config.checks import validate
from llmc_jax.config.flags import given_options
from llmc_jax.logs.files import METRICS
from llmc_jax.run.processes import free_port
from tests.metrics import read_metrics
from tests.same_run import write_shards
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "docs/launch"
PAGE = ROOT / "docs/processes.md"
SECONDS = 300  # after which processes that wait for each other are ended
MODEL = "-e L1-NH2-C16-V257-T64 -b 2 -t 64 -d 256 -v 0 -s 0 --reduction fixed"


def ended(process: "subprocess.Popen[str]", status: int) -> str:
    """Wait for the end of a program, which has a status; return what it said."""
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == status, said
    return said


class Place:
    """A folder with data, and programs that stand for a cluster's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        write_shards(folder, {"train": (20 * 256 + 1,), "val": (600,)})
        self.flags = f"{MODEL} -i {folder}/train_*.bin -j {folder}/val_*.bin --peer-timeout 60"
        self.environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
        self.environment |= {
            "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHON": sys.executable,
            "PATH": f"{folder}:{os.environ['PATH']}",
        }  # fmt: skip

    def program(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def hosts(self, lines: str) -> dict[str, str]:
        """Variables that name a file of hosts to hosts.sh, and a program in the place of ssh."""
        (self.folder / "hosts.txt").write_text(lines)
        ssh = self.program("ssh", SSH.format(folder=self.folder))
        return {"HOSTS": f"{self.folder}/hosts.txt", "SSH": str(ssh)}

    def start(self, command: list[str], flags: str = "", **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*command, *shlex.split(f"{self.flags} {flags}")], cwd=ROOT, env=self.environment | environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def losses(self, command: list[str], run: str, flags: str = "", **environment: str) -> dict[int, float]:
        """The loss of each step of a run that ends well."""
        ended(self.start(command, f"-x 4 -o {self.folder}/{run} {flags}", **environment), 0)
        return {event["step"]: event["loss"] for event in self.events(run) if event["event"] == "train"}

    def events(self, run: str, name: str = METRICS) -> list[dict[str, Any]]:
        path = self.folder / run / name
        return read_metrics(path) if path.exists() else []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = Place(tmp_path_factory.mktemp("recipes"))
    yield found
    for process in found.processes:  # where a test failed
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def expected(place: Place) -> dict[int, float]:
    losses = place.losses([sys.executable, "train.py"], "one", "--devices 2 --no-save")
    assert len(losses) == 4
    return losses


def test_flags_of_the_commands_are_understood() -> None:
    """Those of the page that start train.py by a launcher."""
    text = PAGE.read_text()
    lines = re.findall(r"^(?:    |until )(.*(?:train\.py|launch/\w+\.sh).*)$", text, re.MULTILINE)
    lines += re.findall(r"`(N=2 [^`\n]*)`", text)
    commands = [shlex.split(line.removesuffix("; do"), comments=True) for line in lines]
    assert {words[0] for words in commands} >= {"mpirun", "srun", "torchrun", "python", "N=2", "HOSTS=hosts.txt"}
    for words in commands:
        start = next(i for i, word in enumerate(words) if word == "train.py" or word.startswith("docs/launch/"))
        assert words[start] == "train.py" or os.access(ROOT / words[start], os.X_OK)
        several = ["-pn", "2", "-pr", "1", "-ps", "node1"] if words[0] == "N=2" else []
        validate(given_options([*words[start + 1 :], *several]).config)


SSH = """#!/bin/sh
# stands for ssh: HOST COMMAND, here
echo "$1" >> {folder}/hosts_called
shift
exec sh -c "$*"
"""


@pytest.mark.slow
def test_mpirun_trains(place: Place, expected: dict[int, float]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe", *as_root, sys.executable, "train.py"]
    assert place.losses(command, "mpirun", "--no-save") == expected
    (begun,) = place.events("mpirun", "rank_00001.jsonl")[:1]
    assert (begun["event"], begun["rank"]) == ("start", 1)


@pytest.mark.slow
def test_a_loop_over_ranks_trains(place: Place, expected: dict[int, float]) -> None:
    told = {"N": "2", "PORT": str(free_port())}
    assert place.losses([str(LAUNCH / "several.sh")], "several", "--no-save", **told) == expected


@pytest.mark.slow
def test_a_file_of_hosts(place: Place, expected: dict[int, float]) -> None:
    told = place.hosts("# this machine, twice\nlocalhost  # the first\n\nlocalhost\n")
    told |= {"PASS": "JAX_PLATFORMS UNKNOWN", "PORT": str(free_port())}
    assert place.losses([str(LAUNCH / "hosts.sh")], "hosts", "--no-save", **told) == expected
    assert (place.folder / "hosts_called").read_text().split() == ["localhost"] * 2


def scripted(place: Place, line: str) -> str:
    """A Python that does no more than this; RANK is its rank."""
    words = 'while [ $# -gt 0 ]; do [ "$1" = -pr ] && RANK=$2; shift; done'
    return str(place.program("some_python", f"#!/bin/sh\n{words}\n{line}\n"))


@pytest.mark.parametrize(
    ("line", "status"),
    [("exit 0", 0), ("exit $((RANK == 1 ? 2 : 75))", 2), ("exit $((RANK == 0 ? 137 : 75))", 137), ("exit 75", 75)],
)
@pytest.mark.parametrize("name", ["several.sh", "hosts.sh"])
def test_the_status_is_that_of_the_cause(place: Place, name: str, line: str, status: int) -> None:
    told = place.hosts("localhost\n" * 3)
    ended(place.start([str(LAUNCH / name)], N="3", PYTHON=scripted(place, line), **told), status)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_over_ranks_hands_on_a_signal_once(place: Place, number: signal.Signals) -> None:
    log = place.folder / f"told_{number}"
    line = f"trap 'echo told >> {log}; exit 130' TERM; echo there >> {log}; while :; do sleep 0.05; done"
    process = place.start([str(LAUNCH / "several.sh")], N="2", PYTHON=scripted(place, line))
    wait_until(lambda: log.exists() and log.read_text().count("there") == 2, lambda: process.poll() is None)
    process.send_signal(number)
    process.send_signal(number)
    ended(process, 130)
    assert log.read_text().count("told") == 2


@pytest.mark.parametrize("name", ["several.sh", "hosts.sh"])
def test_a_signal_while_processes_are_started_ends_them_too(place: Place, name: str) -> None:
    told = place.hosts("localhost\n" * 20) | {"N": "20", "PASS": "SCRIPT"}
    line = "trap 'exit 130' TERM; [ $RANK != 0 ] || kill -TERM $SCRIPT; while :; do sleep 0.05; done"
    script = f'export SCRIPT=$$; . "{LAUNCH / name}"'
    ended(place.start(["bash", "-c", script, name], PYTHON=scripted(place, line), **told), 130)


SRUN = """#!{python}
# stands for srun: starts TASKS tasks here, with the variables that srun sets; scancel finds them in a file
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[1:]
n = int(os.environ["TASKS"])
common = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(n), "SLURM_NTASKS": str(n), "SLURM_STEP_NUM_NODES": "1",
           "SLURM_STEP_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}}
tasks = [subprocess.Popen(words, env=os.environ | common | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
         for i in range(n)]
with open("{folder}/tasks.new", "w") as file:
    file.write(" ".join(str(task.pid) for task in tasks))
os.replace("{folder}/tasks.new", "{folder}/tasks")
sys.exit(max(task.wait() if task.returncode is None else task.returncode for task in tasks))
"""


def slurm(place: Place, flags: str = "", **environment: str) -> "subprocess.Popen[str]":
    place.program("srun", SRUN.format(python=sys.executable, folder=place.folder))
    place.program(
        "scancel", f'#!/bin/sh\necho "$@" >> {place.folder}/scancel.log\nkill -TERM $(cat {place.folder}/tasks)\n'
    )
    place.program("scontrol", f'#!/bin/sh\necho "$@" >> {place.folder}/scontrol.log\n')
    # the script as sbatch runs it: SLURM's own variables of a batch step, whose number is no step of srun
    batch = {"SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "TASKS": "2"}
    return place.start([str(LAUNCH / "slurm_many.sh")], flags, **(batch | environment))


def log_of(place: Place, program: str) -> list[str]:
    file = place.folder / f"{program}.log"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


@pytest.mark.slow
def test_slurm_stops_saves_and_goes_on(place: Place, expected: dict[int, float]) -> None:
    """The warning before the time is over, then the next turn."""
    run, job = place.folder / "slurm", f"{secrets.randbelow(10**6)}"
    process = slurm(place, "-x 100000", SLURM_JOB_ID=job, OUT=str(run))
    wait_until(
        lambda: any(event["event"] == "train" for event in place.events("slurm")), lambda: process.poll() is None
    )
    process.send_signal(signal.SIGUSR1)
    ended(process, ExitCode.STOPPED)
    assert log_of(place, "scancel") == [f"--signal=TERM {job}.0"]
    assert log_of(place, "scontrol") == [f"requeue {job}"]
    end = place.events("slurm")[-1]
    assert end["outcome"] == "stopped"
    process = slurm(place, f"-x {end['step'] + 4}", SLURM_JOB_ID=job, OUT=str(run), SLURM_RESTART_COUNT="1")
    assert "the run is complete" in ended(process, 0)
    assert log_of(place, "scontrol") == []
    losses = {event["step"]: event["loss"] for event in place.events("slurm") if event["event"] == "train"}
    assert sorted(losses) == list(range(end["step"] + 4))
    assert {step: losses[step] for step in expected} == expected
    assert [event["event"] for event in place.events("slurm", "rank_00001.jsonl")].count("end") == 2


@pytest.mark.parametrize(
    ("line", "number", "status", "requeued"),
    [
        ("exit 2", None, 2, False),
        ("exit 3", None, 3, False),
        ("exit $((SLURM_PROCID == 1 ? 137 : 75))", None, 137, True),
        ("exit 75", None, 75, True),
        ("exit 130", signal.SIGUSR1, 130, True),
        ("exit 130", signal.SIGTERM, 130, False),  # scancel
        ("exit 0", signal.SIGUSR1, 0, False),  # it was the last step
    ],
)
def test_slurm_queue(place: Place, line: str, number: int | None, status: int, requeued: bool) -> None:
    """line: what each task does, at once or when SIGTERM comes."""
    log, tasks = place.folder / "tasks_there", place.folder / "tasks"
    for file in (log, tasks):
        file.unlink(missing_ok=True)
    if number is not None:
        line = f"trap '{line}' TERM; echo there >> {log}; while :; do sleep 0.05; done"
    python = place.program("some_python", f"#!/bin/sh\n{line}\n")
    process = slurm(place, SLURM_JOB_ID="77", PYTHON=str(python))
    if number is not None:
        wait_until(lambda: log.exists() and log.read_text().count("there") == 2, lambda: process.poll() is None)
        wait_until(tasks.exists, lambda: process.poll() is None)
        process.send_signal(number)
        if number == signal.SIGTERM:  # SLURM tells the tasks too
            for pid in tasks.read_text().split():
                os.kill(int(pid), signal.SIGTERM)
    ended(process, status)
    assert log_of(place, "scontrol") == (["requeue 77"] if requeued else [])
    log_of(place, "scancel")


def test_kubernetes_job() -> None:
    """Parsed, and read as the program reads it; no cluster has seen it."""
    yaml = pytest.importorskip("yaml")
    service, claim, job = yaml.safe_load_all((LAUNCH / "kubernetes_many.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    (rule,) = (rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob")
    assert rule["onExitCodes"]["values"] == [ExitCode.BAD_INPUT, ExitCode.DIVERGED]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    assert container["command"][-1] == "train.py"  # no shell, which would keep the signal for itself
    config = given_options(container["args"]).config
    assert config.reuse and config.checkpoint_every and config.num_processes == spec["completions"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert config.output_dir.startswith(mounts["runs"]) and config.train_data.startswith(mounts["data"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert "ReadWriteMany" in claim["spec"]["accessModes"] and volumes.keys() == mounts.keys()
    name, domain = job["metadata"]["name"], f"{pod['subdomain']}.default.svc.cluster.local"
    assert pod["subdomain"] == service["metadata"]["name"]
    for index in range(spec["completions"]):
        found = member_of(config, {"JOB_COMPLETION_INDEX": str(index)}, f"{name}-{index}.{domain}")
        assert found == Member(index, spec["completions"], f"{name}-0.{domain}", 12345, "Kubernetes", name)


def test_slurm_flags() -> None:
    """What the script gives to train.py is understood, and so is what it asks of SLURM."""
    text = (LAUNCH / "slurm_many.sh").read_text()
    found = re.search(r"^flags=\((.*?)\)$", text, re.MULTILINE | re.DOTALL)
    assert found
    config = given_options([*shlex.split(found[1].replace("\n", " ")), "-o", "x", "-y", "1"]).config
    assert config.checkpoint_every and config.total_batch_size == 524288
    asked = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--requeue", "--signal=B:USR1@120", "--open-mode=append", "--nodes=2"} <= set(asked)
