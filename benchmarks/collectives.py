"""What a training step sends from GPU to GPU, and what each GPU computes meanwhile, for GPUs that are not there.

    python benchmarks/collectives.py -e d12 -b 64 --devices 8 -z 1      one step, as train.py's flags have it
    python benchmarks/collectives.py --gpu a100 …                       on other GPUs

Needs a Python with JAX's CUDA plugin (`make test-aot` makes one). The step is compiled as train.py does it on GPUs of
one machine. Nothing runs. How long a collective takes is not known here, only what is scheduled between its start and
its done, and so may run at the same time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.aot import state_bytes  # noqa: E402
from benchmarks.hlo import copied_arrays  # noqa: E402
from benchmarks.sent import Collective, collectives, sent_bytes  # noqa: E402
from llmc_jax.base import plain  # noqa: E402
from llmc_jax.base.errors import InputError  # noqa: E402
from llmc_jax.machine import compiling, gpus  # noqa: E402
from llmc_jax.machine.deviceless import MemoryUse  # noqa: E402
from llmc_jax.plan import compiled  # noqa: E402
from llmc_jax.plan.plan import Plan  # noqa: E402
from llmc_jax.training.parallel.traffic import Sent, of_update  # noqa: E402

LARGE = 1_000_000  # bytes: copies below are not worth a look


class Case(NamedTuple):
    """A step to compile."""

    flags: str  # of train.py
    overlap: bool = True  # False: without XLA's options for several devices


class Measured(NamedTuple):
    """What the compiler says of a step on one of its GPUs."""

    memory: MemoryUse
    state: int  # bytes
    needed: int  # bytes, by models/memory.py: at least
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
    accumulation, matrices = plan.config.grad_accumulation, bool(plan.shape.products)
    return of_update(plan.model, plan.parallel, accumulation, plan.shape.element, matrices)


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


def table(found: Measured) -> str:
    """Return a step's collectives, one a row, those of every micro-batch before those of the update."""
    rows = [
        f"| {each.kind} | {' '.join(each.scopes)} | {each.times} | {each.bytes / 1e6:,.3f} "
        f"| {sent_bytes(each) / 1e6:,.3f} | {'yes' if each.asynchronous else 'no'} | {len(each.between)} "
        f"| {each.products} |"
        for each in sorted(found.collectives, key=lambda each: -each.times)
    ]
    head = "| kind | scope | times | MB | MB sent | asynchronous | operations beside | products |"
    return "\n".join([head, "|---|---|---:|---:|---:|---|---:|---:|", *rows])


def summary(found: Measured) -> str:
    """Return in one line what a step sends, and how much of it while nothing is computed."""
    sent = sum(each.times * sent_bytes(each) for each in found.collectives)
    alone = sum(each.times * sent_bytes(each) for each in found.collectives if not each.products)
    return (
        f"Each GPU sends {sent / 1e6:,.1f} MB in an update, {alone / 1e6:,.1f} MB of it with no matrix product beside. "
        f"Copied whole: {', '.join(found.copies) or 'nothing'}."
    )


# ----- the command --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(gpus.TARGETS)} (default h200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep what was found there")
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    cases = [Case(*each) for each in json.loads(options.cases)] if options.cases else [Case(" ".join(rest))]
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
