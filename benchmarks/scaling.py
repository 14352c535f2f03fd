"""A model of how training scales over many H100s: what is computed, what is sent, and how much of that is hidden.

    python benchmarks/scaling.py            the table, into results/scaling.md

Nothing is measured, and no two GPUs have run this yet. Every GPU has the same micro-batch however many there are (weak
scaling), and efficiency is the time of an update on one GPU over that on n.

- Compute is the typical time of each operation by llmc_jax/plan/time.py, and of the gaps between kernels. The
  optimizer's is divided by n where its state is split, which one GPU alone cannot do: so an efficiency may exceed
  100 %.
- What is sent is training/parallel/traffic.py's list, the same collectives with the same bytes as in compiled programs.
- A collective takes its ring inside a node of 8, then one between the nodes, of an eighth of it from each GPU: NVLink
  at 450 GB/s for each GPU and direction, a network of 400 Gbit/s (50 GB/s) for each GPU, 80 % of both. A hop of a ring
  takes 1 us inside a node and 5 us between two, a collective 10 us to start. An all-reduce is a reduce-scatter and an
  all-gather.
- Without overlap the GPU computes nothing while it sends. With overlap a layer's gradients are sent while the layers
  below are computed, one collective after the other, and computing is not slowed by it. What comes after the backward
  is never hidden: what is left of the layers', wte's gradient (which the embedding completes last), the norm, the
  gather of new weights. With several micro-batches, stages 0 and 1 send their sum at the end of the update, beside
  nothing; stage 2 sends each micro-batch's.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmc_jax.plan.compiled import plan_for  # noqa: E402
from llmc_jax.plan.efficiency import gpu  # noqa: E402
from llmc_jax.plan.network import Compute, Network, collective_seconds, step_of  # noqa: E402
from llmc_jax.plan.plan import Plan  # noqa: E402
from llmc_jax.plan.time import computes_of, sent_by, step_time, times_of  # noqa: E402
from llmc_jax.training.parallel.traffic import Sent  # noqa: E402

RESULTS = ROOT / "benchmarks/results/scaling.md"
GPU, TYPICAL = "h100", 1  # of TARGETS; of an interval
BATCHES = {"d12": 64, "d24": 32, "d36": 16, "d48": 8}  # -b of each GPU
DEVICES = (8, 64, 512)


class Row(NamedTuple):
    """A model on some GPUs, each with the same micro-batches."""

    plan: Plan
    compute: Compute
    sent: list[Sent]

    @property
    def seconds(self) -> float:
        """Return how long an update takes."""
        return step_of(self.compute, self.sent, self.plan.parallel.devices, self.plan.shape.micro_batches).seconds

    @property
    def computing(self) -> float:
        """Return how long one GPU computes in an update."""
        each = self.compute
        return self.plan.shape.micro_batches * (each.before + sum(each.layers) + each.end) + each.update

    @property
    def sending(self) -> float:
        """Return how long all collectives take, if nothing else happens."""
        n = self.plan.parallel.devices
        return sum(each.times * collective_seconds(each.kind, each.bytes, n, Network()) for each in self.sent)


def row_of(name: str, micro_batches: int = 1, devices: int = 1, stage: int = 0) -> Row:
    """Return a model of BATCHES as a run with train.py's defaults has it there: T=1024, bf16, our kernels."""
    batch = BATCHES[name]
    tokens = batch * 1024 * micro_batches * devices
    plan = plan_for(GPU, f"-e {name} -b {batch} -t 1024 -d {tokens} --devices {devices} -z {stage}")
    hardware = gpu(plan.machine.kind, plan.product_precision)
    return Row(plan, computes_of(list(times_of(plan, hardware)), plan, hardware)[TYPICAL], sent_by(plan))


def efficiency(one: float, seconds: float) -> float:
    """Return the time of an update on one GPU over that on several."""
    return one / seconds


# ----- as text --------------------------------------------------------------------------------------------------------


def rows(micro_batches: int) -> Iterator[str]:
    """Yield the table's lines for so many micro-batches of each GPU."""
    for name in BATCHES:
        one = row_of(name, micro_batches).seconds
        for stages in ((0,), (1, 2)) if micro_batches == 1 else ((0,), (1,), (2,)):
            for devices in DEVICES:
                yield line(name, row_of(name, micro_batches, devices, stages[0]), ", ".join(map(str, stages)), one)


def line(name: str, row: Row, stages: str, one: float) -> str:
    """Return a line. one: seconds of an update on one GPU."""
    shape, n = row.plan.shape, row.plan.parallel.devices
    known = {
        each.about: each.times * collective_seconds(each.kind, each.bytes, n, Network())
        for each in row.sent if each.about in ("wte", "weights")
    }  # fmt: skip
    tail = [f"{1e3 * known.get(about, 0):.1f}" for about in ("wte", "weights")]
    cells = [
        name, str(shape.batch), stages, str(n), f"{sent_by_each(row.sent, n) / 1e9:.2f}", f"{1e3 * row.computing:.1f}",
        f"{1e3 * row.sending:.1f}", f"{1e3 * (row.seconds - row.computing):.1f}", *tail,
        percent(efficiency(one, row.computing + row.sending)),
        percent(efficiency(one, row.seconds)), f"{row.plan.config.tokens_per_step / row.seconds / 1e6:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def sent_by_each(sent: list[Sent], devices: int) -> float:
    """Return the bytes that each GPU sends in an update."""
    rounds = {"all-reduce": 2}
    return sum(each.times * each.bytes * rounds.get(each.kind, 1) for each in sent) * (devices - 1) / devices


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def alone_table() -> str:
    """Return what one GPU does for one micro-batch of each model."""
    lines = ["| model | -b | TFLOP of products | ms | of the peak |", "|---|---:|---:|---:|---:|"]
    for name, batch in BATCHES.items():
        plan = row_of(name).plan
        step = step_time(plan)
        used = step.mfu("palm")
        flops = sum(each.flops for each in step.operations)
        lines.append(
            f"| {name} | {batch} | {flops / 1e12:.1f} | {1e3 * step.seconds.typical:.1f} | "
            f"{percent(used.typical) if used else ''} |"
        )
    return "\n".join(lines)


def page() -> str:
    """Return benchmarks/results/scaling.md."""
    method = (__doc__ or "").partition("scaling.md\n\n")[2].strip()
    head = (
        "| model | -b | stage | GPUs | GB sent | compute, ms | sending, ms | left, ms | wte, ms | weights, ms | "
        "without overlap | with | M tokens/s |\n|---|---:|---:|" + "---:|" * 10
    )
    parts = [
        "# A model of scaling: H100s, 8 to 512\n\n"
        "`python benchmarks/scaling.py`; arithmetic, the same on every machine. GPUs: NVIDIA H100 "
        "80GB HBM3, bf16, T=1024, -r 1.\n\n"
        f"{method}",
        "## One GPU alone, one micro-batch\n\nOf the peak: by PaLM's definition of a model's operations.\n\n"
        + alone_table(),
        "Columns below: GB that each GPU sends in an update; ms that it computes; ms that its collectives take; what "
        "of those is\nleft with overlap; of all of them wte's gradient and the gather of the weights; efficiency; "
        "millions of tokens\nin a second, with overlap.",
    ]
    for A in (1, 4):
        words = "One micro-batch" if A == 1 else f"{A} micro-batches"
        parts.append(f"## {words} of each GPU\n\n{head}\n" + "\n".join(rows(A)))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    RESULTS.write_text(page())
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
