"""What saving adds to a run: the time per save, and the memory, of training with -n beside training without.

    python benchmarks/save_beside.py [-e d12] [-b 4] [-t 64] [--every 4] [--saves 3] [-- more flags of train.py]

Runs train.py twice per round, one process after the other: without checkpoints, and with one every so many steps.
What a save adds is the time that training stands still for it (from the run's own `checkpoint` events) and by how much
the steps beside it are slower. It is set against a step of 524,288 tokens, llm.c's batch. The data are random tokens.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.heading import machine_line  # noqa: E402
from llmc_jax.config.model import parse_descriptor  # noqa: E402
from llmc_jax.data.tokenfile import write_token_file  # noqa: E402
from tests.metrics import read_metrics  # noqa: E402

BATCH = 524_288  # tokens


class Run(NamedTuple):
    """One process."""

    step: float  # median seconds of a step, the first left out
    total: float  # seconds in all steps but the first, and standing still for saves
    waited: list[float]  # seconds that each save held the training up
    seconds: list[float]  # that each save took in all
    peak: float  # MB, the process at its largest


def train(flags: list[str], folder: Path) -> Run:
    """Runs train.py, and reads what it logged and how large it became."""
    child = (
        "import resource, subprocess, sys; code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    command = [sys.executable, "-c", child, sys.executable, str(ROOT / "train.py"), *flags, "-o", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    unit = 1e6 if sys.platform == "darwin" else 1e3
    events = read_metrics(folder / "metrics.jsonl")
    steps = [event["ms"] / 1e3 for event in events if event["event"] == "train"][1:]
    saves = [event for event in events if event["event"] == "checkpoint"]
    waited = [event["waited_ms"] / 1e3 for event in saves]
    total = sum(steps) + sum(waited)
    seconds = [event["ms"] / 1e3 for event in saves]
    return Run(statistics.median(steps), total, waited, seconds, int(done.stdout.split()[-1]) / unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", dest="model", default="d12", metavar="MODEL", help="a descriptor (default: d12)")
    parser.add_argument("-b", type=int, default=4, help="sequences of a step")
    parser.add_argument("-t", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--every", type=int, default=4, help="steps between saves")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dir", type=Path, metavar="FOLDER", help="on the disk that is to be measured")
    parser.add_argument("more", nargs="*", help="more flags of train.py, after --")
    options = parser.parse_args()
    tokens, steps = options.b * options.t, options.every * options.saves + options.every
    runs: dict[str, list[Run]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        data = Path(name, "tokens.bin")
        ids = np.random.default_rng(0).integers(0, parse_descriptor(options.model).vocab_size, 4 * tokens + 1)
        write_token_file(data, ids.astype(np.uint16))
        flags = ["-e", options.model, "-b", str(options.b), "-t", str(options.t), "-i", str(data), "-j", str(data)]
        flags += ["-v", "0", "-s", "0", "-x", str(steps), "--no-save", *options.more]
        for number in range(options.rounds):
            for kind, own in (("without", []), ("with", ["-n", str(options.every), "-nk", "1"])):
                runs[kind].append(train(flags + own, Path(name, f"{kind}{number}")))
    print(
        f"{machine_line()}, "
        f"orbax-checkpoint {version('orbax-checkpoint')}. {options.model}, B={options.b}, T={options.t}, {steps} "
        f"steps, {options.rounds} rounds: medians over them.\n"
    )
    print("| | without | with | with / without |\n|---|---|---|---|")
    middle = statistics.median
    for words, pick in (("a step, s", lambda run: run.step), ("peak memory, MB", lambda run: run.peak)):
        ratio = middle(pick(b) / pick(a) for a, b in zip(runs["without"], runs["with"], strict=True))
        without, among = (middle(map(pick, runs[kind])) for kind in ("without", "with"))
        print(f"| {words} | {without:,.2f} | {among:,.2f} | {ratio:.3f} |")
    saves = len(runs["with"][0].waited)
    added = middle((b.total - a.total) / saves for a, b in zip(runs["without"], runs["with"], strict=True))
    large = middle(run.step for run in runs["without"]) * BATCH / tokens
    waited = middle(seconds for run in runs["with"] for seconds in run.waited)
    whole = middle(seconds for run in runs["with"] for seconds in run.seconds)
    print(
        f"\nOne save: the training stands still for {waited:.2f} s; the save takes {whole:.2f} s in all; it adds "
        f"{added:.2f} s to the run, {100 * added / large:.2f} % of a step of {BATCH:,} tokens ({large:,.1f} s)."
    )


if __name__ == "__main__":
    main()
