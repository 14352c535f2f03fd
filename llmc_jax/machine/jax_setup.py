"""How the program stands in its surroundings: what is set before JAX starts.

The settings (compile cache, memory pages) are not needed for correct results; each is here because a measurement says
so (benchmarks/README.md). Leaves out what the machine can do (device.py).
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from llmc_jax.base.commands import ROOT
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, write_problem

if TYPE_CHECKING:
    from llmc_jax.machine.device import Device

FIXED_THREADS = 8  # of XLA on a CPU, for the same bits on up to so many devices
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # for what must leave the cores to others
MEMORY_SHARE = 0.92  # of a GPU that JAX's allocator is given; what CUDA's libraries need is the rest
# Settings of JAX, and the value that our programs are written for: with another they fail, or compute in float64.
NEEDED = {"JAX_ENABLE_X64": False, "JAX_NUMPY_DTYPE_PROMOTION": "standard", "JAX_NUMPY_RANK_PROMOTION": "allow"}
NOT_WITH_STEPS = {  # settings for debugging, and why no step is made with them
    "JAX_DISABLE_JIT": "a step is compiled before it runs",
    "JAX_DEBUG_NANS": "a step's z-scores are NaN at first; --max-nonfinite 1 ends a run at the first bad loss",
}
TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"  # one heap, so that `keep_freed` is of all threads
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
SPARE = 3  # times the memory of a step: a CPU that has more keeps what a step frees
OFF = ("", "0", "n", "no", "f", "false", "off")  # as JAX reads them


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process that runs a module of this package, without what `settle` looks at.

    environ: in place of this process's.
    """
    given = os.environ if environ is None else environ
    environ = {name: value for name, value in given.items() if name not in (*NEEDED, *NOT_WITH_STEPS)}
    paths = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
    return {**environ, "PYTHONPATH": paths}


def restart_with_huge_pages() -> None:
    """Start this Python process again with 2 MiB pages for large allocations, on Linux, unless it has them already.

    XLA allocates a step's temporaries anew each step, about 1 GB for GPT-2 124M at B=4 T=64; with 4 KiB pages it
    spends a sixth of the step mapping them. glibc reads this setting only when a process starts, hence the
    restart. Call it first thing in a script, before anything is imported that takes time.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or os.environ.get("LLMC_JAX_NO_RESTART"):
        return
    try:
        if "[madvise]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
            return  # 'always' needs no help, 'never' cannot be helped
    except OSError:
        return
    os.environ["GLIBC_TUNABLES"] = TUNABLES
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Python, as it starts, has no words for a Ctrl-C
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep_freed(device: "Device", needed: int) -> None:
    """Keep the memory that is freed from now on: on a CPU, in a process that `restart_with_huge_pages` started again.

    Linux clears all memory before a process has it: 6 % of a step (benchmarks/results/cpu_step.md). needed: bytes that
    a step takes, of which the machine must have SPARE times as many.
    """
    spare = device.platform == "cpu" and SPARE * needed < (device.memory_bytes or 0)
    if spare and os.environ.get("GLIBC_TUNABLES") == TUNABLES:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
        libc.mallopt(M_MMAP_MAX, 0)


def settle(*, steps: bool = False) -> list[str]:
    """Set aside what the environment has of NEEDED, for this process and those that it starts; return a note on it.

    steps: whether steps are made. Raises InputError for what does not go with them, and for an XLA_FLAGS that XLA
    refuses, for which it would end this process.
    """
    for name, why in NOT_WITH_STEPS.items():
        if steps and os.environ.get(name, "").lower() not in OFF:
            raise InputError(f"{name}={os.environ[name]}: {why}; unset it")
    if os.environ.get("XLA_FLAGS") and (words := _refused_by_xla()):
        raise InputError(f"XLA_FLAGS: XLA rejects it: {words}; correct or unset it")
    others = {name: value for name in NEEDED if (value := os.environ.pop(name, "")).lower() not in (*OFF, NEEDED[name])}
    if jax := sys.modules.get("jax"):  # which has read the environment already
        for name in others:
            jax.config.update(name.lower(), NEEDED[name])
    named = ", ".join(f"{name}={value}" for name, value in others.items())
    return [f"{named}: set aside; this program needs JAX's default"] if others else []


def _refused_by_xla() -> str:
    """Return why XLA refuses XLA_FLAGS, which a process says that it ends; nothing where it takes them."""
    command = [sys.executable, "-P", "-c", "from jaxlib.xla_client import make_cpu_client; make_cpu_client()"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    said = re.search(r"_(?:from_env|line_flags)\.cc:\d+\] (.*?)\.?( \(We assumed.*)?$", done.stderr, re.MULTILINE)
    return said[1] if said and done.returncode else ""


def configure(*, tf32: bool = True, devices: int = 0, fixed_threads: bool = False) -> list[str]:
    """Set up JAX: call before its first computation. The environment stays as it is, but for what `settle` sets aside.

    tf32: whether float32 products may use TF32 on NVIDIA GPUs that have it; the CPU always computes in float32.
    devices: that a run takes: the first GPUs, so that the others' memory stays free, or as many as a CPU pretends to
    have; 0: all, on a CPU one. fixed_threads: XLA splits sums on a CPU among its threads, so
    their number must not depend on the number of cores or devices.
    Returns notes for the user: the compile cache stays off where its folder cannot be written.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's informational lines on stderr
    # JAX takes three quarters of a GPU's memory; a trainer has the card to itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_SHARE))
    if fixed_threads:
        os.environ.setdefault("NPROC", str(max(FIXED_THREADS, devices)))
    import jax

    if devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", devices)
    if devices and "JAX_CUDA_VISIBLE_DEVICES" not in os.environ:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(devices))))
    if not tf32:
        jax.config.update("jax_default_matmul_precision", "highest")
    notes = []
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = cache_folder() / "xla"
        problem = write_problem(folder)
        jax.config.update("jax_compilation_cache_dir", None if problem else str(folder))
        if problem:
            notes.append(
                f"{folder}: cannot be written ({problem}), so compiled programs are not cached; see LLMC_JAX_CACHE"
            )
    # XLA cannot write a program with oneDNN's products (compiling.py), and JAX says so each time.
    warnings.filterwarnings("ignore", "(?s)Error writing persistent.*ToProto is not implemented.*onednn")
    # JAX caches only what took a second to compile; the demo's programs are smaller, and a cached one starts at once.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return notes
