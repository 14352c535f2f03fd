"""Seconds from the command to the first training step of the demo, cold and warm.

    python benchmarks/startup.py [--rounds 5]

Cold: an empty cache folder, so the corpus is made and every program compiled. Warm: the same folder again. Timed from
the start of the process to the line of step 1, which is printed when the step is done.
"""

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmc_jax.machine import device as hardware  # noqa: E402
from llmc_jax.machine.versions import versions  # noqa: E402


def seconds_to_first_step(cache: Path, output: Path) -> float:
    """Starts the demo, waits for its first step, stops it."""
    command = [sys.executable, "-u", str(ROOT / "train.py"), "--preset", "demo", "--no-save", "-o", str(output)]
    start = time.perf_counter()
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "LLMC_JAX_CACHE": str(cache)}, cwd=output.parent
    )
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step    1/"):
            seconds = time.perf_counter() - start
            run.send_signal(signal.SIGTERM)
            run.stdout.read()
            run.wait()
            return seconds
    raise SystemExit(f"the demo ended with status {run.wait()} before its first step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) / "cache"
            cold.append(seconds_to_first_step(cache, Path(folder) / "cold"))
            warm.append(seconds_to_first_step(cache, Path(folder) / "warm"))
    print(
        f"{hardware.cpu_name()}, {os.cpu_count()} cores; Python {platform.python_version()}, jax {versions()['jax']}\n"
    )
    print("| demo, command to first step | seconds, median | least | most |\n|---|---|---|---|")
    for name, times in (("cold", cold), ("warm compile cache", warm)):
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f} |")


if __name__ == "__main__":
    main()
