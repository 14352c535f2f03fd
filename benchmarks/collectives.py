"""What a training step sends from GPU to GPU, and what each GPU computes meanwhile, for GPUs that are not there.

    python benchmarks/collectives.py -e d12 -b 64 --devices 8 -z 1      one step, as train.py's flags have it
    python benchmarks/collectives.py --gpu a100 …                       on other GPUs
    python benchmarks/collectives.py --write                            every step of CASES into results/collectives.md

Needs a Python with JAX's CUDA plugin (`make test-aot` makes one). The step is compiled as train.py does it on GPUs of
one machine. Nothing runs. How long a collective takes is not known here, only what is scheduled between its start and
its done, and so may run at the same time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.aot import state_bytes  # noqa: E402
from benchmarks.heading import machine_line  # noqa: E402
from benchmarks.hlo import copied_arrays  # noqa: E402
from benchmarks.sent import Collective, collectives, sent_bytes  # noqa: E402
from llmc_jax.base import plain  # noqa: E402
from llmc_jax.base.errors import InputError  # noqa: E402
from llmc_jax.machine import compiling, gpus  # noqa: E402
from llmc_jax.machine.deviceless import MemoryUse  # noqa: E402
from llmc_jax.plan import compiled  # noqa: E402
from llmc_jax.plan.plan import Plan  # noqa: E402
from llmc_jax.training.parallel.traffic import Sent, of_update  # noqa: E402

RESULTS = ROOT / "benchmarks/results/collectives.md"
STEP = "-e d12 -b 64 --devices 8"
CASES = tuple(f"{STEP} {more}" for more in ("-z 0", "-z 1", "-z 2", "-z 1 -d 2097152", "-z 2 -d 2097152"))
GPUS = ("h200", "a100")
OUTSIDE = ("embedding", "lnf", "head", "classifier", "gradient", "reduce", "norm", "adamw", "gather")  # named scopes
LARGE = 1_000_000  # bytes: copies below are not worth a look


class Case(NamedTuple):
    """A step to compile."""

    flags: str  # of train.py
    overlap: bool = True  # False: without XLA's options for several devices


class Measured(NamedTuple):
    """What the compiler says of a step on one of its GPUs."""

    memory: MemoryUse
    state: int  # bytes
    needed: int  # bytes, by models/gpt2/memory.py: at least
    logit_rows: int
    copies: tuple[str, ...]  # arrays of at least LARGE bytes that are copied whole
    collectives: tuple[Collective, ...]
    sent: tuple[Sent, ...]  # the same by training/parallel/traffic.py; none of sums in a fixed order


# ----- compiling ----------------------------------------------------------------------------------------------------


def measure(gpu: str, case: Case) -> Measured:
    """Compile a step in this process, which can do so for one kind of GPU. Raises InputError."""
    plan = compiled.plan_for(gpu, case.flags)
    options = plan.execution.compiler_options
    program = compiled.compile_step(plan, gpu, options if case.overlap else compiling.of_one_device(options))
    return Measured(
        memory=program.memory,
        state=state_bytes(plan),
        needed=plan.needed.total,
        logit_rows=plan.execution.logit_rows,
        copies=tuple(name for name, _ in copied_arrays(program.hlo, LARGE)),
        collectives=tuple(collectives(program.hlo)),
        sent=() if plan.parallel.fixed else tuple(sent_of(plan)),
    )


def sent_of(plan: Plan) -> list[Sent]:
    """Return what the devices of a plan send each other in an update."""
    return of_update(plan.model, plan.parallel, plan.config.grad_accumulation, plan.shape.element)


def measure_apart(gpu: str, cases: Sequence[Case]) -> list[Measured]:
    """Compile steps in a process of their own, one after the other: kernels that they share are compiled once.

    Raises RuntimeError with the last lines of the process if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        command = [sys.executable, __file__, "--gpu", gpu, "--json", str(output), "--cases", json.dumps(cases)]
        run = subprocess.run(
            command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            raise RuntimeError(run.stderr[-2000:])
        return [plain.from_json(Measured, each) for each in json.loads(output.read_text())]


# ----- as text ------------------------------------------------------------------------------------------------------


def beside(collective: Collective) -> str:
    """Return what is computed between a collective's start and its done, in words."""
    if not collective.asynchronous:
        return "nothing: the GPU waits for it"
    scopes = [operation.scope for operation in collective.between]
    layers = sorted({int(match[1]) for scope in scopes if (match := re.search(r"layer_(\d+)", scope))})
    words = [f"layers {layers[-1]} to {layers[0]}" if len(layers) > 1 else f"layer {layers[0]}"] if layers else []
    outside = {part for scope in scopes if "layer_" not in scope for part in scope.split("/")}
    return ", ".join([*words, *(name for name in OUTSIDE if name in outside)])


def about(collective: Collective, sent: Sequence[Sent]) -> str:
    """Return what a collective sends: by its named scope, or by its bytes."""
    scopes = " ".join(collective.scopes)
    if layers := re.findall(r"layer_(\d+)", scopes):
        return ", ".join(f"layer {int(layer)}" for layer in layers)
    names = [each.about for each in sent if (each.kind, each.bytes) == (collective.kind, collective.bytes)]
    name = names[0] if names else ""
    return "norm" if "norm" in scopes else "a layer" if name.startswith("layer") else name


def table(found: Measured) -> str:
    """Return a Markdown table of a step's collectives, one a row: those of every micro-batch, then those of the update.

    The program's own order is kept in each.
    """
    head = (
        "| kind | of | times | MB | MB sent | asynchronous | operations | products | between start and done |\n"
        "|---|---|---:|---:|---:|---|---:|---:|---|"
    )
    rows = [
        f"| {each.kind} | {about(each, found.sent)} | {each.times} | {each.bytes / 1e6:,.3f} "
        f"| {sent_bytes(each) / 1e6:,.3f} | {'yes' if each.asynchronous else 'no'} | {len(each.between)} "
        f"| {each.products} | {beside(each)} |"
        for each in sorted(found.collectives, key=lambda each: -each.times)
    ]
    return "\n".join([head, *rows])


def summary(found: Measured) -> str:
    """Return in one line what a step sends, and how much of it while nothing is computed."""
    sent = sum(each.times * sent_bytes(each) for each in found.collectives)
    alone = sum(each.times * sent_bytes(each) for each in found.collectives if not each.products)
    copies = ", ".join(f"{times} arrays {shape}" for shape, times in Counter(found.copies).items())
    return (
        f"Each GPU sends {sent / 1e6:,.1f} MB in an update, {alone / 1e6:,.1f} MB of it with no matrix product beside. "
        f"Copied whole: {copies or 'nothing'}."
    )


def page(found: dict[tuple[str, str], Measured]) -> str:
    """Return benchmarks/results/collectives.md of the steps by GPU and flags."""
    parts = [
        "# What a step sends from GPU to GPU\n\n"
        f"`python benchmarks/collectives.py --write`; {machine_line()}.\nPrograms for 8 GPUs of one "
        "machine, compiled without any; nothing was run.\n\n"
        "MB is the whole array that a collective is about, as it is on one GPU; MB sent is what each GPU sends of it "
        "in a ring.\nAn asynchronous collective has a start and a done, and the operations between them may run at the "
        "same time; a row\nwith products has matrix products among them. Collectives take turns on one stream, so the "
        "later ones of a backward\nwait for the earlier. With one micro-batch `-z 2` sends what `-z 1` does, but a "
        "layer waits for what the layer but one\nabove it sends."
    ]
    for (gpu, flags), each in found.items():
        parts.append(f"## {gpus.known_target(gpu).device_kind}: `{flags}`\n\n{summary(each)}\n\n"
                     f"{table(each)}")  # fmt: skip
    return "\n\n".join(parts) + "\n"


# ----- the command --------------------------------------------------------------------------------------------------


def measure_all(cases: Sequence[str] = CASES) -> dict[tuple[str, str], Measured]:
    """Compile steps for each of GPUS, two processes at a time."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda gpu: measure_apart(gpu, [Case(flags) for flags in cases]), GPUS)
        return {
            (gpu, flags): each for gpu, row in zip(GPUS, found, strict=True)
            for flags, each in zip(cases, row, strict=True)
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(gpus.TARGETS)} (default h200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was found there")
    parser.add_argument("--write", action="store_true", help=f"all of CASES, into {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.write:
        RESULTS.write_text(page(measure_all()))
        return
    cases = [Case(*each) for each in json.loads(options.cases)] if options.cases else [Case(" ".join(rest) or CASES[0])]
    try:
        found = [measure(options.gpu, case) for case in cases]
    except InputError as error:
        parser.exit(2, f"collectives.py: {error}\n")
    if options.json:
        options.json.write_text(json.dumps(plain.to_json(found)))
    for case, each in zip(cases, found, strict=True):
        print(f"{options.gpu} {case.flags}: {summary(each)}\n\n{table(each)}\n")


if __name__ == "__main__":
    main()
