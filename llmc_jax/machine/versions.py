"""What a result may depend on beside the machine: the versions of the packages, and the commit of the source."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on. Imports none of the packages."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "numpy", "llmc-jax"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


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
