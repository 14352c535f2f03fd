"""The choices behind the CPU path, each against its alternative, in one run.

    python benchmarks/cpu_choices.py [--model d12] [--shape 4x64] [--rounds 5] [--flags]

Variants alternate round by round; the figure is the median of the ratios to the chosen variant of the same round.
Huge pages and XLA flags are fixed when a process starts, so those variants are child processes that take turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

from llmc_jax.machine import jax_setup as llmc_platform  # noqa: E402

llmc_platform.configure()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cpu_step import step_runner  # noqa: E402

from benchmarks.heading import machine_line  # noqa: E402
from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.models.gpt2 import model as gpt2  # noqa: E402
from llmc_jax.models.gpt2 import tensors as params  # noqa: E402
from llmc_jax.ops.classifier import classifier_forward  # noqa: E402
from llmc_jax.ops.layernorm import layernorm_forward  # noqa: E402
from llmc_jax.training.adamw import AdamWNumbers, adamw_update  # noqa: E402
from llmc_jax.training.optimizer import decay_ranges  # noqa: E402

FLAGS = (
    "--xla_cpu_prefer_vector_width=512",
    "--xla_cpu_enable_concurrency_optimized_scheduler=true",
    "--xla_cpu_use_onednn=true --xla_cpu_experimental_onednn_fusion_type=dot",
    "--xla_cpu_experimental_ynn_fusion_type=",
)
Timed = Callable[[], float]


def compare(variants: dict[str, Timed], rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds, and median ratio to the first variant, of each; every variant runs once to warm up."""
    for run in variants.values():
        run()
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(run())
    chosen = next(iter(times.values()))
    return {
        name: (1e3 * statistics.median(each), statistics.median(t / c for t, c in zip(each, chosen, strict=True)))
        for name, each in times.items()
    }


# ----- AdamW --------------------------------------------------------------------------------------------------------


def adamw_in_one_expression(p, m, v, g, finite, decay):
    """adamw_update without the barrier."""
    rate, t = 3e-4, 1
    new_m = jnp.where(finite, 0.9 * m + 0.1 * g, m)
    new_v = jnp.where(finite, 0.95 * v + 0.05 * g * g, v)
    change = (new_m / (1 - 0.9**t)) / (jnp.sqrt(new_v / (1 - 0.95**t)) + 1e-8)
    return jnp.where(finite, p - rate * change, p), new_m, new_v


def adamw_with(p, m, v, g, finite, decay):
    numbers = AdamWNumbers(0.9, 0.95, 1e-8, 0.1)
    common = {"scale": jnp.float32(1), "learning_rate": jnp.float32(3e-4), "update": jnp.int32(1)}
    return adamw_update(p, m, v, g, **common, apply=finite, numbers=numbers, decay=decay)[:3]


def adamw_variants(config: ModelConfig) -> dict[str, Timed]:
    size = params.flat_size(config)
    gradient = jnp.asarray(np.random.default_rng(0).standard_normal(size, np.float32))
    state = [jnp.zeros(size), jnp.zeros(size), jnp.zeros(size)]

    def timed(function: Callable, decay: tuple[tuple[int, int], ...]) -> Timed:
        jitted = jax.jit(lambda p, m, v, g, finite: function(p, m, v, g, finite, decay), donate_argnums=(0, 1, 2))

        def once() -> float:
            start = time.perf_counter()
            state[:] = jitted(*state, gradient, True)
            jax.block_until_ready(state)
            return time.perf_counter() - start

        return once

    return {
        "AdamW": timed(adamw_with, ()),
        "AdamW with decay of the matrices": timed(adamw_with, decay_ranges(config, "matrices")),
        "AdamW in one expression, no barrier": timed(adamw_in_one_expression, ()),
    }


# ----- layers -------------------------------------------------------------------------------------------------------


def scanned_loss(flat: jax.Array, tokens: jax.Array, targets: jax.Array, config: ModelConfig) -> jax.Array:
    """The plain loss with the layers in a scan, for JAX to differentiate."""
    tensors = params.views(flat, config)
    blocks = gpt2.BlockParams(*(getattr(tensors, name) for name in gpt2.BlockParams._fields))
    x = gpt2.embedding_forward(tokens, tensors.wte, tensors.wpe)

    def layer(x: jax.Array, p: gpt2.BlockParams) -> tuple[jax.Array, None]:
        residual, pending, _ = gpt2.block_forward(x, None, p, config.num_heads, gpt2.PLAIN)
        return residual + pending, None

    x, _ = jax.lax.scan(layer, x, blocks)
    lnf, _, _ = layernorm_forward(x, tensors.lnfw, tensors.lnfb)
    logits = gpt2.linear_forward(lnf, tensors.wte, None)
    return jnp.mean(classifier_forward(logits, targets, config.vocab_size)[0])


def gradient_variants(config: ModelConfig, B: int, T: int) -> dict[str, Timed]:
    rng = np.random.default_rng(0)
    flat = jnp.asarray(params.padded(rng.standard_normal(params.num_parameters(config), np.float32) * 0.02, config))
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (B, T)), jnp.int32)

    def timed(loss: Callable) -> Timed:
        jitted = jax.jit(lambda flat, tokens: jax.value_and_grad(loss)(flat, tokens, tokens, config))

        def once() -> float:
            start = time.perf_counter()
            jax.block_until_ready(jitted(flat, tokens))
            return time.perf_counter() - start

        return once

    return {
        "gradient: explicit backward, layers unrolled": timed(gpt2.loss_fn),
        "gradient: layers scanned, JAX's backward": timed(scanned_loss),
    }


# ----- what a process starts with -----------------------------------------------------------------------------------


def child(args: argparse.Namespace, environment: dict[str, str]) -> Timed:
    """A step in a process of its own; returns the median seconds of a few steps."""
    command = [sys.executable, __file__, "--child", "--model", args.model, "--shape", args.shape]

    def once() -> float:
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        if done.returncode:
            raise SystemExit(f"{environment}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    return once


def print_rows(rows: dict[str, tuple[float, float]]) -> None:
    for name, (ms, ratio) in rows.items():
        print(f"| {name} | {ms:.0f} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="d12")
    parser.add_argument("--shape", default="4x64", help="BxT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flags", action="store_true", help="XLA flags too; takes minutes")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = parse_descriptor(args.model)
    B, T = map(int, args.shape.split("x"))
    if args.child:
        step = step_runner(config, B, T, 0)
        step()
        print(json.dumps(statistics.median(step() for _ in range(5))))
        return
    print(f"{machine_line()};")
    print(f"{args.model} fp32, B={B} T={T}, {args.rounds} rounds\n")
    print("| variant | ms | ratio |\n|---|---|---|")
    huge = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    pages = {"step, 2 MiB pages": child(args, huge), "step, 4 KiB pages": child(args, {"GLIBC_TUNABLES": ""})}
    print_rows(compare(pages, args.rounds))
    print_rows(compare(adamw_variants(config), args.rounds))
    print_rows(compare(gradient_variants(config, B, T), args.rounds))
    if args.flags:
        chosen = {"step, no XLA flag": child(args, huge)}
        flagged = {f"step, {flag}": child(args, {**huge, "XLA_FLAGS": flag}) for flag in FLAGS}
        print_rows(compare(chosen | flagged, min(args.rounds, 3)))


if __name__ == "__main__":
    llmc_platform.restart_with_huge_pages()
    main()
