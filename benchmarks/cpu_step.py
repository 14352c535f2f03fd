"""GPT-2 124M on the CPU: a training step beside its matrix products alone, and beside PyTorch's, all in turns.

    python benchmarks/cpu_step.py [--torch-python PATH] [--model d12] [--shapes 4x64,4x256] [--rounds 5]
                                  [--libraries Eigen,oneDNN]

Each program is a process of its own that has compiled its step and waits, using no core, until it is its turn. In
each round every one has a block of steps; the first of a block, which finds caches and memory as the others left them,
is not counted: a training run never meets that. A ratio is of two blocks of one round, so a machine that becomes faster
or slower meanwhile decides nothing; the figure is the median over the rounds, with the least and the greatest.

The products are those of the step, each with its own operands (cpu_products.py measures them one by one): 6 x
parameters x tokens operations in all and a little more. What they leave is everything that is not a product: layernorm,
softmax, GELU, classifier, AdamW, and moving data. PyTorch runs in its own interpreter (torch_peer.py), as one would
write it, and through torch.compile; the better one is the one with the lower median.
"""

import argparse
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from cpu_products import LIBRARIES, flags_for, products, runner  # noqa: E402
from turns import Peer, blocks_in_turns, ratios, serve, spread  # noqa: E402

from llmc_jax.machine import jax_setup as llmc_platform  # noqa: E402

if __name__ == "__main__" and "--serve" in sys.argv:
    llmc_platform.restart_with_huge_pages()
llmc_platform.configure()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.machine import compiling  # noqa: E402
from llmc_jax.machine import device as hardware  # noqa: E402
from llmc_jax.models.gpt2.model import Execution  # noqa: E402
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters  # noqa: E402
from llmc_jax.training.adamw import AdamWNumbers  # noqa: E402
from llmc_jax.training.schedule import ScheduleNumbers  # noqa: E402
from llmc_jax.training.state import initial_state  # noqa: E402
from llmc_jax.training.step import StepNumbers, StepOptions, train_step  # noqa: E402

Once = Callable[[], float]


def product_runner(config: ModelConfig, B: int, T: int) -> Once:
    """Return a function that makes all products of a step once and returns the seconds."""
    of_step = products(config.channels, config.num_layers, config.num_heads, config.padded_vocab_size, B, T)
    runners = [(product.count, runner(product, config.num_layers)) for product in of_step]
    return lambda: sum(count * run() for count, run in runners) / 1e3


def step_runner(config: ModelConfig, B: int, T: int, recompute: int) -> Once:
    """Return a function that takes one training step and returns the seconds."""
    rng = np.random.default_rng(0)
    flat = np.zeros(flat_size(config), np.float32)
    flat[: num_parameters(config)] = rng.standard_normal(num_parameters(config), np.float32) * 0.02
    state = initial_state(jnp.asarray(flat))
    del flat
    inputs = rng.integers(0, config.vocab_size, (1, B, T)).astype(np.int32)
    targets = rng.integers(0, config.vocab_size, (1, B, T)).astype(np.int32)
    numbers = StepNumbers(ScheduleNumbers(3e-4, 0, 1000, 1.0, 0, 1.0), AdamWNumbers(0.9, 0.95, 1e-8, 0.1), 1.0)
    options = StepOptions("cosine", "matrices", Execution(recompute=recompute))
    lowered = train_step.lower(state, inputs, targets, numbers, config, options)
    compiled = compiling.compiled(lowered, options.execution.compiler_options)

    def once() -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = compiled(state, inputs, targets, numbers)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    return once


def be_peer(what: str, config: ModelConfig, B: int, T: int, recompute: int) -> None:
    """Compile the step, or its products, and run them whenever asked."""
    once = product_runner(config, B, T) if what == "products" else step_runner(config, B, T, recompute)
    once()
    once()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**20
    serve({"jax": jax.__version__, "peak_mib": peak}, lambda steps: {"ms": [1e3 * once() for _ in range(steps)]})


def peers(args: argparse.Namespace, B: int, T: int) -> dict[str, Peer]:
    """Start the programs that take part, one after the other: compilations would disturb each other."""
    ours = [sys.executable, __file__, "--model", args.model, "--shapes", f"{B}x{T}", "--recompute", str(args.recompute)]
    found = {"step": Peer([*ours, "--serve", "step"]).wait_ready()}
    for name in args.libraries.split(",") if args.libraries else []:
        found[f"step, {name}"] = Peer([*ours, "--serve", "step"], flags_for(LIBRARIES[name])).wait_ready()
    if not args.no_products:
        found["products alone"] = Peer([*ours, "--serve", "products"]).wait_ready()
    if args.torch_python:
        torch = [args.torch_python, str(ROOT / "benchmarks/torch_peer.py"), "--serve", "-b", str(B), "-t", str(T)]
        found["PyTorch eager"] = Peer(torch).wait_ready()
        found["PyTorch compiled"] = Peer([*torch, "--compile"]).wait_ready()
    return found


def measure(args: argparse.Namespace, shape: str) -> None:
    """Print the rows of one shape."""
    B, T = map(int, shape.split("x"))
    taking_part = peers(args, B, T)
    blocks = {name: lambda peer=peer: peer.block(args.steps) for name, peer in taking_part.items()}
    times = blocks_in_turns(blocks, args.rounds)
    for name, peer in taking_part.items():
        memory = peer.about.get("peak_mib") or 1e9 / 2**20 * peer.about["peak_rss_gb"]
        ms, ratio = spread(times[name]).text(0), ratios(times[name], times["step"]).text(2)
        print(f"| {B} x {T} | {name} | {ms} | {ratio} | {memory:.0f} |", flush=True)
        peer.close()
    if args.torch_python:
        better = min(("PyTorch eager", "PyTorch compiled"), key=lambda name: statistics.median(times[name]))
        ratio = ratios(times[better], times["step"]).text(2)
        print(f"| {B} x {T} | **the better of both: {better[8:]}** | | **{ratio}** | |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="d12")
    parser.add_argument("--shapes", default="4x64,4x256", help="BxT, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a block, after one that is not")
    parser.add_argument("--recompute", type=int, default=1, help="as -r of train.py")
    parser.add_argument("--torch-python", help="a Python with torch; without it PyTorch is left out")
    parser.add_argument("--libraries", help=f"the step with other matrix libraries too: {', '.join(LIBRARIES)}")
    parser.add_argument("--no-products", action="store_true", help="leave out the products alone")
    parser.add_argument("--serve", choices=("step", "products"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        B, T = map(int, args.shapes.split("x"))
        be_peer(args.serve, parse_descriptor(args.model), B, T, args.recompute)
        return
    print(f"{platform.machine()}, {hardware.cpu_name()}, {os.cpu_count()} cores; ", end="")
    print(f"Python {platform.python_version()}, jax {jax.__version__}; {args.model} fp32, -r {args.recompute};")
    print(f"{args.rounds} rounds of {args.steps} steps each: median (least - greatest)\n")
    print("| B x T | program | ms | times the step | peak MiB |\n|---|---|---|---|---|")
    for shape in args.shapes.split(","):
        measure(args, shape)


if __name__ == "__main__":
    main()
