"""Variants of GPT-2 beside GPT-2: each trained alike on the built-in corpus, from several seeds.

    python benchmarks/models.py [--out runs/models] [--seeds 1,2,3] [--steps 300] [--picture docs/models.png]

Prints the table of docs/models.md and draws its picture: the mean of the validation losses over the seeds, and between
which the seeds lie. A run that is there already, complete, is not made again.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.heading import machine_line  # noqa: E402
from llmc_jax.base.pictures import PALETTE, save_figure  # noqa: E402

VARIANTS = ("GPT-2", "post_ln", "rms_norm", "relu", "no_residual")  # files of examples/models
FLAGS = "-e L4-NH4-C128-V257-T128 -i stdlib -j stdlib -b 8 -t 128 -d 2048 -l 4e-3 -u 40 -q 0.1 -m 40 -s 0 --no-save"


def losses(variant: str, seed: int, steps: int, out: Path) -> dict[int, float]:
    """Return the validation losses of a run by step."""
    folder = out / f"{variant}_{seed}"
    if steps not in logged(folder):
        model = [] if variant == "GPT-2" else ["--model", str(ROOT / f"examples/models/{variant}.py")]
        how = ["-x", str(steps), "-v", str(max(1, steps // 10)), "--seed", str(seed), "-o", str(folder)]
        subprocess.run([sys.executable, str(ROOT / "train.py"), *FLAGS.split(), *model, *how], check=True, cwd=ROOT)
    return logged(folder)


def logged(folder: Path) -> dict[int, float]:
    """Return the validation losses that a run folder's log has."""
    log = folder / "metrics.jsonl"
    events = map(json.loads, log.read_text().splitlines()) if log.exists() else []
    return {each["step"]: float(each["loss"]) for each in events if each["event"] == "val"}


def draw(found: dict[str, list[dict[int, float]]], path: Path) -> None:
    """Draw the validation losses of each variant."""
    matplotlib.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for (variant, runs), color in zip(found.items(), PALETTE, strict=False):
        steps = sorted(runs[0])
        columns = [[run[step] for run in runs] for step in steps]
        axes.plot(steps, list(map(statistics.mean, columns)), color=color, label=variant, marker=".")
        axes.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.2, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.set_ylim(top=4)
    axes.legend(frameon=False)
    save_figure(figure, path)


def main() -> None:
    """Run what is missing, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/models")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/models.png")
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    found = {each: [losses(each, seed, asked.steps, asked.out) for seed in seeds] for each in VARIANTS}
    print(f"{machine_line()}\n")
    print(f"| model | validation loss after {asked.steps} steps | seeds |\n|---|---|---|")
    for variant, runs in found.items():
        last = [run[max(run)] for run in runs]
        spread = statistics.stdev(last) / len(last) ** 0.5 if len(last) > 1 else 0.0
        each = ", ".join(f"{loss:.3f}" for loss in last)
        print(f"| {variant} | {statistics.mean(last):.3f} ± {spread:.3f} | {each} |")
    draw(found, asked.picture)


if __name__ == "__main__":
    main()
