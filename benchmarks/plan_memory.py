"""A step's memory as the plan computes it beside the compiled program's.

    python benchmarks/plan_memory.py              compile all steps, into results/plan_memory.md and .json
    python benchmarks/plan_memory.py --held-out   only those that the formula was not made on

Needs JAX's CUDA plugin beside this Python (`make plan-tools`); takes a quarter of an hour on two cores the first time,
seconds the next, because what was compiled is kept. Nothing runs on a GPU.

- program: bytes of arguments, results and temporaries on one device, as XLA says (`memory_analysis`).
- computed: by llmc_jax/plan/moments.py, from shapes alone; error: less the program, of the program. At: its moment.
- held out: compiled after the formula was written. It was touched since for --recompute-blocks, where the step has
  another order now, and made shorter, where that left the median and the largest error here as they were.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.heading import machine_line  # noqa: E402
from llmc_jax.base import plain  # noqa: E402
from llmc_jax.config.flags import parse_args  # noqa: E402
from llmc_jax.plan import compiled, memory  # noqa: E402
from llmc_jax.plan.asked import checked_model  # noqa: E402
from llmc_jax.plan.memory import CPU, KINDS, Memory  # noqa: E402
from llmc_jax.plan.separate import compiled_apart  # noqa: E402

AT_ONCE = 2  # processes
PAGE, RECORD = (ROOT / f"benchmarks/results/plan_memory.{kind}" for kind in ("md", "json"))

# What the formula was made on, and what it was not: GPU and flags of train.py.
SEEN = {
    "h100": (
        "-e d12 -b 64", "-e d12 -b 64 -r 0", "-e d12 -b 64 -r 2", "-e d12 -b 8 -d 65536", "-e d12 -b 2",
        "-e d12 -b 16 --recompute-blocks 1", "-e d12 -b 16 --recompute-blocks 4", "-e d12 -b 64 --logit-rows 8192",
        "-e d12 -b 64 --devices 8 -z 1", "-e d12 -b 64 --devices 8 -z 2 -d 2097152", "-e d24 -b 4 -r 2 -d 32768",
        "-e d12 -b 8 -w 0", "-e d12 -b 8 --dtype fp32", "-e d12 -b 4 -d 32768 --reduction fixed",
    ),
    "a100": ("-e d12 -b 64", "-e d12 -b 64 -r 2", "-e d12 -b 8", "-e d12 -b 64 --devices 8 -z 1"),
    "rtx4090": ("-e d12 -b 16", "-e d12 -b 8 --recompute-blocks 2"),
    "rtx3090": ("-e d12 -b 16",),
    "rtx5090": ("-e d12 -b 16",),
    "b200": ("-e d12 -b 64 -r 0",),
    CPU: ("-e d12 -b 4 -t 1024", "-e d12 -b 4 -t 64", "-e d12 -b 4 -t 256 -d 4096"),
}  # fmt: skip
HELD_OUT = {
    "h100": (
        "-e d12 -b 32 -t 1024", "-e d12 -b 48 -r 0 -d 393216", "-e d24 -b 32 -r 1", "-e d24 -b 8 --recompute-blocks 3",
        "-e d36 -b 8 -r 2", "-e d48 -b 2 --recompute-blocks 1", "-e d12 -b 16 -t 512 -w 0 -r 0",
        "-e d24 -b 16 --devices 8 -z 0", "-e d36 -b 4 --devices 8 -z 2 -d 131072", "-e d12 -b 8 --dtype fp16 -r 2",
        "-e d24 -b 8 --logit-rows 2048", "-e d12 -b 16 -d 65536 --devices 2 -z 1",
    ),
    "a100": (
        "-e d12 -b 32 -r 1", "-e d24 -b 16 -r 0", "-e d24 -b 8 -d 65536", "-e d36 -b 4 --recompute-blocks 6",
        "-e d12 -b 32 --devices 8 -z 2 -d 1048576", "-e d24 -b 8 -w 0 -r 2",
    ),
    "rtx4090": ("-e d12 -b 32 -r 2", "-e d24 -b 4", "-e d12 -b 12 -r 0 -d 98304"),
    "rtx3090": ("-e d12 -b 8 -r 0", "-e d24 -b 2 --recompute-blocks 1"),
    "b200": ("-e d24 -b 32", "-e d12 -b 128 -r 2"),
    "rtx5090": ("-e d12 -b 32 -r 1 -d 262144", "-e d24 -b 8 -r 2"),
    CPU: (
        "-e d6 -b 8 -t 256", "-e d12 -b 2 -t 512 -r 2", "-e d12 -b 8 -t 128 -r 0 -d 4096",
        "-e d6 -b 4 -t 1024 --dtype bf16 -r 0", "-e d24 -b 1 -t 256",
    ),
}  # fmt: skip


class Row(NamedTuple):
    """A step of the table."""

    gpu: str
    flags: str
    held_out: bool
    program: int  # bytes, as XLA says
    computed: dict[str, int]
    moment: str

    @property
    def error(self) -> float:
        return sum(self.computed.values()) / self.program - 1


# ----- compiling ------------------------------------------------------------------------------------------------------


def rows(cases: dict[str, tuple[str, ...]], held_out: bool) -> list[Row]:
    """Compile steps, each in a process of its own. Raises InputError where one cannot be."""
    named = [(gpu, flags) for gpu, found in cases.items() for flags in found]
    configs = [parse_args(flags.split()) for _, flags in named]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(compiled_apart, (gpu for gpu, _ in named), configs, map(checked_model, configs)))
    return [row(*case, held_out, answer) for case, answer in zip(named, answers, strict=True)]


def row(gpu: str, flags: str, held_out: bool, found: Memory) -> Row:
    quick = memory.computed(compiled.plan_for(gpu, flags))
    return Row(gpu, flags, held_out, found.program, dict(quick.kinds), quick.moment)


# ----- as text --------------------------------------------------------------------------------------------------------


def gb(size: int) -> str:
    return f"{size / 1e9:.3f}"


def table(found: Sequence[Row]) -> str:
    head = "| GPU | step | program GB | computed GB | error | at |\n|---|---|---:|---:|---:|---|"
    lines = [
        f"| {each.gpu} | `{each.flags}` | {gb(each.program)} | "
        f"{gb(sum(each.computed.values()))} | {100 * each.error:+.2f} % | {each.moment} |"
        for each in found
    ]
    return "\n".join([head, *lines])


def kinds_table(found: Sequence[Row]) -> str:
    """Return the largest program of each GPU by kind, as computed."""
    largest = [
        max((r for r in found if r.gpu == gpu), key=lambda r: r.program) for gpu in dict.fromkeys(r.gpu for r in found)
    ]
    head = f"| GPU, step | {' | '.join(KINDS)} |\n|---|{'---:|' * len(KINDS)}"
    lines = [
        f"| {each.gpu} `{each.flags}` | {' | '.join(gb(each.computed[kind]) for kind in KINDS)} |" for each in largest
    ]
    return "\n".join([head, *lines])


def summary(name: str, found: Sequence[Row]) -> str:
    errors = sorted(abs(each.error) for each in found)
    return (
        f"| {name} | {len(found)} | "
        f"{100 * errors[len(errors) // 2]:.2f} % | {100 * errors[-1]:.2f} % | "
        f"{sum(error <= 0.03 for error in errors)} | {sum(error <= 0.1 for error in errors)} |"
    )


def page(found: Sequence[Row]) -> str:
    """Return benchmarks/results/plan_memory.md."""
    seen, held = ([each for each in found if each.held_out == which] for which in (False, True))
    method = (__doc__ or "").partition("on a GPU.\n\n")[2].strip()
    head = "| | steps | error: median | largest | within 3 % | within 10 % |\n|---|---:|---:|---:|---:|---:|"
    summaries = [summary("held out", held), summary("seen", seen)]
    return (
        f"# Memory of a step: plan and compiler\n\n`python benchmarks/plan_memory.py`; {machine_line()}.\nPrograms are "
        f"compiled for GPUs that are not there, and for the processor (cpu). GB are 10^9 bytes on one device.\n\n"
        f"{method}\n\n{head}\n"
        + "\n".join(summaries)
        + f"\n\n## Held out\n\n{table(held)}\n\n## Seen\n\n{table(seen)}\n\n"
        f"## By kind\n\nThe largest step of each GPU, computed, in GB.\n\n{kinds_table(found)}\n"
    )


# ----- the command ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true", help="print those alone, and write nothing")
    options = parser.parse_args()
    held = rows(HELD_OUT, True)
    if options.held_out:
        print(table(held))
        return
    found = [*held, *rows(SEEN, False)]
    PAGE.write_text(page(found))
    RECORD.write_text("[\n" + ",\n".join(json.dumps(plain.to_json(each)) for each in found) + "\n]\n")
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
