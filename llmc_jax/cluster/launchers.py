"""The place of this process in a run, by flags or by the environment that a launcher has made.

Flags take precedence. Leaves out how the processes meet. Opens no connection and looks up no name.
"""

import re
import socket
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import parse_address
from llmc_jax.config.train import TrainConfig

PORT = 12345  # llm.c's
# Where process 0 listens if the launcher names the job: below the ports that Kubernetes (from 30000) and Linux (from
# 32768) give away, and by the job, so that two jobs on one host seldom want the same.
JOB_PORTS = range(20_000, 30_000)
SLURM_STEPS = 0xFFFFFFF0  # numbers from here on are no steps of srun: a batch script, an interactive shell
HERE = "127.0.0.1"

Environ = Mapping[str, str]


class Member(NamedTuple):
    """One process of a run that has several."""

    rank: int  # from 0
    size: int  # processes of the run
    host: str  # where the parent of rank 0 listens
    port: int
    launcher: str  # mpirun, mpiexec, srun, torchrun, Kubernetes, -pi tcp, -pi fs
    job: str = ""  # tells the processes of this run from those of another at the same port
    folder: Path | None = None  # -pi fs: where rank 0 writes its address, which is not known here ("", 0)


def member_of(config: TrainConfig, environ: Environ, hostname: str) -> Member | None:
    """Return which process of the run this is; None where it is the only one.

    hostname: as `host_name` gives it. Raises InputError where flags and launcher contradict each other, or do not say
    enough.
    """
    told = _told(config, environ, hostname)
    size = config.num_processes or (told.size if told else 1)
    if size == 1 and config.process_rank > 0:
        raise InputError(f"-pr {config.process_rank}: write -pn too, the number of processes")
    if size == 1:
        return None
    if told is None and config.init_method == "mpi" and not config.server_ip:
        raise InputError(
            f"-pn {size}: nothing says how the processes find each other; leave -pn out and start them with mpirun, "
            f"srun or torchrun, or give each its -pr and -pi tcp -ps ADDRESS, the host of process 0"
        )
    rank = config.process_rank if told is None else told.rank
    if rank < 0:
        raise InputError(f"-pn {size}: write -pr too, the number of this process, from 0 to {size - 1}")
    if config.init_method == "fs":
        if not config.fs_path:
            raise InputError("-pi fs: write -pf DIR too, a folder that all processes share")
        return Member(rank, size, "", 0, "-pi fs", told.place.job if told else "", Path(config.fs_path))
    address = parse_address(config.server_ip)
    if told is None or config.init_method == "tcp":
        if address is None:
            raise InputError("-pi tcp: write -ps ADDRESS too, the host of process 0")
        return Member(rank, size, address[0], address[1] or PORT, "-pi tcp", told.place.job if told else "")
    host, job, port, why = told.place
    port = port or (port_of(job) if job else PORT)
    if address:
        host, port = address[0], address[1] or port
    if not host:
        raise InputError(f"{told.launcher}: {why}; write -ps ADDRESS, the host of process 0")
    return Member(rank, size, host, port, told.launcher, job)


def host_name(environ: Environ) -> str:
    """Return this host's name; in a Job of Kubernetes with the domain by which other pods know it.

    Not elsewhere, since asking for a domain can take long where nothing answers.
    """
    return socket.getfqdn() if KUBERNETES.rank in environ else socket.gethostname()


def port_of(job: str) -> int:
    """Return the port at which process 0 of a job listens."""
    return JOB_PORTS[zlib.crc32(job.encode()) % len(JOB_PORTS)]


# ----- launchers ------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """What a launcher says of where process 0 is."""

    host: str = ""  # empty: it does not say
    job: str = ""
    port: int = 0  # 0: by the job
    why: str = ""  # there is no host


class LaunchInfo(NamedTuple):
    """What a launcher says of this process."""

    launcher: str
    rank: int
    size: int  # 0: it does not say
    place: Place


class Launcher(NamedTuple):
    """A launcher by what it puts into the environment."""

    name: str
    rank: str  # the variable with the number of this process
    sizes: tuple[str, ...]  # with the number of processes; the first that is set counts; none: it does not say
    place: Callable[[Environ, int, int, str], Place]  # of the environment, rank, size and this host's name
    applies: Callable[[Environ], bool] = lambda environ: True  # beside having set the rank and the size


def _by_torchrun(environ: Environ, rank: int, size: int, hostname: str) -> Place:
    """Return the port beside torchrun's, at which its own store listens."""
    port = _number(environ, "MASTER_PORT")
    return Place(environ["MASTER_ADDR"], environ.get("TORCHELASTIC_RUN_ID", ""), port + 1 if port < 65535 else port - 1)


def _by_open_mpi(environ: Environ, rank: int, size: int, hostname: str) -> Place:
    """Return where mpirun runs: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1,fe80::2]:43370."""
    uri, own = (environ.get(f"OMPI_MCA_orte_{name}_uri", "") for name in ("hnp", "local_daemon"))
    job = environ.get("PMIX_NAMESPACE", uri.partition(";")[0])
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        return Place(HERE, job)
    found = re.search(r"tcp://([^,:;]+)|tcp6://\[([^],]+)", uri)
    if found is None:
        return Place(job=job, why="this Open MPI does not say where process 0 is")
    if rank == 0 and own and own.partition(";")[0] != uri.partition(";")[0]:
        return Place(job=job, why="mpirun itself runs on another host than process 0")
    return Place(found[1] or found[2], job)


def _by_pmi(environ: Environ, rank: int, size: int, hostname: str) -> Place:
    job = environ.get("PMI_JOBID", "")
    if environ.get("MPI_LOCALNRANKS") == str(size):
        return Place(HERE, job)
    return Place(job=job, why="it does not say where process 0 is")


def _by_slurm(environ: Environ, rank: int, size: int, hostname: str) -> Place:
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return Place(HERE, job)
    return Place(first_host(environ["SLURM_STEP_NODELIST"]), job, why="SLURM_STEP_NODELIST names no host")


def _is_slurm_step(environ: Environ) -> bool:
    """Return whether srun has started this process, and not sbatch the script, or salloc the shell, round it."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < SLURM_STEPS and "SLURM_STEP_NODELIST" in environ


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM writes it: node001 of `node[001-015,020],x`."""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\]]*)\]", lambda group: re.split("[,-]", group[1])[0], match[0] if match else "")


def _by_kubernetes(environ: Environ, rank: int, size: int, hostname: str) -> Place:
    """Return the name of pod 0: train-0.trainers.default.svc.cluster.local for train-3.trainers.…"""
    pod, _, domain = hostname.partition(".")
    if not pod.endswith(f"-{rank}"):
        return Place(why=f"this pod's name, {pod}, does not end in its index, {rank}")
    job = pod.removesuffix(f"-{rank}")
    if not domain:
        return Place(job=job, port=PORT, why=f"{pod} has no subdomain, by which pods find each other")
    return Place(f"{job}-0.{domain}", job, PORT)  # each pod has all ports to itself


KUBERNETES = Launcher("Kubernetes", "JOB_COMPLETION_INDEX", (), _by_kubernetes)
# The innermost first: mpirun, mpiexec and torchrun may be started by srun, and any of them in a pod.
LAUNCHERS = (
    Launcher(
        "torchrun", "RANK", ("WORLD_SIZE",), _by_torchrun, lambda env: "MASTER_ADDR" in env and "MASTER_PORT" in env
    ),
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), _by_open_mpi),
    Launcher("mpiexec", "PMI_RANK", ("PMI_SIZE",), _by_pmi, lambda env: "MPI_LOCALNRANKS" in env),
    Launcher("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), _by_slurm, _is_slurm_step),
    Launcher("mpiexec", "PMI_RANK", ("PMI_SIZE",), _by_pmi),  # after srun, which may speak PMI too
    KUBERNETES,
)


def _told(config: TrainConfig, environ: Environ, hostname: str) -> LaunchInfo | None:
    """Return what the launcher says; None where there is none, or it started this process alone.

    Raises InputError where -pn or -pr say something else.
    """
    for launcher in LAUNCHERS:
        size_from = next((name for name in launcher.sizes if name in environ), "")
        if launcher.rank in environ and bool(size_from) == bool(launcher.sizes) and launcher.applies(environ):
            break
    else:
        return None
    rank, size = _number(environ, launcher.rank), _number(environ, size_from) if size_from else config.num_processes
    if size <= 1:
        return None
    if rank >= size:
        said = f"{size_from}={size}" if size_from else f"-pn {size}"
        raise InputError(f"{launcher.name}: {launcher.rank}={rank}, but {said}; ranks count from 0")
    for flag, given, told, where in (
        ("-pn", config.num_processes or size, size, size_from),
        ("-pr", rank if config.process_rank < 0 else config.process_rank, rank, launcher.rank),
    ):
        if given != told:
            raise InputError(f"{flag} {given}: {launcher.name} says {where}={told}; leave {flag} out")
    return LaunchInfo(launcher.name, rank, size, launcher.place(environ, rank, size, hostname))


def _number(environ: Environ, name: str) -> int:
    value = environ[name]
    if not re.fullmatch("[0-9]{1,9}", value):
        raise InputError(f"{name}={value}: the environment of a launcher, but this is no number; unset it")
    return int(value)
