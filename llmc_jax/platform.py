"""What has to be set before JAX starts: the compile cache, the CPU's memory pages. The one place that does it.

Nothing here is needed for correct results; each setting is here because a measurement says so (benchmarks/README.md).
"""

import os
import sys
from pathlib import Path

from llmc_jax.files import cache_folder

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


def configure(*, tf32: bool = True) -> None:
    """Sets up JAX: call before its first computation. What the user has set in the environment stays.

    tf32: whether float32 products may use TF32 on NVIDIA GPUs that have it; the CPU always computes in float32.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's informational lines on stderr
    import jax

    if not tf32:
        jax.config.update("jax_default_matmul_precision", "highest")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    # JAX caches only what took a second to compile; the demo's programs are smaller, and a cached one starts at once.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
