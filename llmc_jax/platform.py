"""What has to be set before JAX starts: the compile cache, the CPU's memory pages. The one place that does it.

Nothing here is needed for correct results; each setting is here because a measurement says so (benchmarks/README.md).
"""

import os
import platform
import sys
from pathlib import Path

_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def restart_with_huge_pages() -> None:
    """On Linux, starts this Python process again with 2 MiB pages for large allocations, unless it has them already.

    XLA allocates a step's temporaries anew each step, 1 GB for GPT-2 124M at B=4 T=64; with 4 KiB pages the kernel
    spends a quarter of the step mapping them. glibc reads this setting only when a process starts, hence the
    restart. Call it first thing in a script, before anything is imported that takes time.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or os.environ.get("LLMC_JAX_NO_RESTART"):
        return
    try:
        if "[madvise]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
            return  # 'always' needs no help, 'never' cannot be helped
    except OSError:
        return
    os.environ["GLIBC_TUNABLES"] = _HUGE_PAGES
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def cache_folder() -> Path:
    """Where compiled programs and the built-in corpus are kept: LLMC_JAX_CACHE, or the user's cache folder."""
    if chosen := os.environ.get("LLMC_JAX_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "llmc-jax"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmc-jax"


def configure() -> None:
    """Sets what JAX reads once: call before the first use of JAX. What the user has set in the environment stays."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's informational lines on stderr


def cpu_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
