"""A checkpoint that many processes write together: its files, and what each process waits for at a save and a restart.

    python benchmarks/shared_checkpoint.py [--rounds 3] [--dir FOLDER] [--write]     into results/shared_checkpoint.md

Every process does what it would do in a run, but one after the other, in one process of this machine: so the seconds
of one process are those of a process that has the disk for itself. The arrays are those of an fp32 run: parameters, m
and v, three flat buffers of random values, and two small ones. "alone" is the layout of a run of one process, a file
for each buffer; the others have a file for each of the 64 blocks of each buffer.

What the first process does alone: the folder, the small arrays and the metadata (begin), then, once all have told it
their digests, the sizes of all files, the manifest, syncing and renaming (seal). The slowest of the others: its blocks
digested, written, synced, read back from the disk and compared. At a restart: the blocks that are its share of
checking every byte; its 64th of each buffer, as where the state is split over 64 devices or more; every buffer, as
where it is not. Before each of these the files are dropped from this machine's memory.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.heading import machine_line  # noqa: E402
from llmc_jax.checkpoint import store  # noqa: E402
from llmc_jax.checkpoint.contents import Identity, Metadata  # noqa: E402
from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.models.layout import flat_size, num_parameters  # noqa: E402
from llmc_jax.models.tensors import BLOCKS  # noqa: E402

RESULTS = ROOT / "benchmarks/results/shared_checkpoint.md"
MODELS = ("d12", "L2-NH4-C128-V257-T128")
ALONE = 0  # stands for the layout that one process writes
PROCESSES = (ALONE, 1, 8, 64, 512)
COLUMNS = {
    "files": "files",
    "bytes": "MB",
    "begin": "first: begin, s",
    "blocks": "slowest: its blocks, s",
    "seal": "first: seal, s",
    "share": "slowest: its share checked, s",
    "check": "all checked by one, s",
    "own": "its 64th read, s",
    "read": "every buffer read, s",
}
FLAT = ("params", "m", "v")


def random_state(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the arrays of a training state in fp32."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.random(flat_size(config), dtype=np.float32) for name in FLAT}
    return {**arrays, "step": np.array(1, np.int32), "updates": np.array(1, np.int32)}


def seconds(action: Callable[[], Any]) -> tuple[Any, float]:
    """Return what an action gives, and how long it took."""
    start = time.perf_counter()
    result = action()
    return result, time.perf_counter() - start


def write_alone(run: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> tuple[Path, dict[str, float]]:
    """Save as one process does."""
    writing, begin = seconds(lambda: store.begin(run, 1, arrays, facts))
    entry, seal = seconds(lambda: store.seal(writing))
    return entry.folder, {"begin": begin, "seal": seal}


def write_together(
    run: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any], processes: int
) -> tuple[Path, dict[str, float]]:
    """Save as several processes do."""
    buffers = {name: (arrays[name].size, arrays[name].dtype.name) for name in FLAT}
    small = {name: array for name, array in arrays.items() if name not in FLAT}
    writing, begin = seconds(lambda: store.begin(run, 1, small, facts, buffers, BLOCKS))
    told, slowest = [], 0.0
    for process in range(processes):
        own = store.own_blocks(process, processes)
        said, took = seconds(lambda own=own: write_own(writing.folder, arrays, buffers, own))
        told.append(said)
        slowest = max(slowest, took)
    entry, seal = seconds(lambda: store.seal(writing, digests=told))
    return entry.folder, {"begin": begin, "blocks": slowest, "seal": seal}


def write_own(
    folder: Path, arrays: dict[str, np.ndarray], buffers: dict[str, tuple[int, str]], own: range
) -> dict[str, dict[int, str]]:
    """Write a process's blocks and read them back; return their digests."""
    digests = {name: store.write_blocks(folder, name, blocks(arrays[name], own), BLOCKS) for name in buffers}
    for name, found in digests.items():
        store.read_back(folder, name, buffers[name], found, BLOCKS)
    return digests


def blocks(buffer: np.ndarray, own: range) -> dict[int, np.ndarray]:
    """Return blocks of a flat buffer, which are views."""
    length = buffer.size // BLOCKS
    return {k: buffer[k * length : (k + 1) * length] for k in own}


def drop(folder: Path) -> None:
    """Have a folder's files read from the disk the next time."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def restart(folder: Path, processes: int, model: ModelConfig) -> dict[str, float]:
    """Measure what a process does at a restart, and one that checks everything by itself."""
    run, n, took = folder.parent, processes or 1, {}
    drop(folder)
    shares = [seconds(lambda p=p: store.entry(run, 1, share=(p, n))) for p in range(n)]
    assert all(entry.problem is None for entry, _ in shares)
    took["share"] = max(each for _, each in shares)
    drop(folder)
    problem, took["check"] = seconds(lambda: store.check(folder))
    assert problem is None
    checkpoint, length = store.open_checkpoint(folder), flat_size(model) // BLOCKS
    drop(folder)
    _, took["own"] = seconds(lambda: [checkpoint.elements(name, 9 * length, 10 * length) for name in FLAT])
    drop(folder)
    for name in FLAT:  # one after the other, as a start does: no two are in memory
        took["read"] = took.get("read", 0.0) + seconds(lambda name=name: checkpoint.read(name))[1]
    return took


def measure(model: ModelConfig, processes: int, rounds: int, place: Path | None) -> dict[str, float]:
    """Return the medians of a row."""
    arrays, found = random_state(model), []
    facts = Metadata(1, Identity(model, "fp32", True)).to_json()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=place) as name:
            run = Path(name)
            folder, took = (
                write_together(run, arrays, facts, processes) if processes else write_alone(run, arrays, facts)
            )
            files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
            counts = {"files": float(len(files)), "bytes": sum(files) / 1e6}
            found.append(counts | took | restart(folder, processes, model))
    return {name: statistics.median(row[name] for row in found) for name in found[0]}


def table(name: str, rounds: int, place: Path | None) -> str:
    """Return a model's rows."""
    model = parse_descriptor(name)
    nbytes = len(FLAT) * flat_size(model) * 4
    lines = [
        f"## {name}: N={num_parameters(model):,}\n",
        f"At a restart of 512 processes, 64 of them read {nbytes / BLOCKS / 1e6:,.1f} MB each for their share of "
        f"checking; all read {nbytes / 1e6:,.1f} MB\neach, {512 * nbytes / 1e9:,.1f} GB together, where each reads "
        "every buffer.\n",
        f"| processes | {' | '.join(COLUMNS.values())} |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    for processes in PROCESSES:
        row = measure(model, processes, rounds, place)
        shown = [_number(column, row[column]) if column in row else "" for column in COLUMNS]
        lines.append(f"| {processes or 'alone'} | {' | '.join(shown)} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines) + "\n"


def _number(column: str, value: float) -> str:
    if column == "files":
        return f"{value:.0f}"
    return f"{value:,.1f}" if column == "bytes" else f"{value:.3f}"


def page(rounds: int, place: Path | None) -> str:
    """Return the tables, with where they come from."""
    head = (
        "# A checkpoint that many processes write together\n\n"
        f"`python benchmarks/shared_checkpoint.py --rounds {rounds} --write`\n\n"
        f"{machine_line()}.\nMedians of {rounds} rounds. The processes are simulated: each does its part after the "
        "other, on a local disk.\nA network file system takes the same files and bytes, but not the same time. "
        'What the columns mean is said in the\ncommand\'s file; "alone" is a run of one process.\n'
    )
    return "\n".join([head, *(table(name, rounds, place) for name in MODELS)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="on the disk that is to be measured")
    parser.add_argument("--write", action="store_true", help=f"into {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    text = page(options.rounds, options.dir)
    if options.write:
        RESULTS.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
