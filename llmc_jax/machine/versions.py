"""What a result may depend on beside the machine: the versions of the packages, and the commit of the source."""

import importlib.metadata
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any


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


def git_state(root: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of the source and whether files differ from it; None where it is no git checkout."""
    root = Path(__file__).resolve().parents[2] if root is None else root
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "modified": bool(changes)}


def _git(root: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
