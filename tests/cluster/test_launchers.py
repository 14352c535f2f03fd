"""Which process of a run this is, by flags and the environments of launchers."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import parse_address
from llmc_jax.cluster.launchers import JOB_PORTS, PORT, Member, first_host, host_name, member_of, port_of
from llmc_jax.config.train import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
# What launchers have been seen to set. mpirun's: Open MPI 4.1.4, two processes on one host.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "2096431104.0;tcp://192.0.2.2,172.17.0.1:57041;tcp6://[fd00::2]:37433",
    "OMPI_MCA_orte_local_daemon_uri": "2096431104.0;tcp://192.0.2.2,172.17.0.1:57041;tcp6://[fd00::2]:37433",
    "PMIX_NAMESPACE": "2096431105", "PMIX_RANK": "1",
}  # fmt: skip
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-node1-4321@1", "PMIX_RANK": "1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[07,09-10]", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0",
}  # fmt: skip
SBATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_JOB_NODELIST": "gpu[07,09-10]"}
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "again",
}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "3"}
PODS_NAME = "train-7-3.trainers.default.svc.cluster.local"


def member(environ: dict[str, str], hostname: str = "node1", **options: Any) -> Member | None:
    return member_of(TrainConfig(**options), environ, hostname)


def problem(environ: dict[str, str], hostname: str = "node1", **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        member(environ, hostname, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("environ", "hostname", "options", "expected"),
    [
        (OPEN_MPI, "node1", {}, Member(1, 2, "127.0.0.1", port_of("2096431105"), "mpirun", "2096431105")),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "node1", {},
            Member(1, 2, "192.0.2.2", port_of("2096431105"), "mpirun", "2096431105"),
        ),
        (
            OPEN_MPI_5 | {"OMPI_MCA_orte_hnp_uri": "13145.0;tcp6://[fe80::b9b:1,2620::2]:43370"}, "node1", {},
            Member(1, 2, "fe80::b9b:1", port_of("prterun-node1-4321@1"), "mpirun", "prterun-node1-4321@1"),
        ),
        (OPEN_MPI_5, "node1", {"server_ip": "node1:444"}, Member(1, 2, "node1", 444, "mpirun", "prterun-node1-4321@1")),
        (HYDRA, "node1", {}, Member(1, 2, "127.0.0.1", PORT, "mpiexec")),
        (SRUN, "gpu09", {}, Member(4, 6, "gpu07", port_of("77.3"), "srun", "77.3")),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, "gpu07", {}, Member(4, 6, "127.0.0.1", port_of("77.3"), "srun", "77.3")),
        (TORCHRUN, "node2", {}, Member(3, 4, "node1", 29501, "torchrun", "again")),
        (TORCHRUN | {"MASTER_PORT": "65535"}, "node2", {}, Member(3, 4, "node1", 65534, "torchrun", "again")),
        (
            POD, PODS_NAME, {"num_processes": 4},
            Member(3, 4, "train-7-0.trainers.default.svc.cluster.local", PORT, "Kubernetes", "train-7"),
        ),
        (POD, "x", {"num_processes": 4, "server_ip": "10.0.0.9"}, Member(3, 4, "10.0.0.9", PORT, "Kubernetes")),
    ],
)  # fmt: skip
def test_what_a_launcher_says(
    environ: dict[str, str], hostname: str, options: dict[str, Any], expected: Member
) -> None:
    assert member(environ, hostname, **options) == expected
    told = {"num_processes": expected.size, "process_rank": expected.rank} | options
    assert member(environ, hostname, **told) == expected


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (OPEN_MPI | SRUN, "mpirun"),  # mpirun's daemons are steps of srun
        (HYDRA | SRUN, "mpiexec"),  # so are those of mpiexec
        ({"PMI_RANK": "4", "PMI_SIZE": "6"} | SRUN, "srun"),  # srun --mpi=pmi2
        (TORCHRUN | SRUN, "torchrun"),
        (SRUN | POD, "srun"),
    ],
)
def test_the_innermost_launcher_counts(environ: dict[str, str], launcher: str) -> None:
    found = member(environ)
    assert found is not None and found.launcher == launcher


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SBATCH,
        SBATCH | {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NODELIST": "gpu07"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # a shell in an allocation of six: srun --pty bash
        SRUN | {"SLURM_STEP_ID": "4294967290"},  # salloc's
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},  # six runs of one process
        {"RANK": "1", "WORLD_SIZE": "2"},  # anybody's
        POD,  # without -pn: pods that have nothing to do with each other
    ],
)
def test_one_process(environ: dict[str, str]) -> None:
    assert member(environ) is None
    assert member(environ, num_processes=1) is None


@pytest.mark.parametrize(
    ("environ", "options", "words"),
    [
        (SRUN, {"num_processes": 4}, "-pn 4: srun says SLURM_STEP_NUM_TASKS=6; leave -pn out"),
        (SRUN, {"num_processes": 1}, "-pn 1: srun says SLURM_STEP_NUM_TASKS=6"),
        (TORCHRUN, {"process_rank": 0}, "-pr 0: torchrun says RANK=3; leave -pr out"),
        (TORCHRUN | {"RANK": "4"}, {}, "torchrun: RANK=4, but WORLD_SIZE=4; ranks count from 0"),
        (TORCHRUN | {"RANK": "four"}, {}, "RANK=four: "),
        (TORCHRUN | {"MASTER_PORT": ""}, {}, "MASTER_PORT=: "),
        (POD, {"num_processes": 3}, "Kubernetes: JOB_COMPLETION_INDEX=3, but -pn 3; ranks count from 0"),
        (OPEN_MPI_5, {}, "mpirun: this Open MPI does not say where process 0 is; write -ps ADDRESS"),
        (
            OPEN_MPI | {
                "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                "OMPI_MCA_orte_local_daemon_uri": "2096431104.1;tcp://192.0.2.3:4",
            },
            {}, "mpirun: mpirun itself runs on another host than process 0; write -ps ADDRESS",
        ),
        (HYDRA | {"MPI_LOCALNRANKS": "1"}, {}, "mpiexec: it does not say where process 0 is; write -ps ADDRESS"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, {}, "srun: SLURM_STEP_NODELIST names no host; write -ps ADDRESS"),
    ],
)  # fmt: skip
def test_what_a_launcher_does_not_say_or_flags_contradict(
    environ: dict[str, str], options: dict[str, Any], words: str
) -> None:
    assert problem(environ, **options).startswith(words)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here")
def test_mpirun_itself(tmp_path: Path) -> None:
    """Each process writes a file: on the screen their lines run into each other."""
    code = (
        "import os, pathlib, sys; from llmc_jax.cluster.launchers import *; "
        "found = member_of(TrainConfig(), os.environ, host_name(os.environ)); "
        "pathlib.Path(sys.argv[1], str(found.rank)).write_text(f'{found.size} {found.host} {found.port} {found.job}')"
    )
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(mpirun, timeout=300, check=True, cwd=ROOT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    (said,) = {path.read_text() for path in tmp_path.iterdir()}
    size, host, port, job = said.split()
    assert (size, host, int(port)) == ("3", "127.0.0.1", port_of(job)) and int(port) in JOB_PORTS


def test_pods_need_a_name() -> None:
    assert "no subdomain" in problem(POD, "train-3", num_processes=4)
    assert "does not end in its index, 3" in problem(POD, "train-30.trainers", num_processes=4)


def test_this_host_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its domain in Kubernetes alone, where nothing has to be waited for."""
    monkeypatch.setattr(socket, "gethostname", lambda: "train-3")
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-3.trainers.svc")
    assert (host_name({}), host_name(POD)) == ("train-3", "train-3.trainers.svc")


@given(st.text())
def test_ports_of_jobs(job: str) -> None:
    assert port_of(job) in JOB_PORTS and JOB_PORTS.stop <= 30_000


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[str, str]:
    text = first = draw(st.sampled_from("abc"))
    for _ in range(draw(st.integers(0, 2))):
        width = draw(st.integers(1, 4))
        numbers = [str(draw(st.integers(0, 10**width - 1))).zfill(width) for _ in range(draw(st.integers(1, 3)))]
        ranges = [f"{number}-{'9' * width}" if draw(st.booleans()) else number for number in numbers]
        end = draw(st.text("abcxyz-0123456789", min_size=1, max_size=4))
        text, first = f"{text}[{','.join(ranges)}]{end}", first + numbers[0] + end
    rest = draw(st.lists(st.sampled_from(["x", "y[1-3]", "z[01,7]-ib"]), max_size=2))
    return ",".join([text, *rest]), first


@given(node_lists())
@example(("gpu-a-[2-3].cluster.local", "gpu-a-2.cluster.local"))
@example(("", ""))
@example((",", ""))
def test_the_first_host_of_a_list(nodes_and_first: tuple[str, str]) -> None:
    nodes, first = nodes_and_first
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"num_processes": 2, "process_rank": 1, "init_method": "tcp", "server_ip": "10.0.0.1"},
            Member(1, 2, "10.0.0.1", PORT, "-pi tcp"),
        ),
        (
            {"num_processes": 2, "process_rank": 0, "server_ip": "[::1]:4000"},  # -pi tcp goes without saying
            Member(0, 2, "::1", 4000, "-pi tcp"),
        ),
        (
            {"num_processes": 2, "process_rank": 1, "init_method": "fs", "fs_path": "/shared/run"},
            Member(1, 2, "", 0, "-pi fs", folder=Path("/shared/run")),
        ),
    ],
)
def test_flags_alone(options: dict[str, Any], expected: Member) -> None:
    assert member({}, **options) == expected
    assert member(SBATCH, **options) == expected


def test_flags_of_llm_c_s_scripts_under_srun() -> None:
    """They pass -pn $SLURM_NTASKS -pr $SLURM_PROCID beside -pi; here these may be left out."""
    for told in ({}, {"num_processes": 6, "process_rank": 4}):
        found = member(SRUN, init_method="tcp", server_ip="gpu07", **told)
        assert found == Member(4, 6, "gpu07", PORT, "-pi tcp", "77.3")
        found = member(SRUN, init_method="fs", fs_path="/shared", **told)
        assert found == Member(4, 6, "", 0, "-pi fs", "77.3", Path("/shared"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_processes": 2}, ["-pn 2: nothing says", "mpirun, srun or torchrun", "-ps ADDRESS"]),
        ({"num_processes": 2, "process_rank": 1}, ["-pn 2: nothing says"]),
        ({"num_processes": 2, "server_ip": "node1"}, ["-pn 2: write -pr too", "from 0 to 1"]),
        ({"num_processes": 2, "process_rank": 1, "init_method": "tcp"}, ["-pi tcp: write -ps ADDRESS too"]),
        ({"num_processes": 2, "process_rank": 1, "init_method": "fs"}, ["-pi fs: write -pf DIR too"]),
        ({"process_rank": 2}, ["-pr 2: write -pn too"]),
    ],
)
def test_flags_that_do_not_say_enough(options: dict[str, Any], words: list[str]) -> None:
    said = problem({}, **options)
    assert said.startswith(words[0]) and all(word in said for word in words)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a-1.b", ("a-1.b", 0)), ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("::1", ("::1", 0)), ("[::1]", ("::1", 0)), ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("fd00::2:7", ("fd00::2:7", 0)), ("", None), (":1", None), ("a:", None), ("a:0", None), ("a:65536", None),
        ("a b", None), ("tcp://a:1", None), ("[a", None), ("a:b", None),
    ],
)  # fmt: skip
def test_forms_of_addresses(text: str, address: tuple[str, int] | None) -> None:
    assert parse_address(text) == address
