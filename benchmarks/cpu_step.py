"""GPT-2 124M on the CPU: a training step beside its matrix products alone, and beside PyTorch.

    python benchmarks/cpu_step.py [--torch-python PATH] [--model d12] [--shapes 4x64,4x256] [--rounds 5]

Steps and products alternate in one process, in blocks, so that both see the same machine; the figure is the median of
the ratios of their blocks. The first of a block, which finds caches and memory as the other left them, is not counted:
a training run never meets that. The products are those of the step, each with its own operands: per layer four forward,
twice as many backward, the head's three, attention's six, 6 x parameters x tokens operations in all and a little more.
What the ratio leaves is everything that is not a product: layernorm, softmax, GELU, classifier, AdamW, and moving data.
PyTorch runs in its own interpreter (benchmarks/torch_peer.py), before ours.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmc_jax import platform as llmc_platform  # noqa: E402

if __name__ == "__main__":
    llmc_platform.restart_with_huge_pages()
llmc_platform.configure()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from llmc_jax import hardware  # noqa: E402
from llmc_jax.config import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.gpt2 import Execution  # noqa: E402
from llmc_jax.optimizer import AdamWNumbers  # noqa: E402
from llmc_jax.params import flat_size, num_parameters  # noqa: E402
from llmc_jax.schedule import ScheduleNumbers  # noqa: E402
from llmc_jax.step import StepNumbers, StepOptions, initial_state, train_step  # noqa: E402


def products(config: ModelConfig, B: int, T: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
    """(einsum, shape of a, shape of b, how often) of every matrix product in a step."""
    C, L, NH, HS, n = config.channels, config.num_layers, config.num_heads, config.head_size, B * T
    found = []
    linears = [(3 * C, C, L), (C, C, L), (4 * C, C, L), (C, 4 * C, L), (config.padded_vocab_size, C, 1)]
    for outputs, inputs, count in linears:
        found.append(("ni,oi->no", (n, inputs), (outputs, inputs), count))  # forward
        found.append(("no,oi->ni", (n, outputs), (outputs, inputs), count))  # dx
        found.append(("no,ni->oi", (n, outputs), (n, inputs), count))  # dw
    head, square = (B, NH, T, HS), (B, NH, T, T)
    found.append(("bnth,bnuh->bntu", head, head, 2 * L))  # scores, datt
    found.append(("bntu,bnuh->bnth", square, head, 2 * L))  # out, dq
    found.append(("bntu,bnth->bnuh", square, head, 2 * L))  # dv, dk
    return found


def product_runner(config: ModelConfig, B: int, T: int):
    """A function that runs all products once and returns the seconds."""
    rng = np.random.default_rng(0)
    jobs = []
    for einsum, shape_a, shape_b, count in products(config, B, T):
        run = jax.jit(lambda a, b, einsum=einsum: jnp.einsum(einsum, a, b))
        # Its own weights for each layer, as in the step: twelve layers do not fit in any cache.
        pairs = [
            (
                jnp.asarray(rng.standard_normal(shape_a, np.float32)),
                jnp.asarray(rng.standard_normal(shape_b, np.float32)),
            )
            for _ in range(min(count, config.num_layers))
        ]
        jobs.append((run, pairs, count))

    def once() -> float:
        start = time.perf_counter()
        for run, pairs, count in jobs:
            for i in range(count):
                out = run(*pairs[i % len(pairs)])
            out.block_until_ready()
        return time.perf_counter() - start

    return once


def step_runner(config: ModelConfig, B: int, T: int, recompute: int):
    """A function that takes one training step and returns the seconds."""
    rng = np.random.default_rng(0)
    flat = np.zeros(flat_size(config), np.float32)
    flat[: num_parameters(config)] = rng.standard_normal(num_parameters(config), np.float32) * 0.02
    state = initial_state(jnp.asarray(flat))
    del flat
    inputs = rng.integers(0, config.vocab_size, (1, B, T)).astype(np.int32)
    targets = rng.integers(0, config.vocab_size, (1, B, T)).astype(np.int32)
    numbers = StepNumbers(ScheduleNumbers(3e-4, 0, 1000, 1.0, 0, 1.0), AdamWNumbers(0.9, 0.95, 1e-8, 0.1), 1.0)
    options = StepOptions("cosine", "matrices", Execution(recompute=recompute))

    def once() -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = train_step(state, inputs, targets, numbers, config, options)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    return once


def block(run: Callable[[], float]) -> float:
    """Median seconds of a few runs after one that is not counted."""
    run()
    return statistics.median(run() for _ in range(2))


def measure(config: ModelConfig, B: int, T: int, rounds: int, recompute: int) -> dict[str, float]:
    step = step_runner(config, B, T, recompute)
    first = step()
    step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**20
    multiply = product_runner(config, B, T)
    multiply()
    steps, alone = [], []
    for _ in range(rounds):
        steps.append(block(step))
        alone.append(block(multiply))
    ratios = [p / s for p, s in zip(alone, steps, strict=True)]
    return {
        "step_ms": 1e3 * statistics.median(steps),
        "products_ms": 1e3 * statistics.median(alone),
        "ratio": statistics.median(ratios),
        "peak_mib": peak,
        "first_step_s": first,
    }


def run_torch(python: str, B: int, T: int, rounds: int, compiled: bool) -> dict[str, float]:
    command = [python, str(ROOT / "benchmarks/torch_peer.py"), "-b", str(B), "-t", str(T), "--steps", str(rounds)]
    done = subprocess.run(command + ["--compile"] * compiled, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"PyTorch peer failed: {' '.join(command)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="d12")
    parser.add_argument("--shapes", default="4x64,4x256", help="BxT, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recompute", type=int, default=1, help="as -r of train.py")
    parser.add_argument("--torch-python", help="a Python with torch; without it PyTorch is left out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        B, T = map(int, args.child.split("x"))
        print(json.dumps(measure(parse_descriptor(args.model), B, T, args.rounds, args.recompute)))
        return
    print(f"{platform.machine()}, {hardware.cpu_name()}, {os.cpu_count()} cores; ", end="")
    print(f"Python {platform.python_version()}, jax {jax.__version__}; {args.model} fp32, -r {args.recompute}\n")
    print("| B x T | step ms | products ms | products/step | peak MiB | PyTorch eager ms | compiled ms |")
    print("|---|---|---|---|---|---|---|")
    for shape in args.shapes.split(","):
        B, T = map(int, shape.split("x"))
        torch_ms = {}
        if args.torch_python:
            torch_ms = {c: run_torch(args.torch_python, B, T, args.rounds, c)["median_ms"] for c in (False, True)}
        command = [sys.executable, __file__, "--child", shape, "--rounds", str(args.rounds), "--model", args.model]
        done = subprocess.run([*command, "--recompute", str(args.recompute)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        ours = json.loads(done.stdout.strip().splitlines()[-1])
        torch_cells = [f"{torch_ms[c]:.0f}" if c in torch_ms else "-" for c in (False, True)]
        print(
            f"| {B} x {T} | {ours['step_ms']:.0f} | {ours['products_ms']:.0f} | {ours['ratio']:.3f} | "
            f"{ours['peak_mib']:.0f} | {' | '.join(torch_cells)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
