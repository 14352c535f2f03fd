"""Seconds from the command to the first training step of the demo; and what making the step's program for a GPU takes.

    python benchmarks/startup.py [--rounds 5]
    python benchmarks/startup.py --gpu h200 "-e d12 -b 64 -r 0" "-e d48 -b 16 -r 0"

Cold: an empty cache folder, so the corpus is made and every program compiled. Warm: the same folder again. Timed from
the start of the process to the line of step 1, which is printed when the step is done.

With --gpu, for a GPU that is not there (a Python with JAX's CUDA plugin, as `make test-aot` makes one): the step is
lowered as usual, lowered and kept, and read, as a run alike does; and compiled, which a run alike does not repeat. On
the GPU itself XLA also times the algorithms of products, which is not in here. Usual and kept have a process each,
because JAX lowers a kernel once in each.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.programs import seconds_to_first_step
from benchmarks.heading import machine_line

DEMO = ("--preset", "demo", "-x", "2")
STAGES = ("lowered", "lowered and kept", "read", "compiled")


def print_starts(rounds: int) -> None:
    """Print the demo's."""
    cold, warm = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(seconds_to_first_step(DEMO, Path(folder), "cold"))
            warm.append(seconds_to_first_step(DEMO, Path(folder), "warm"))
    print("| demo, command to first step | seconds, median | least | most |\n|---|---|---|---|")
    for name, times in (("cold", cold), ("warm compile cache", warm)):
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f} |")


def seconds_of(gpu: str, words: str, keep: bool) -> list[float]:
    """Return the seconds of lowering a step; with keep of lowering and keeping it, of reading and of compiling it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from llmc_jax.machine import compiling, deviceless
    from llmc_jax.plan.compiled import arguments, plan_for
    from llmc_jax.run.programs import LoweredStep, lower_step

    plan, seconds = plan_for(gpu, f"{words} --dtype bf16"), []
    lies = NamedSharding(deviceless.gpu_mesh(gpu), PartitionSpec())
    arrays = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies), arguments(plan))

    def timed(action: Callable[..., Any], *given: Any) -> Any:
        start = time.perf_counter()
        result = action(*given)
        seconds.append(time.perf_counter() - start)
        return result

    def lower(path: Path | None) -> LoweredStep:
        return lower_step(arrays, plan.model, plan.step_options, path, ("cuda",))

    with jax.sharding.use_abstract_mesh(deviceless.abstract_gpu(gpu)), tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + keep):
            found = timed(lower, Path(folder, "step") if keep else None)
        if keep:
            timed(compiling.compiled, found.lowered, plan.execution.compiler_options)
    return seconds


def print_programs(gpu: str, steps: Sequence[str]) -> None:
    """Print what the programs of some steps take."""
    print(f"For {gpu}, seconds:\n\n| step | {' | '.join(STAGES)} |\n|---|" + "---:|" * len(STAGES))
    for words in steps:
        found: list[float] = []
        for more in ([], ["--keep"]):
            command = [sys.executable, __file__, "--gpu", gpu, "--one", *more, words]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found += map(float, done.stdout.split())
        print(f"| `{words}` | {' | '.join(f'{each:.2f}' for each in found)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="FLAGS", default=["-e d12 -b 64 -r 0", "-e d48 -b 16 -r 0"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", metavar="NAME", help="what the program of a step takes, for this one")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(*seconds_of(args.gpu, args.steps[0], args.keep))
        return
    print(f"{machine_line()}\n")
    print_programs(args.gpu, args.steps) if args.gpu else print_starts(args.rounds)


if __name__ == "__main__":
    main()
