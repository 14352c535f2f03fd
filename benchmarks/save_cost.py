"""What a checkpoint costs: seconds and memory of each part of a save, of checking and of reading it back.

    python benchmarks/save_cost.py [-e d12] [--rounds 5] [--dir FOLDER]

The arrays are those of an fp32 run: parameters, m and v, three flat buffers of random values. begin: the
digests from memory, and writing; the arrays may change after it. seal: reading back from the disk and comparing,
digests of the files, syncing. Beside them one file of the same bytes, written and synced, which is what the disk takes
at least. Memory: the most that a part needs beyond what the process held before it (Linux).
The disk is that of FOLDER, by default of the system's temporary folder.
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
from llmc_jax.base.errors import InputError  # noqa: E402
from llmc_jax.checkpoint import store  # noqa: E402
from llmc_jax.checkpoint.contents import FORMAT  # noqa: E402
from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters  # noqa: E402

PARTS = {
    "one file, written and synced": "disk",
    "begin": "begin",
    "seal": "seal",
    "check (verify)": "check",
    "every array read": "read",
}


def random_state(config: ModelConfig) -> dict[str, np.ndarray]:
    """The arrays of a training state in fp32."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.random(flat_size(config), dtype=np.float32) for name in ("params", "m", "v")}
    return {**arrays, "step": np.array(1, np.int32), "updates": np.array(1, np.int32)}


def memory_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (the most so far) of this process; NaN where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(field))


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


class Meter:
    """Seconds and MB of each part, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.memory: dict[str, list[float]] = {}

    def __call__(self, name: str, action: Callable[[], Any]) -> Any:
        forget_peak()
        before, start = memory_mb("VmRSS"), time.perf_counter()
        result = action()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        self.memory.setdefault(name, []).append(memory_mb("VmHWM") - before)
        return result


def write_plainly(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        for array in arrays.values():
            file.write(array.tobytes() if array.ndim == 0 else array.data)
        file.flush()
        os.fsync(file.fileno())


def read_all(folder: Path, names: list[str]) -> None:
    checkpoint = store.open_checkpoint(folder)
    for name in names:
        checkpoint.read(name)


def measure(meter: Meter, run: Path, arrays: dict[str, np.ndarray]) -> None:
    """One round, in a folder that is left as it was."""
    plain = run / "plain"
    meter("disk", lambda: write_plainly(plain, arrays))
    plain.unlink()
    writing = meter("begin", lambda: store.begin(run, 1, arrays, {"format": FORMAT, "step": 1}))
    entry = meter("seal", lambda: store.seal(writing))
    assert meter("check", lambda: store.check(entry.folder)) is None
    meter("read", lambda: read_all(entry.folder, list(arrays)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", dest="model", default="d12", metavar="MODEL", help="a descriptor (default: d12)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="on the disk that is to be measured")
    options = parser.parse_args()
    try:
        config = parse_descriptor(options.model)
    except InputError as error:
        parser.error(str(error))
    arrays = random_state(config)
    nbytes = sum(array.nbytes for array in arrays.values())
    meter = Meter()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        first = {"x": np.ones(1, np.float32)}
        store.seal(store.begin(Path(folder), 0, first, {"format": FORMAT, "step": 0}))
        for _ in range(options.rounds):
            measure(meter, Path(folder), arrays)
        stored = store.entry(Path(folder), 1).bytes
    print(
        f"{machine_line()}, "
        f"{options.model}, fp32: N={num_parameters(config):,}, "
        f"{nbytes / 1e6:,.1f} MB of arrays, {stored / 1e6:,.1f} MB in the folder.\n"
    )
    print("| part | seconds, median | least | most | MB/s | memory, MB |\n|---|---|---|---|---|---|")
    for words, name in PARTS.items():
        seconds, memory = meter.seconds[name], meter.memory[name]
        median = statistics.median(seconds)
        print(
            f"| {words} | {median:.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {nbytes / 1e6 / median:,.0f} "
            f"| {max(memory):,.0f} |"
        )


if __name__ == "__main__":
    main()
