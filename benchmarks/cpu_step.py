"""GPT-2 124M on the CPU: a training step beside its matrix products alone, and beside PyTorch's, all in turns.

    python benchmarks/cpu_step.py [--torch-python PATH] [--model d12] [--shapes 4x64,4x256] [--dtype bf16] [--rounds 5]

Each program is a process of its own that has compiled its step and waits, using no core, until it is its turn. In
each round every one has a block of steps; the first of a block, which finds caches and memory as the others left them,
is not counted: a training run never meets that. A ratio is of two blocks of one round, so a machine that becomes faster
or slower meanwhile decides nothing; the figure is the median over the rounds, with the least and the greatest.

The products are those of the step: n rows times a weight forward, for the gradient of its input and of its weight, and
attention's, batched over sequences and heads. Each layer has its own operands, which fit in no cache, and results are
written over old ones, so that no memory is mapped meanwhile. What they leave is everything that is not a product:
layernorm, softmax, GELU, classifier, AdamW, and moving data. In bf16 our step in fp32 takes their place. PyTorch runs
in its own interpreter (torch_peer.py), as one would write it, and through torch.compile; the better one is the one with
the lower median.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from heading import machine_line  # noqa: E402
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
from llmc_jax.machine.device import describe_device  # noqa: E402
from llmc_jax.machine.gpus import this_machine  # noqa: E402
from llmc_jax.models.execution import Execution  # noqa: E402
from llmc_jax.models.layout import flat_size, num_parameters  # noqa: E402
from llmc_jax.run.fitting import step_bytes  # noqa: E402
from llmc_jax.training.rules.adamw import AdamWNumbers  # noqa: E402
from llmc_jax.training.schedule import ScheduleNumbers  # noqa: E402
from llmc_jax.training.state import DTYPES, initial_state  # noqa: E402
from llmc_jax.training.step import StepNumbers, StepOptions, train_step  # noqa: E402

Once = Callable[[], float]


class Product(NamedTuple):
    """One matrix product of a step, and how often the step makes it."""

    einsum: str
    a: tuple[int, ...]
    b: tuple[int, ...]
    count: int


def products(config: ModelConfig, B: int, T: int) -> list[Product]:
    """Return every matrix product of a step."""
    C, L, n, found = config.channels, config.num_layers, B * T, []
    linears = [(3 * C, C, L), (C, C, L), (4 * C, C, L), (C, 4 * C, L), (config.padded_vocab_size, C, 1)]
    for outputs, inputs, count in linears:
        found.append(Product("ni,oi->no", (n, inputs), (outputs, inputs), count))
        found.append(Product("no,oi->ni", (n, outputs), (outputs, inputs), count))
        found.append(Product("no,ni->oi", (n, outputs), (n, inputs), count))
    head = (B, config.num_heads, T, config.head_size)
    square = (B, config.num_heads, T, T)
    found.append(Product("bnth,bnuh->bntu", head, head, 2 * L))
    found.append(Product("bntu,bnuh->bnth", square, head, 2 * L))
    found.append(Product("bntu,bnth->bnuh", square, head, 2 * L))
    return found


def runner(product: Product, layers: int) -> Once:
    """Return a function that makes one kind of product as often as a step does, and returns the seconds."""
    rng = np.random.default_rng(0)
    pairs = [
        [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in (product.a, product.b)]
        for _ in range(min(product.count, layers))
    ]
    # The old result is handed over, and the new one written there.
    run = jax.jit(lambda a, b, old: jnp.einsum(product.einsum, a, b), donate_argnums=2, keep_unused=True)
    old = [jax.block_until_ready(jnp.einsum(product.einsum, *pair)) for pair in pairs]

    def once() -> float:
        start = time.perf_counter()
        for i in range(product.count):
            old[i % len(old)] = run(*pairs[i % len(pairs)], old[i % len(old)])
        jax.block_until_ready(old)
        return time.perf_counter() - start

    return once


def product_runner(config: ModelConfig, B: int, T: int) -> Once:
    """Return a function that makes all products of a step once and returns the seconds."""
    runners = [runner(product, config.num_layers) for product in products(config, B, T)]
    return lambda: sum(run() for run in runners)


def step_runner(config: ModelConfig, B: int, T: int, recompute: int, dtype: str = "fp32") -> Once:
    """Return a function that takes one training step, compiled as a run's is, and returns the seconds."""
    rng = np.random.default_rng(0)
    flat = np.zeros(flat_size(config), np.float32)
    flat[: num_parameters(config)] = rng.standard_normal(num_parameters(config), np.float32) * 0.02
    state = initial_state(jnp.asarray(flat), DTYPES[dtype])
    del flat
    inputs = rng.integers(0, config.vocab_size, (1, B, T)).astype(np.int32)
    targets = rng.integers(0, config.vocab_size, (1, B, T)).astype(np.int32)
    numbers = StepNumbers(ScheduleNumbers(3e-4, 0, 1000, 1.0, 0, 1.0), AdamWNumbers(0.9, 0.95, 1e-8, 0.1), 1.0)
    library = compiling.onednn(dtype, this_machine(), compiling.user_flags())
    options = StepOptions("cosine", "matrices", Execution(recompute=recompute, compiler_options=library))
    lowered = train_step.lower(state, inputs, targets, numbers, config, options)
    compiled = compiling.compiled(lowered, options.execution.compiler_options)
    llmc_platform.keep_freed(describe_device(), step_bytes(compiled))

    def once() -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = compiled(state, inputs, targets, numbers)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    return once


def be_peer(what: str, config: ModelConfig, B: int, T: int, recompute: int, dtype: str) -> None:
    """Compile the step, or its products, and run them whenever asked."""
    once = product_runner(config, B, T) if what == "products" else step_runner(config, B, T, recompute, dtype)
    once()
    once()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**20
    serve({"jax": jax.__version__, "peak_mib": peak}, lambda steps: {"ms": [1e3 * once() for _ in range(steps)]})


def peers(args: argparse.Namespace, B: int, T: int) -> dict[str, Peer]:
    """Start the programs that take part, one after the other: compilations would disturb each other."""
    ours = [sys.executable, __file__, "--model", args.model, "--shapes", f"{B}x{T}", "--recompute", str(args.recompute)]
    found = {"step": Peer([*ours, "--serve", "step", "--dtype", args.dtype]).wait_ready()}
    if args.dtype != "fp32":
        found["step in fp32"] = Peer([*ours, "--serve", "step"]).wait_ready()
    elif not args.no_products:
        found["products alone"] = Peer([*ours, "--serve", "products"]).wait_ready()
    if args.torch_python:
        torch = [args.torch_python, str(ROOT / "benchmarks/torch_peer.py"), "--serve", "-b", str(B), "-t", str(T)]
        torch += ["--autocast"] if args.dtype == "bf16" else []
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
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: PyTorch with autocast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a block, after one that is not")
    parser.add_argument("--recompute", type=int, default=1, help="as -r of train.py")
    parser.add_argument("--torch-python", help="a Python with torch; without it PyTorch is left out")
    parser.add_argument("--no-products", action="store_true", help="leave out the products alone")
    parser.add_argument("--serve", choices=("step", "products"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        B, T = map(int, args.shapes.split("x"))
        be_peer(args.serve, parse_descriptor(args.model), B, T, args.recompute, args.dtype)
        return
    print(f"{machine_line()}; {args.model} {args.dtype}, -r {args.recompute};")
    print(f"{args.rounds} rounds of {args.steps} steps each: median (least - greatest)\n")
    print("| B x T | program | ms | times the step | peak MiB |\n|---|---|---|---|---|")
    for shape in args.shapes.split(","):
        measure(args, shape)


if __name__ == "__main__":
    main()
