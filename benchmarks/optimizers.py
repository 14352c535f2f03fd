"""Optimizers beside one another: each at a learning rate tuned for it, for equal steps and for equal time.

    python benchmarks/optimizers.py [--out DIR] [--seeds 1,2,3,4,5] [--steps 200] [--picture FILE] [--page FILE]

Each takes the best rate of a small grid, found with a seed of its own; the grid grows where the best lies at its edge,
twice at most. Then one run for each seed. The time of a step is measured in turns. Where it differs from AdamW's by
more than 3 %, there are runs of so many steps that the time is AdamW's. Runs and times that are there are not made
again. The picture leaves out muon-polar, whose curve lies close to Muon's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import llmc_jax  # noqa: E402
from benchmarks.heading import machine_line  # noqa: E402
from benchmarks.models import draw, logged  # noqa: E402
from benchmarks.turns import blocks_in_turns  # noqa: E402
from llmc_jax.training.rules import named  # noqa: E402

Runs = dict[str, list[dict[int, float]]]  # of each optimizer, and each seed: the validation losses by step
GRIDS = {
    "adamw": (2e-3, 4e-3, 8e-3, 1.6e-2),
    "muon": (2e-3, 4e-3, 8e-3, 1.6e-2),
    "muon-polar": (2e-3, 4e-3, 8e-3, 1.6e-2),
    "rmsprop": (1e-3, 2e-3, 4e-3, 8e-3),
    "adagrad": (5e-3, 1e-2, 2e-2, 4e-2),
    "nesterov": (0.003, 0.01, 0.03, 0.1, 0.3),
    "momentum": (0.003, 0.01, 0.03, 0.1, 0.3),
    "sgd": (0.1, 0.3, 1.0, 3.0),
}
TUNING_SEED, CLOSE, MODEL = 42, 0.03, "L4-NH4-C128-V257-T128"
FLAGS = f"-e {MODEL} -i stdlib -j stdlib -b 8 -t 128 -d 2048 -u 30 -q 0.1 -c 0 -m 40 -s 0 --no-save --grad-clip 1"
HEAD = "optimizer | learning rate (grid) | loss at equal steps | at equal time | step (× AdamW) | state (× parameters)"
NOTES = f"""Losses are of validation, ± the standard error of the mean over the seeds. At equal time the schedule spans
the fewer steps. A step's time is the median, with the quartiles, of steps of 2,048 tokens: the more tokens, the less an
optimizer counts. The state is of float32 arrays as large as the parameters; of Muon's second only what is no matrix of
a layer is used. Weight decay is 0, so Adam is AdamW to the bit and has no row; the gradient is clipped to norm 1;
momentum 0.95, beta1 0.9, beta2 0.95 and eps 1e-8 are defaults, not tuned. One seed and a coarse grid chose each rate.
What holds for a model of under a million parameters after 200 steps may not hold for one of 124 million, nor for
another batch, schedule or corpus. Below: each rate's loss with seed {TUNING_SEED}, each seed's, and how far above
AdamW's.

| optimizer | rates | seeds | above AdamW's |
|---|---|---|---|"""


def losses(name: str, rate: float, seed: int, steps: int, every: int, out: Path) -> dict[int, float]:
    """Return the validation losses of a run by step; of one that diverged the last is infinite."""
    folder = out / f"{name}_{rate:g}_{seed}_{steps}"
    if steps not in logged(folder):
        how = f"--optimizer {name} -l {rate:g} --seed {seed} -x {steps} -v {every} --report-every 0 -o {folder}"
        command = [sys.executable, str(ROOT / "train.py"), *FLAGS.split(), *how.split()]
        if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode not in (0, 3):  # 3: not finite
            raise SystemExit(f"train.py failed: {how}")
    return {steps: float("inf")} | logged(folder)


def tuned(name: str, steps: int, out: Path) -> dict[float, float]:
    """Return the last loss at each rate of an optimizer's grid, and of what the grid has grown by."""
    rates = list(GRIDS[name])
    for _ in range(3):
        found = {rate: losses(name, rate, TUNING_SEED, steps, steps, out)[steps] for rate in rates}
        best = min(found, key=found.get)
        if best not in (rates[0], rates[-1]):
            break
        inner = rates[1] if best == rates[0] else rates[-2]
        rates = sorted([*rates, float(f"{best * best / inner:.2g}")])
    return found


def step_times(name: str) -> Iterator[float]:
    """Yield the seconds of one step with an optimizer after another. The first compiles."""
    state, step = llmc_jax.begin(llmc_jax.load(MODEL), optimizer=name)
    ids = np.random.default_rng(0).integers(0, 257, (2, 8, 129))
    while True:
        start = time.perf_counter()
        state, _ = step(state, ids)
        state.params.block_until_ready()
        yield time.perf_counter() - start


def step_ratios(out: Path, rounds: int = 80) -> dict[str, list[float]]:
    """Return how many times as long as AdamW's a step takes: the quartiles of some rounds."""
    kept = out / "step_ratios.json"
    if not kept.exists():
        times = blocks_in_turns({name: step_times(name).__next__ for name in GRIDS}, rounds)
        found = {name: [a / b for a, b in zip(each, times["adamw"], strict=True)] for name, each in times.items()}
        kept.write_text(json.dumps({name: statistics.quantiles(each) for name, each in found.items()}))
    return json.loads(kept.read_text())


def mean(values: list[float], sign: str = "") -> str:
    """Return the mean of some values and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{sign}.3f} ± {error:.3f}"


def page(tried: dict[str, dict[float, float]], equal: Runs, timed: Runs, ratio: dict[str, list[float]]) -> str:
    """Return the tables. equal, timed: the runs of AdamW's steps, and of AdamW's time."""
    rows, details = [f"| {HEAD} |", "|---|---|---|---|---|---|"], ["", NOTES]
    last = {name: [run[max(run)] for run in runs] for name, runs in equal.items()}
    for name, grid in tried.items():
        rate = f"{min(grid, key=grid.get):g} ({', '.join(f'{each:g}' for each in grid)})"
        within = f"{mean([run[max(run)] for run in timed[name]])} ({max(timed[name][0])} steps)"
        cost = "{1:.2f} ({0:.2f} – {2:.2f})".format(*ratio[name]) + f" | {len(named(name).buffers)}"
        rows.append(f"| {name} | {rate} | {mean(last[name])} | {within} | {cost} |")
        rates = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in grid.items())
        above = mean([ours - one for ours, one in zip(last[name], last["adamw"], strict=True)], "+")
        details.append(f"| {name} | {rates} | {', '.join(f'{loss:.3f}' for loss in last[name])} | {above} |")
    return "\n".join(rows + details)


def main() -> None:
    """Run what is missing, print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/optimizers")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/optimizers.png")
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks/results/optimizers.md")
    asked = parser.parse_args()
    steps, tried = asked.steps, {name: tuned(name, asked.steps, asked.out) for name in GRIDS}

    def trained(name: str, steps: int, every: int) -> list[dict[int, float]]:
        rate, seeds = min(tried[name], key=tried[name].get), map(int, asked.seeds.split(","))
        return [losses(name, rate, seed, steps, every, asked.out) for seed in seeds]

    equal = {name: trained(name, steps, max(1, steps // 10)) for name in GRIDS}
    ratio = step_ratios(asked.out)
    other = [name for name in GRIDS if abs(ratio[name][1] - 1) > CLOSE]
    timed = equal | {name: trained(name, round(steps / ratio[name][1]), steps) for name in other}
    title = f"# Optimizers beside one another\n\n`python benchmarks/optimizers.py`. {machine_line()}."
    found = f"{title}\n\n`train.py {FLAGS} -x {steps}`, seeds {asked.seeds}.\n\n{page(tried, equal, timed, ratio)}\n"
    print(found)
    asked.page.write_text(found)
    draw({name: runs for name, runs in equal.items() if name != "muon-polar"}, asked.picture)


if __name__ == "__main__":
    main()
