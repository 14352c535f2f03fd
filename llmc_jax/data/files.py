"""Where the data tools keep files, and how they write one so that it is never half-written.

Leaves out token files (tokenfile.py) and downloads (download.py).
"""

import os
import sys
import uuid
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's caches live: $LLMC_JAX_CACHE, else llmc-jax in $XDG_CACHE_HOME or the system's usual place."""
    if own := os.environ.get("LLMC_JAX_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "llmc-jax"
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.path.expanduser("~")) / usual / "llmc-jax"


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file that appears under its name only when complete. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")  # two processes never share a name
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def reason(error: BaseException) -> str:
    """An OSError's cause in words, without its number and path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
