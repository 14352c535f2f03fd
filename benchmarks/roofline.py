"""FLOPs and bytes of each operation of a training step, and the least time that they take on a GPU.

    python benchmarks/roofline.py [-e d12] [-b 64] [-t 1024] [--gpu 'NVIDIA H200']
    python benchmarks/roofline.py … --measured FILE.json      the time that each operation took beside its floor

FILE.json is what `python -m llmc_jax.profile --json` wrote, or benchmarks/results/gpu_….json of gpu_check.sh: the rates
in it then take the place of the estimates, and the times of its kernels stand where the shapes are the same. Needs no
GPU, compiles nothing. FLOPs are those of the products, bytes are compulsory ones (llmc_jax/models/gpt2/work.py).
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.errors import InputError  # noqa: E402
from llmc_jax.machine.gpus import GPUS, card_memory_bytes  # noqa: E402
from llmc_jax.models.gpt2.memory import chosen_logit_rows  # noqa: E402
from llmc_jax.models.gpt2.work import PHASES, Shape, Work, flops_per_token, step_work  # noqa: E402

# Estimates, as shares of a GPU's peaks: what well-made kernels reach. Products of a model's sizes: cuBLAS on Hopper.
# Attention at 64 channels a head, T=1024, causal: what cuDNN and FlashAttention-3 are published with, forward about
# 310 to 390 of 989 TFLOP/s, backward 210 to 360. Bandwidth: what a large copy reaches.
PRODUCTS, ATTENTION_FORWARD, ATTENTION_BACKWARD, BANDWIDTH = 0.70, 0.35, 0.28, 0.90


class Rates(NamedTuple):
    """What floors are computed with."""

    products: float  # FLOP/s
    attention_forward: float
    attention_backward: float
    bandwidth: float  # bytes per second
    source: str


class Line(NamedTuple):
    """One operation over all layers and micro-batches of a step."""

    phase: str
    operation: str
    flops: int
    bytes: int
    by_products: float  # seconds
    by_memory: float
    measured: float | None = None

    @property
    def floor(self) -> float:
        return max(self.by_products, self.by_memory)

    @property
    def bound(self) -> str:
        return "products" if self.by_products > self.by_memory else "memory"

    @property
    def gap(self) -> float:
        """Seconds that could be saved; nothing where no time is known."""
        return 0.0 if self.measured is None else self.measured - self.floor


def estimated(gpu: str, dtype: str) -> Rates:
    """Shares of the peaks. Raises InputError for a GPU that is not in the table."""
    if gpu not in GPUS:
        raise InputError(f"--gpu {gpu}: not in the table; it has {', '.join(GPUS)}")
    peaks = GPUS[gpu]
    peak = getattr(peaks, "tf32" if dtype == "fp32" else dtype)
    if peak is None:
        raise InputError(f"--dtype {dtype}: {gpu} has no products in it")
    flops, told = 1e12 * peak, f"{100 * BANDWIDTH:.0f} % of {peaks.bandwidth:,.0f} GB/s"
    return Rates(
        PRODUCTS * flops, ATTENTION_FORWARD * flops, ATTENTION_BACKWARD * flops, BANDWIDTH * 1e9 * peaks.bandwidth,
        f"estimated: products at {100 * PRODUCTS:.0f} % of {peak:,.1f} TFLOP/s, attention at "
        f"{100 * ATTENTION_FORWARD:.0f} and {100 * ATTENTION_BACKWARD:.0f} %, memory at {told}",
    )  # fmt: skip


def lines(work: Iterable[Work], rates: Rates, measured: dict[tuple[str, str], float]) -> list[Line]:
    """The operations with their floors. The floors of several layers add up."""
    found: dict[tuple[str, str], Line] = {}
    for each in work:
        key = (each.phase, each.operation)
        # a classifier's sum over a row is no product on a GPU
        flops = 0 if each.operation == "classifier" else each.flops
        rate = rates.products
        if each.operation == "attention":
            rate = rates.attention_forward if each.phase == "forward" else rates.attention_backward
        old = found.get(key, Line(*key, 0, 0, 0.0, 0.0))
        by_products, by_memory = flops / rate, each.bytes / rates.bandwidth
        found[key] = Line(
            *key, old.flops + flops, old.bytes + each.bytes, old.by_products + by_products, old.by_memory + by_memory,
            measured.get(key),
        )  # fmt: skip
    return list(found.values())


# ----- what was measured --------------------------------------------------------------------------------------------


def read_measured(
    path: Path, gpu: str, config: ModelConfig, shape: Shape, rates: Rates
) -> tuple[Rates, dict[Any, float]]:
    """Rates and seconds by (phase, operation), from either of the two kinds of file. Raises InputError for another."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--measured {path}: {error}") from error
    if "operations" in content:
        made = content["shape"]
        here = {"batch": shape.batch, "sequence": shape.sequence, "dtype": shape.dtype}
        if content["device"]["kind"] != gpu or any(made[name] != value for name, value in here.items()):
            shown = ", ".join(f"{name} {made[name]}" for name in here)
            raise InputError(
                f"--measured {path}: is of {content['device']['kind']}, {shown}; give -b -t --dtype --gpu so"
            )
        found: dict[tuple[str, str], float] = defaultdict(float)
        for each in content["operations"]:
            found[each["phase"], each["operation"]] += each["seconds"]
        return rates, dict(found)
    if "records" in content:
        return _of_check(content, path, gpu, config, shape, rates)
    raise InputError(f"--measured {path}: neither the profiler's JSON nor gpu_check.sh's: it has {', '.join(content)}")


def _of_check(
    content: dict[str, Any], path: Path, gpu: str, config: ModelConfig, shape: Shape, rates: Rates
) -> tuple[Rates, dict[Any, float]]:
    if content["machine"].get("device") != gpu:
        raise InputError(f"--measured {path}: is of {content['machine'].get('device')}, not of --gpu {gpu}")
    done = {(part, name): figures for part, name, status, figures, *_ in content["records"] if status == "done"}
    n, C = shape.rows, config.channels

    def of(part: str, start: str, figure: str, least: bool = False) -> float | None:
        numbers = [figures[figure] for (p, name), figures in done.items() if p == part and name.startswith(start)]
        return (min if least else max)(numbers) if numbers else None

    attention = f"attention bf16 {shape.batch}x{shape.sequence}x{config.num_heads}x{config.head_size} "
    copy, product = of("machine", "copy", "GB/s"), of("machine", f"product bf16 {n}x{C}x{4 * C}", "TFLOP/s")
    forward, backward = (of("kernels", attention, f"{way} TFLOP/s") for way in ("forward", "backward"))
    rates = Rates(
        1e12 * product if product else rates.products,
        1e12 * forward if forward else rates.attention_forward,
        1e12 * backward if backward else rates.attention_backward,
        1e9 * copy if copy else rates.bandwidth,
        f"measured where {path.name} has them, else {rates.source}",
    )
    return rates, _kernel_times(of, n, config, attention)


def _kernel_times(of: Any, n: int, config: ModelConfig, attention: str) -> dict[Any, float]:
    """Seconds by (phase, operation) of what was measured at this shape, once for each layer."""
    C, L = config.channels, config.num_layers
    elements = config.padded_vocab_size
    items = [
        ("forward", "ln2", f"residual_layernorm_forward bf16 {n}x{C}", "us", L),
        ("backward", "ln2", f"residual_layernorm_backward bf16 {n}x{C}", "us", L),
        ("backward", "ln1", f"residual_layernorm_backward bf16 {n}x{C}", "us", L),
        ("backward", "lnf", f"layernorm_backward bf16 {n}x{C}", "us", 1),
        ("forward", "lnf", f"residual_layernorm_forward bf16 {n}x{C}", "us", 1),
        ("forward", "gelu", f"gelu_forward bf16 {n}x{4 * C}", "us", L),
        ("backward", "gelu", f"gelu_backward bf16 {n}x{4 * C}", "us", L),
        ("forward", "attention", attention, "forward us", L),
        ("backward", "attention", attention, "backward us", L),
        ("forward", "classifier", f"classifier bf16 8192x{config.vocab_size}x{elements}", "us", n / 8192),
    ]
    found = {}
    for phase, operation, start, figure, times in items:
        us = of("kernels", start, figure, True)
        if us is not None:
            found[phase, operation] = 1e-6 * us * times
    for operation, inputs, outputs in (("qkv", C, 3 * C), ("attproj", C, C), ("fc", C, 4 * C), ("fcproj", 4 * C, C)):
        us = of("machine", f"product bf16 {n}x{inputs}x{outputs}", "us")
        if us is not None:
            found["forward", operation] = 1e-6 * us * L
    return found


# ----- the table ----------------------------------------------------------------------------------------------------


def table(found: list[Line]) -> str:
    """A Markdown table: in the order of the step, or by what could be saved where times are known."""
    total = sum(line.floor for line in found)
    timed = any(line.measured is not None for line in found)
    head = ["phase", "operation", "GFLOP", "MB", "by products, ms", "by memory, ms", "floor, ms", "share", "bound by"]
    head += ["measured, ms", "gap, ms", "x floor"] if timed else []
    rows = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * 6 + "---|" + "---:|" * (3 if timed else 0)]
    for line in sorted(found, key=lambda line: -line.gap) if timed else found:
        cells = [line.phase, line.operation, f"{line.flops / 1e9:,.0f}", f"{line.bytes / 1e6:,.0f}"]
        cells += [f"{1e3 * seconds:.2f}" for seconds in (line.by_products, line.by_memory, line.floor)]
        cells += [f"{100 * line.floor / total:.1f} %", line.bound]
        if timed and line.measured is not None:
            cells += [f"{1e3 * line.measured:.2f}", f"{1e3 * line.gap:.2f}", f"{line.measured / line.floor:.2f}"]
        elif timed:
            cells += ["", "", ""]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def sums(found: list[Line], config: ModelConfig, shape: Shape, gpu: str) -> str:
    """Return what the floors come to."""
    total, tokens = sum(line.floor for line in found), shape.rows * shape.micro_batches
    peak = 1e12 * getattr(GPUS[gpu], "tf32" if shape.dtype == "fp32" else shape.dtype)
    text = [f"- Floor of the step: {1e3 * total:.1f} ms, {tokens / total:,.0f} tok/s."]
    for name, definition in (("PaLM", "palm"), ("llm.c", "llm.c")):
        flops = flops_per_token(config, shape.sequence, definition=definition) * tokens  # type: ignore[arg-type]
        text.append(f"- MFU at the floor, {name}'s definition: {100 * flops / total / peak:.1f} %.")
    for phase in PHASES:
        text.append(f"- {phase}: {1e3 * sum(line.floor for line in found if line.phase == phase):.1f} ms.")
    memory = sum(line.floor for line in found if line.bound == "memory")
    text.append(f"- Bound by memory: {1e3 * memory:.1f} ms, {100 * memory / total:.0f} %.")
    known = [line for line in found if line.measured is not None]
    if known:
        seconds = sum(line.measured or 0.0 for line in known)
        text.append(f"- Measured: {1e3 * seconds:.1f} ms in {len(known)} of {len(found)} lines, "
                    f"{1e3 * sum(line.gap for line in known):.1f} ms above their floors.")  # fmt: skip
    return "\n".join(text)


def main(argv: list[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", "--model", default="d12", help="a shape as train.py takes it (default d12)")
    parser.add_argument("-b", "--batch-size", type=int, default=64, help="(default 64)")
    parser.add_argument("-t", "--sequence-length", type=int, default=1024, help="(default 1024)")
    parser.add_argument("-r", "--recompute", type=int, default=0, choices=(0, 1, 2), help="(default 0)")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"), help="(default bf16)")
    parser.add_argument("--gpu", default="NVIDIA H200", help="as the driver names it (default NVIDIA H200)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="JSON of the profiler or of gpu_check.sh")
    args = parser.parse_args(argv)
    B, T, fp32 = args.batch_size, args.sequence_length, args.dtype == "fp32"
    try:
        config, rates = parse_descriptor(args.model), estimated(args.gpu, args.dtype)
        shape = Shape(B, T, recompute=args.recompute, dtype=args.dtype, flash=not fp32)
        shape = shape._replace(logit_rows=chosen_logit_rows(config, shape, card_memory_bytes(args.gpu)))
        measured: dict[tuple[str, str], float] = {}
        if args.measured:
            rates, measured = read_measured(args.measured, args.gpu, config, shape, rates)
    except InputError as error:
        parser.error(str(error))
    found = lines(step_work(config, shape), rates, measured)
    words = shlex.join(sys.argv[1:] if argv is None else argv)
    print(f"# Roofline: {args.model}, B={args.batch_size}, T={args.sequence_length}, {args.dtype}, {args.gpu}\n")
    print(f"Made by `{f'python benchmarks/roofline.py {words}'.strip()}`. Rates: {rates.source}.")
    print("A floor is the larger of FLOPs over the rate of products and compulsory bytes over bandwidth.\n")
    print(f"{table(found)}\n\n{sums(found, config, shape, args.gpu)}")


if __name__ == "__main__":
    main()
