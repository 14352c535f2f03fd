"""What was found out before: a file for each combination of card, versions, kernels and shapes, in the user's cache.

And the lock of a card, so that two programs do not try things on it at the same time.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.files import cache_folder, digest_of_files, try_lock
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.kernels import Findings
from llmc_jax.machine.device import installed
from llmc_jax.machine.driver import Card
from llmc_jax.trials.candidates import Case

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = ("../pallas_kernels", "kernels", "kernels/triton", "ops", "training", "trials")  # folders, from llmc_jax/
FILES = ("models/gpt2/model.py", "machine/compiling.py")
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


class Known(NamedTuple):
    """What a file holds."""

    facts: dict[str, Any]  # what it was found out for
    found: Findings
    date: str


def folder() -> Path:
    """Return where the files are."""
    return cache_folder() / "kernels"


def run_programs() -> Path:
    """Return where the programs for new runs are: a folder for each combination of what they depend on."""
    return cache_folder() / "programs"


def facts_of(case: Case, card: Card) -> dict[str, Any]:
    """Return all that the findings depend on, as JSON has it. Of the machine, nothing but the card and its driver."""
    return {
        "card": card.name,
        "capability": card.capability,
        "driver": card.driver,
        "versions": installed(*PACKAGES),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "sources": sources_digest(),
        "case": to_json(case),
    }


def sources_digest() -> str:
    """Return a digest of the kernels' sources and of what calls them."""
    paths = [path for name in SOURCES for path in (PACKAGE / name).resolve().glob("*.py")]
    return digest_of_files([*paths, *(PACKAGE / name for name in FILES)])


def file_of(facts: Mapping[str, Any]) -> Path:
    """Return the file of a combination."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return folder() / f"{digest[:24]}.json"


def all_known() -> list[Known]:
    """Return what all files hold, the newest last; those that are damaged are left out."""
    found = []
    for path in sorted(folder().glob("*.json")):
        with suppress(OSError, ValueError, RecursionError, OverflowError):
            found.append(from_json(Known, json.loads(path.read_bytes())))
    return sorted(found, key=lambda each: each.date)


def clear() -> int:
    """Delete all that is known and all compiled programs; return the number of combinations. Raises OSError."""
    paths = list(folder().glob("*.json"))
    for path in paths:
        path.unlink(missing_ok=True)
    for programs in (folder() / "xla", run_programs()):
        if programs.exists():
            shutil.rmtree(programs.resolve())  # it may be a link
    return len(paths)


@contextmanager
def locked(card: Card) -> Iterator[bool]:
    """Keep other programs of ours from trying anything on the card within the block; yield False where one does now.

    Where there can be no lock, the block runs without.
    """
    free = True
    with ExitStack() as stack:
        with suppress(OSError):
            folder().mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder() / f"{card.uuid}.lock").open("ab"))
            free = try_lock(file.fileno()) is not False
        yield free
