"""A model of how training scales over many H100s: what is computed, what is sent, and how much of that is hidden.

    python benchmarks/scaling.py            the table, into results/scaling.md

Nothing is measured, and no two GPUs have run this yet. Every GPU has the same micro-batch however many there are (weak
scaling), and efficiency is the time of an update on one GPU over that on n.

- Compute is the floor of each operation by benchmarks/roofline.py, with its shares of the peak: products at 70 %,
  attention at 35 and 28 %, bandwidth at 90 %. The optimizer's is divided by n where its state is split, which one GPU
  alone cannot do: so an efficiency may exceed 100 %.
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
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import roofline  # noqa: E402
from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.machine.gpus import GPUS, card_memory_bytes  # noqa: E402
from llmc_jax.models.gpt2.memory import chosen_logit_rows  # noqa: E402
from llmc_jax.models.gpt2.work import Shape, Work, flops_per_token, step_work  # noqa: E402
from llmc_jax.training.parallel.stage import Parallel  # noqa: E402
from llmc_jax.training.parallel.traffic import Sent, of_update  # noqa: E402

RESULTS = ROOT / "benchmarks/results/scaling.md"
GPU = "NVIDIA H100 80GB HBM3"
BATCHES = {"d12": 64, "d24": 32, "d36": 16, "d48": 8}  # -b of each GPU
DEVICES = (8, 64, 512)
AFTER = ("norm", "weights")  # what is sent when the gradients are summed


class Network(NamedTuple):
    """How fast GPUs send. Bytes per second and GPU in one direction; seconds."""

    node: int = 8  # GPUs that NVLink joins
    inside: float = 450e9
    between: float = 50e9
    reached: float = 0.8  # of both
    hop_inside: float = 1e-6
    hop_between: float = 5e-6
    start: float = 10e-6


class Compute(NamedTuple):
    """Seconds that one GPU computes."""

    before: float  # of each micro-batch, until the backward reaches the last layer
    layers: tuple[float, ...]  # backward, from the last layer to the first
    end: float  # of the backward: the embedding
    update: float

    @property
    def micro_batch(self) -> float:
        return self.before + sum(self.layers) + self.end


class Step(NamedTuple):
    """An update of one GPU among n. Seconds."""

    compute: float
    sending: float  # of all collectives, if nothing else happened
    alone: float  # the update without overlap
    overlapped: float  # with it

    @property
    def left(self) -> float:
        """Return what of sending is not hidden."""
        return self.overlapped - self.compute


# ----- computing ------------------------------------------------------------------------------------------------------


def shape_on(gpu: str, model: ModelConfig, batch: int, micro_batches: int) -> Shape:
    """Return the shape of a step on one GPU as a run there has it: T=1024, bf16, our kernels."""
    shape = Shape(batch, 1024, micro_batches, dtype="bf16", flash=True)
    return shape._replace(logit_rows=chosen_logit_rows(model, shape, card_memory_bytes(gpu)))


def compute_of(model: ModelConfig, shape: Shape, gpu: str, parallel: Parallel) -> Compute:
    """Return the seconds that one of the GPUs computes, by the floors of its operations."""
    rates, A = roofline.estimated(gpu, shape.dtype), shape.micro_batches

    def seconds(chosen: Callable[[Work], bool]) -> float:
        works = [work for work in step_work(model, shape) if chosen(work)]
        return sum(line.floor for line in roofline.lines(works, rates, {}))

    def last(work: Work) -> bool:
        return work.phase == "backward" and work.operation in ("embedding", "gradient")

    def before(work: Work) -> bool:
        return work.phase == "forward" or (work.phase == "backward" and work.layer is None and not last(work))

    layer = seconds(lambda work: work.phase == "backward" and work.layer == 0) / A
    return Compute(
        before=seconds(before) / A,
        layers=(layer,) * model.num_layers,
        end=seconds(last) / A,
        update=seconds(lambda work: work.phase == "update") / (parallel.devices if parallel.splits else 1),
    )


# ----- sending --------------------------------------------------------------------------------------------------------


def collective_seconds(kind: str, size: int, devices: int, network: Network) -> float:
    """Return how long a collective of an array of `size` bytes takes, hierarchical: a ring in nodes, then of nodes."""
    if devices == 1:
        return 0.0
    inside = min(devices, network.node)
    nodes = math.ceil(devices / inside)
    ring = size * (inside - 1) / inside / (network.reached * network.inside) + (inside - 1) * network.hop_inside
    ring += size / inside * (nodes - 1) / nodes / (network.reached * network.between)
    ring += (nodes - 1) * network.hop_between
    return network.start + ring * (2 if kind == "all-reduce" else 1)


def sent_by_each(sent: Sequence[Sent], devices: int) -> float:
    """Return the bytes that each GPU sends in an update."""
    rounds = {"all-reduce": 2}
    return sum(each.times * each.bytes * rounds.get(each.kind, 1) for each in sent) * (devices - 1) / devices


# ----- an update ------------------------------------------------------------------------------------------------------


def micro_batch_seconds(compute: Compute, sent: Sequence[Sent], seconds: Callable[[Sent], float]) -> float:
    """Return how long a micro-batch takes whose gradients are sent, one after the other, while it goes on."""
    ready, clock = {"loss": compute.before}, compute.before
    for layer, each in zip(reversed(range(len(compute.layers))), compute.layers, strict=True):
        clock += each
        ready[f"layer {layer}"] = clock
    clock += compute.end
    free = 0.0  # when the last collective is done
    for one in sent:
        free = max(free, ready.get(one.about, clock)) + seconds(one)
    return max(clock, free)


def step_of(
    compute: Compute, sent: Sequence[Sent], devices: int, micro_batches: int = 1, network: Network | None = None
) -> Step:
    """Return how long an update takes on each of some GPUs."""
    known = network or Network()

    def seconds(each: Sent) -> float:
        return collective_seconds(each.kind, each.bytes, devices, known)

    computing = micro_batches * compute.micro_batch + compute.update
    sending = sum(each.times * seconds(each) for each in sent)
    beside = [each for each in sent if each.times == micro_batches and each.about not in AFTER]
    alone = sum(each.times * seconds(each) for each in sent if each not in beside)
    overlapped = micro_batches * micro_batch_seconds(compute, beside, seconds) + alone + compute.update
    return Step(computing, sending, computing + sending, overlapped)


def efficiency(one: float, seconds: float) -> float:
    """Return the time of an update on one GPU over that on several."""
    return one / seconds


# ----- as text --------------------------------------------------------------------------------------------------------


def rows(micro_batches: int) -> Iterator[str]:
    """Yield the table's lines for so many micro-batches of each GPU."""
    for name, batch in BATCHES.items():
        model = parse_descriptor(name)
        shape = shape_on(GPU, model, batch, micro_batches)
        one = step_of(compute_of(model, shape, GPU, Parallel()), [], 1, micro_batches).overlapped
        for stages in ((0,), (1, 2)) if micro_batches == 1 else ((0,), (1,), (2,)):
            for devices in DEVICES:
                yield row(name, model, shape, Parallel(devices, stages[0]), ", ".join(map(str, stages)), one)


def row(name: str, model: ModelConfig, shape: Shape, parallel: Parallel, stages: str, one: float) -> str:
    """Return a line. one: seconds of an update on one GPU."""
    n, A = parallel.devices, shape.micro_batches
    sent = of_update(model, parallel, A, shape.element)
    step = step_of(compute_of(model, shape, GPU, parallel), sent, n, A)
    known = {
        each.about: each.times * collective_seconds(each.kind, each.bytes, n, Network())
        for each in sent if each.about in ("wte", "weights")
    }  # fmt: skip
    tail = [f"{1e3 * known.get(about, 0):.1f}" for about in ("wte", "weights")]
    cells = [
        name, str(shape.batch), stages, str(n), f"{sent_by_each(sent, n) / 1e9:.2f}", f"{1e3 * step.compute:.1f}",
        f"{1e3 * step.sending:.1f}", f"{1e3 * step.left:.1f}", *tail, percent(efficiency(one, step.alone)),
        percent(efficiency(one, step.overlapped)), f"{n * A * shape.rows / step.overlapped / 1e6:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def alone_table() -> str:
    """Return what one GPU does for one micro-batch of each model."""
    lines = ["| model | -b | TFLOP of products | ms | of the peak |", "|---|---:|---:|---:|---:|"]
    for name, batch in BATCHES.items():
        model = parse_descriptor(name)
        shape = shape_on(GPU, model, batch, 1)
        flops = sum(work.flops for work in step_work(model, shape))
        seconds = step_of(compute_of(model, shape, GPU, Parallel()), [], 1).compute
        used = flops_per_token(model, 1024, definition="palm") * shape.rows / seconds / (1e12 * (GPUS[GPU].bf16 or 0))
        lines.append(f"| {name} | {batch} | {flops / 1e12:.1f} | {1e3 * seconds:.1f} | {percent(used)} |")
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
        f"`python benchmarks/scaling.py`; arithmetic, the same on every machine. GPUs: {GPU}, bf16, T=1024, -r 1.\n\n"
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
