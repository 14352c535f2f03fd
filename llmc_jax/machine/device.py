"""This machine: its device, cores and memory; the versions of what computes there.

Leaves out measuring (benchmarks/), what GPUs are sold with (gpus.py), and whether a step fits (plan/fits.py).
Importing it does not import JAX.
"""

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import without_credentials
from llmc_jax.machine.gpus import card_memory_bytes


class Device(NamedTuple):
    """The machine that a run uses. memory_bytes is None where nothing says it."""

    platform: str  # cpu, gpu, tpu
    kind: str  # JAX's device_kind; on a CPU the processor's name
    num_devices: int  # that JAX sees, of all processes
    memory_bytes: int | None  # of one device; on a CPU the main memory
    cpu_cores: int  # that this process may use
    system: str  # operating system and architecture
    local_devices: int = 1  # of num_devices, those of this process
    process: int = 0  # its number among all, from 0
    processes: int = 1


def all_devices() -> list[Any]:
    """Return the devices that JAX sees, of all processes. Initialises JAX's backend.

    Raises InputError if JAX_PLATFORMS names a platform that JAX cannot use here.
    """
    import jax

    try:
        return jax.devices()
    except (AssertionError, RuntimeError) as error:  # the former, without words, where there is no GPU for `cuda`
        if (asked := jax.config.jax_platforms) in (None, "", "cpu"):
            raise
        words = " ".join(str(error).partition(" (set JAX_PLATFORMS")[0].split()).rstrip(".")
        why = words or "JAX finds no such device here"
        advice = "unset it, or set it to cpu; a GPU needs the extra cuda13 or cuda12 (`make setup JAX=cuda13`)"
        raise InputError(f"JAX_PLATFORMS={asked}: {why}; {advice}") from error


def first_device() -> Any:
    """Return the device that JAX computes on by default, which is this process's. Initialises JAX's backend."""
    import jax

    all_devices()
    return jax.local_devices()[0]


def devices_of(count: int) -> list[Any]:
    """Return the devices that a run takes: the first of those that JAX sees. Initialises JAX's backend.

    Raises InputError if they are not of one kind: one program runs on all of them.
    """
    devices = all_devices()[:count]
    if len(kinds := {device.device_kind for device in devices}) > 1:
        raise InputError(
            f"--devices {count}: they are of different kinds ({', '.join(sorted(kinds))}); name those to use in the "
            "environment variable CUDA_VISIBLE_DEVICES"
        )
    return devices


def memory_stats() -> dict[str, int]:
    """Return what JAX knows of that device's memory; empty where it does not say."""
    return first_device().memory_stats() or {}


def memory_in_use(device: Device) -> int | None:
    """Return the bytes that JAX has taken of the first GPU at most so far; on a CPU those of this process now."""
    if device.platform != "cpu":
        return memory_stats().get("peak_bytes_in_use")
    import psutil  # here, because --help does without

    rss: int = psutil.Process().memory_info().rss
    return rss


def full_memory(error: Exception) -> str | None:
    """Return what an error of JAX says of a device's memory that is full, on one line; None for any other error."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    return f"the device's memory is full: {str(error).splitlines()[0].rstrip('.')}"


@contextmanager
def refusing_full_memory(advice: str) -> Iterator[None]:
    """Make one line, with advice, of what JAX says in the block when the device's memory is full. Raises InputError."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (words := full_memory(error)) is None:
            raise
        raise InputError(f"{words}; {advice}") from error


def describe_device() -> Device:
    """Return the device that JAX computes on by default, and what there is of it. Initialises JAX's backend."""
    import jax

    devices = all_devices()
    on_cpu = devices[0].platform == "cpu"
    return Device(
        platform=devices[0].platform,
        kind=cpu_name() if on_cpu else devices[0].device_kind,
        num_devices=len(devices),
        memory_bytes=available_memory_bytes(),
        cpu_cores=len(usable_cores()),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        local_devices=jax.local_device_count(),
        process=jax.process_index(),
        processes=jax.process_count(),
    )


def device_label(device: Device, used: int = 1) -> str:
    """Return a line: `2 of 8 x NVIDIA H200, 105.0 GiB` or `CPU: AMD EPYC 7B13, 2 cores, 23.5 GiB`. used: by the run."""
    memory = "" if device.memory_bytes is None else f", {gib(device.memory_bytes)}"
    if device.platform == "cpu":
        cores = "1 core" if device.cpu_cores == 1 else f"{device.cpu_cores} cores"
        pretended = "" if used == 1 else f", as {used} devices"
        return f"CPU: {device.kind}, {cores}{memory}{pretended}"
    there = f"{used} x " if used == device.num_devices else f"{used} of {device.num_devices} x "
    count = "" if device.num_devices == 1 else there
    return f"{count}{device.kind}{memory}"


def cpu_name() -> str:
    """Return the processor's model name, as the operating system gives it."""
    if platform.system() == "Darwin":
        name = output_of("sysctl", "-n", "machdep.cpu.brand_string")
    else:
        name = ""
        with suppress(OSError):
            found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE)
            name = found[1] if found else ""
    return name or platform.processor() or platform.machine() or "unknown processor"


def has_cpu_flag(flag: str) -> bool:
    """Return whether the processor can do something, by Linux's name of it; False on another system."""
    with suppress(OSError):
        return flag in Path("/proc/cpuinfo").read_text(errors="replace").split()
    return False


def output_of(*command: str, seconds: float = 5.0) -> str:
    """Return what a program prints; nothing where there is no such program, or it fails, or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, errors="replace", check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def usable_cores() -> list[int]:
    """Return the cores that this process may use, by their numbers."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_memory_bytes() -> int | None:
    """Return the bytes that one device of this machine can hold in all; None where nothing says it.

    GPU: what JAX's allocator may take (`jax_setup.configure` asks for 92 % of the card, unless the environment variable
    XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise).
    CPU: the main memory, or the container's limit where that is lower. Not what happens to be free at this moment:
    that changes by itself, while a model that exceeds the whole can never run.
    """
    device = first_device()
    if device.platform == "cpu":
        return host_memory_bytes()
    return memory_stats().get("bytes_limit") or card_memory_bytes(device.device_kind)


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return the main memory in bytes, or the limit of the control group this process runs in where that is lower.

    root: where /proc and /sys are looked for (a test's own).
    """
    import psutil  # here, because --help does without

    limits, lines, folder = [int(psutil.virtual_memory().total)], list[str](), root / "sys/fs/cgroup"
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    group = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")  # of version 2
    for part in ["", *(part for part in group.split("/") if part not in ("", ".."))]:  # every parent's limit counts
        folder /= part
        with suppress(OSError, ValueError):  # "max" where there is no limit
            limits.append(int((folder / "memory.max").read_text()))
    return min(limit for limit in limits if limit > 0)


def gib(num_bytes: int) -> str:
    """Return bytes as text in GiB (2^30), or MiB below one."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:,.1f} GiB"


# Variables that change how a program computes, how fast, or where. No others are ever recorded: some hold credentials.
VARIABLES = (
    "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR",
    "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_DISABLE_JIT", "JAX_DEBUG_NANS",
    "JAX_CUDA_VISIBLE_DEVICES", "JAX_COMPILATION_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE",
    "NPROC", "PJRT_NPROC", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX", "TF_CPP_MIN_LOG_LEVEL",
)  # fmt: skip


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed. Imports none of them."""
    import importlib.metadata  # here, because it takes 20 ms

    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    packages = "jax", "jaxlib", "numpy", "llmc-jax"
    return {"python": platform.python_version(), **dict.fromkeys(packages, "not installed"), **installed(*packages)}


def environment() -> dict[str, str]:
    """Return those of VARIABLES that are set."""
    return {name: without_credentials(os.environ[name]) for name in VARIABLES if name in os.environ}


def git_state(root: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of the source and whether files differ from it; None where it is no git checkout."""
    root = Path(__file__).resolve().parents[2] if root is None else root
    if not (root / ".git").exists():
        return None
    git = "git", "-C", str(root)
    commit, changes = output_of(*git, "rev-parse", "HEAD"), output_of(*git, "status", "--porcelain", "-uno")
    return {"commit": commit, "modified": bool(changes)} if commit else None
