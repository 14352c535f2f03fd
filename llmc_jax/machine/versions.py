"""What a result may depend on beside the machine: versions of packages, the source's commit, the environment."""

import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmc_jax.base.options import without_credentials
from llmc_jax.machine.device import output_of

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
