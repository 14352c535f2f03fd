"""A file of algorithms that XLA chose for the products of a GPU: kept under the digest of its content, and checked.

JAX looks for a compiled program by the path of such a file, whatever stands in it: so the path must tell it from any
other, and be the same for runs alike. Leaves out how programs are compiled with it (compiling.py).
"""

import hashlib
import re
from pathlib import Path

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, refusing, write_bytes

ADVICE = "give a file that `benchmarks/gpu_check.sh algorithms` wrote with this JAX, or leave --algorithms out"


def name_of(content: bytes, suffix: str) -> str:
    """Return the name of a file with some content: algorithms_<digest>.txt. suffix: that of the file it comes from."""
    known = suffix if suffix in (".txt", ".textproto") else ".pb"  # by which XLA tells text from its binary format
    return f"algorithms_{hashlib.sha256(content).hexdigest()[:12]}{known}"


def path_of(name: str) -> Path:
    """Return where a file is that `kept` gave its name."""
    return cache_folder() / "algorithms" / name


def kept(given: str, run: str = "") -> str:
    """Keep a copy of a file for XLA, and return its name. Empty for no file.

    given: its path, or the name of the copy in the folder of a run, which counts more. Raises InputError where it
    cannot be read or kept, and where it is empty, which XLA would take.
    """
    if not given:
        return ""
    file = Path(run, given) if Path(run, given).is_file() else Path(given)
    with refusing(f"--algorithms {file}: cannot be read", ADVICE):
        content = file.read_bytes()
    if not content.strip():
        raise InputError(f"--algorithms {file}: is empty; {ADVICE}")
    copy = path_of(name_of(content, file.suffix))
    with refusing(f"--algorithms {file}: cannot be kept as {copy}", "see LLMC_JAX_CACHE"):
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(copy, content)
    return copy.name


def check_made_for(name: str, version: tuple[int, int]) -> None:
    """Raise InputError where a file says that it is of GPUs of another compute capability: XLA would not use it."""
    found = re.findall(r"CUDA: (\d+\.\d+)", path_of(name).read_bytes().decode("latin1"))
    if found and (own := "{}.{}".format(*version)) not in found:
        raise InputError(f"--algorithms: was made on a GPU of compute capability {found[0]}, and this one has {own}")
