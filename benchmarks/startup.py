"""Seconds from the command to the first training step of the demo, cold and warm.

    python benchmarks/startup.py [--rounds 5]

Cold: an empty cache folder, so the corpus is made and every program compiled. Warm: the same folder again. Timed from
the start of the process to the line of step 1, which is printed when the step is done.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.programs import seconds_to_first_step
from benchmarks.heading import machine_line

DEMO = ("--preset", "demo", "-x", "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(seconds_to_first_step(DEMO, Path(folder), "cold"))
            warm.append(seconds_to_first_step(DEMO, Path(folder), "warm"))
    print(f"{machine_line()}\n")
    print("| demo, command to first step | seconds, median | least | most |\n|---|---|---|---|")
    for name, times in (("cold", cold), ("warm compile cache", warm)):
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f} |")


if __name__ == "__main__":
    main()
