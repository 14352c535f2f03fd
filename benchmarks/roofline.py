"""FLOPs and bytes of each operation of a training step, the least time that they take on a GPU, and what is expected.

    python benchmarks/roofline.py [-e d12] [-b 64] [-t 1024] [--gpu h200]
    python benchmarks/roofline.py … --measured FILE.json      the time that each operation took beside its floor

FILE.json is what `llmc-jax profile --json` wrote, or benchmarks/results/gpu_….json of gpu_check.sh, whose
kernels' times stand where the shapes are the same. Needs no GPU, compiles nothing. It is the table of
llmc_jax/plan/time.py, which has rates that were measured on such a card where there are any. FLOPs are those of the
products, bytes are compulsory ones (llmc_jax/models/gpt2/work.py).
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmc_jax.base.errors import InputError  # noqa: E402
from llmc_jax.config.flags import parse_args  # noqa: E402
from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.machine.cards import named  # noqa: E402
from llmc_jax.machine.target import machine_of  # noqa: E402
from llmc_jax.models.gpt2.work import PHASES, Shape  # noqa: E402
from llmc_jax.plan.plan import Plan, make_plan  # noqa: E402
from llmc_jax.plan.time import OperationTime, StepTime, step_time  # noqa: E402

Measured = dict[tuple[str, str], float]  # seconds by phase and operation


# ----- what was measured --------------------------------------------------------------------------------------------


def read_measured(path: Path, plan: Plan) -> Measured:
    """Return the seconds of operations, from either of the two kinds of file. Raises InputError for another."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--measured {path}: {error}") from error
    if "operations" in content:
        return _of_profile(content, path, plan.machine.kind, plan.shape)
    if "records" in content:
        return _of_check(content, path, plan)
    raise InputError(f"--measured {path}: neither the profiler's JSON nor gpu_check.sh's: it has {', '.join(content)}")


def _of_profile(content: dict[str, Any], path: Path, gpu: str, shape: Shape) -> Measured:
    made = content["shape"]
    here = {"batch": shape.batch, "sequence": shape.sequence, "dtype": shape.dtype}
    if content["device"]["kind"] != gpu or any(made[name] != value for name, value in here.items()):
        shown = ", ".join(f"{name} {made[name]}" for name in here)
        raise InputError(f"--measured {path}: is of {content['device']['kind']}, {shown}; give -b -t --dtype --gpu so")
    found: Measured = defaultdict(float)
    for each in content["operations"]:
        found[each["phase"], each["operation"]] += each["seconds"]
    return dict(found)


def _of_check(content: dict[str, Any], path: Path, plan: Plan) -> Measured:
    gpu = plan.machine.kind
    if content["machine"].get("device") != gpu:
        raise InputError(f"--measured {path}: is of {content['machine'].get('device')}, not of --gpu {gpu}")
    done = {(part, name): figures for part, name, status, figures, *_ in content["records"] if status == "done"}

    def least(part: str, start: str, figure: str) -> float | None:
        numbers = [figures[figure] for (p, name), figures in done.items() if p == part and name.startswith(start)]
        return min(numbers, default=None)

    return _kernel_times(least, plan.shape, plan.model)


def _kernel_times(least: Any, shape: Shape, config: ModelConfig) -> Measured:
    """Seconds by (phase, operation) of what was measured at this shape, once for each layer."""
    n, C, L = shape.rows, config.channels, config.num_layers
    attention = f"attention bf16 {shape.batch}x{shape.sequence}x{config.num_heads}x{config.head_size} "
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
        us = least("kernels", start, figure)
        if us is not None:
            found[phase, operation] = 1e-6 * us * times
    for operation, inputs, outputs in (("qkv", C, 3 * C), ("attproj", C, C), ("fc", C, 4 * C), ("fcproj", 4 * C, C)):
        us = least("machine", f"product bf16 {n}x{inputs}x{outputs}", "us")
        if us is not None:
            found["forward", operation] = 1e-6 * us * L
    return found


# ----- the table ----------------------------------------------------------------------------------------------------


def table(step: StepTime, measured: Measured) -> str:
    """A Markdown table: in the order of the step, or by what could be saved where times are known."""
    head = [
        "phase",
        "operation",
        "GFLOP",
        "MB",
        "floor, ms",
        "expected, ms",
        "interval",
        "share",
        "bound by",
        "reached",
    ]
    head += ["measured, ms", "gap, ms", "x floor"] if measured else []
    rows = [
        f"| {' | '.join(head)} |",
        "|---|---|" + "---:|" * 4 + "---|---:|---|---:|" + "---:|" * (3 if measured else 0),
    ]

    def gap(each: OperationTime) -> float:
        return measured.get(each[:2], each.floor) - each.floor

    for each in sorted(step.operations, key=gap, reverse=True) if measured else step.operations:
        rows.append(f"| {' | '.join(cells(each, step, measured))} |")
    return "\n".join(rows)


def cells(each: OperationTime, step: StepTime, measured: Measured) -> list[str]:
    """Return a row."""
    low, typical, high = (1e3 * seconds for seconds in each.seconds)
    found = [
        each.phase, each.operation, f"{each.flops / 1e9:,.0f}", f"{each.bytes / 1e6:,.0f}", f"{1e3 * each.floor:.2f}",
        f"{typical:.2f}", f"{low:.2f} - {high:.2f}", f"{100 * each.seconds.typical / step.seconds.typical:.1f} %",
        each.bound, f"{100 * each.efficiency.typical:.0f} %",
    ]  # fmt: skip
    took = measured.get(each[:2])
    if measured and took is not None:
        times = took / each.floor if each.floor else 0.0
        return [*found, f"{1e3 * took:.2f}", f"{1e3 * (took - each.floor):.2f}", f"{times:.2f}"]
    return [*found, *([""] * 3 if measured else [])]


def sums(step: StepTime, measured: Measured) -> str:
    """Return what the operations come to."""
    low, typical, high = step.seconds
    rate = step.tokens_per_second
    text = [
        f"- Floor of the step: {1e3 * step.floor:.1f} ms, {step.tokens / step.floor:,.0f} tok/s.",
        f"- Expected: {1e3 * typical:.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}), {rate.typical:,.0f} tok/s; of it "
        f"{1e3 * step.gaps.typical:.1f} ms between {step.launches} kernels. Bound by {step.bound}.",
    ]
    for name, definition in (("PaLM", "palm"), ("llm.c", "llm.c")):
        mfu, least = step.mfu(definition), step.flops[definition] / step.floor / step.peak  # type: ignore[arg-type,index]
        assert mfu is not None
        text.append(f"- MFU, {name}'s definition: {100 * mfu.typical:.1f} %; at the floor {100 * least:.1f} %.")
    for phase in PHASES:
        seconds = sum(each.seconds.typical for each in step.operations if each.phase == phase)
        text.append(f"- {phase}: {1e3 * seconds:.1f} ms.")
    known = [each for each in step.operations if each[:2] in measured]
    if known:
        seconds = sum(measured[each[:2]] for each in known)
        text.append(f"- Measured: {1e3 * seconds:.1f} ms in {len(known)} of {len(step.operations)} lines, "
                    f"{1e3 * (seconds - sum(each.floor for each in known)):.1f} ms above their floors.")  # fmt: skip
    return "\n".join(text)


def sources(step: StepTime) -> str:
    """Return where the shares of the peaks come from."""
    found = dict.fromkeys(each.efficiency for each in step.operations)
    lines = [
        f"- {100 * each.typical:.0f} % ({100 * each.low:.0f} to {100 * each.high:.0f}): {each.source}"
        + (f", measured on {each.measured_on}." if each.measured_on else ", an estimate.")
        for each in found
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", "--model", default="d12", help="a shape as train.py takes it (default d12)")
    parser.add_argument("-b", "--batch-size", type=int, default=64, help="(default 64)")
    parser.add_argument("-t", "--sequence-length", type=int, default=1024, help="(default 1024)")
    parser.add_argument("-r", "--recompute", type=int, default=0, choices=(0, 1, 2), help="(default 0)")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"), help="(default bf16)")
    parser.add_argument("--gpu", default="h200", help="its short name or the driver's, or a .toml (default h200)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="JSON of the profiler or of gpu_check.sh")
    args = parser.parse_args(argv)
    try:
        kind = named(args.gpu).device_kind
        words = f"-e {args.model} -b {args.batch_size} -t {args.sequence_length} -r {args.recompute}"
        config = parse_args([*words.split(), "--dtype", args.dtype])
        plan = make_plan(config, parse_descriptor(args.model), machine_of(kind))
        step = step_time(plan)
        measured = read_measured(args.measured, plan) if args.measured else {}
    except InputError as error:
        parser.error(str(error))
    typed = shlex.join(sys.argv[1:] if argv is None else argv)
    print(f"# Roofline: {args.model}, B={args.batch_size}, T={args.sequence_length}, {args.dtype}, {kind}\n")
    print(f"Made by `{f'python benchmarks/roofline.py {typed}'.strip()}`.")
    print(
        "A floor is the larger of FLOPs over the peak and compulsory bytes over bandwidth; what is expected reaches a"
    )
    print("share of them, of a product divided by what its tiles fill (llmc_jax/plan/time.py).\n")
    print(f"{table(step, measured)}\n\n{sums(step, measured)}\n\nShares reached:\n\n{sources(step)}")


if __name__ == "__main__":
    main()
