"""The head without a classifier beside the one with bf16 logits: means of training losses, on a CPU, in bf16.

    python benchmarks/head.py --tokens DIR [--out DIR] [--seeds 1,2,3,4,5]

A GPU's head is a kernel; its plain twin (llmc_jax/ops/head.py) computes the same on a CPU. The demo's model for 300
steps and GPT-2 124M for 200 steps of 256 tokens (an hour and a half for five seeds), each pair from the same start on
the same data. DIR holds tiny_shakespeare_train.bin and …_val.bin (`llmc-jax data tinyshakespeare`). Runs that are there
are not made again.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.heading import machine_line  # noqa: E402

MODEL = """from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.ops import head
OWN = PROGRAM._replace(operations=lambda op: op._replace(head_weights=head.head_weights))
FAMILY = GPT2._replace(name="new-head", program=lambda: OWN)
"""
COMMON = "--dtype bf16 -v 100 -s 0 --no-save --report-every 0"
CASES = {
    "demo": f"--preset demo -x 300 {COMMON}",
    "d12": "-e d12 -i {0}/tiny_shakespeare_train.bin -j {0}/tiny_shakespeare_val.bin -b 4 -t 64 -d 256 -x 200 -m 5 "
           f"-l 3e-4 -u 20 {COMMON}",
}  # fmt: skip
LAST = 50  # steps whose mean loss is shown


def losses(case: str, head: str, seed: int, tokens: str, out: Path) -> list[float]:
    """Return the training losses of a run."""
    folder = out / f"{case}_{head}_{seed}"
    if not (folder / "main.log").exists():
        own = out / "new_head.py"
        out.mkdir(parents=True, exist_ok=True)
        own.write_text(MODEL)
        words = [*CASES[case].format(tokens).split(), "--seed", str(seed), "-o", str(folder)]
        more = ["--model", str(own)] if head == "new" else []
        command = [sys.executable, str(ROOT / "train.py"), *words, *more]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    lines = (folder / "main.log").read_text().splitlines()
    return [float(line.split("trl:")[1].split()[0]) for line in lines if "trl:" in line]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="data")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/head")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--cases", default=",".join(CASES))
    asked = parser.parse_args()
    rows = [
        f"| model, seed | bf16 logits: last {LAST} | without a classifier | difference of all steps | of the first 20 |"
    ]
    rows += ["|---|---:|---:|---:|---:|"]
    for case in asked.cases.split(","):
        for seed in map(int, asked.seeds.split(",")):
            old, new = (losses(case, head, seed, asked.tokens, asked.out) for head in ("old", "new"))
            apart = [b - a for a, b in zip(old, new, strict=True)]
            last = " | ".join(f"{statistics.mean(each[-LAST:]):.4f}" for each in (old, new))
            first = statistics.mean(map(abs, apart[:20]))
            rows.append(f"| {case}, {seed} | {last} | {statistics.mean(apart):+.4f} | {first:.5f} |")
    print(f"{machine_line()}.\n", *rows, sep="\n")


if __name__ == "__main__":
    main()
