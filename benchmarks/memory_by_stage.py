"""The memory of one of 8 GPUs that are not there, by stage of ZeRO, and the largest -b that fits.

    python benchmarks/memory_by_stage.py                      both GPUs, into results/memory_by_stage.md
    python benchmarks/memory_by_stage.py --gpu a100 --json F  one of them, as JSON, of which --from F… makes the page

Needs a Python with JAX's CUDA plugin (`make test-aot` makes one); takes half an hour on two cores.

- Every step has 4 micro-batches, so that the stages differ in what they keep of the gradient: with one micro-batch,
  `-z 1` splits it at once too. T=1024, bf16, master weights, -r 1.
- State and temporaries are the compiler's. What fits is 92 % of the card, which JAX's allocator is given.
- GPT-2 124M (d12) is compiled as it is. GPT-2 1558M (d48) takes minutes: what is tried is extrapolated in the layers
  from 2 and 4 of them, and so are its temporaries at -b 16 (marked ~). The largest is then compiled whole (without ~).
- The largest -b is a multiple of 8 (d12) or 2 (d48), found by trying: the first try is made by the lower bound of
  models/gpt2/memory.py, the next ones by how far the compiler was above it. What is shown was tried, and fitted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.aot import state_bytes  # noqa: E402
from benchmarks.heading import machine_line  # noqa: E402
from llmc_jax.base import plain  # noqa: E402
from llmc_jax.machine import gpus  # noqa: E402
from llmc_jax.machine.jax_setup import MEMORY_SHARE  # noqa: E402
from llmc_jax.plan import compiled  # noqa: E402
from llmc_jax.plan.plan import Plan  # noqa: E402

RESULTS = ROOT / "benchmarks/results/memory_by_stage.md"
GPUS, DEVICES, A = ("h200", "a100"), 8, 4
TRIES = 3  # compiled sizes beside the first
FEWER = (2, 4)  # layers that are compiled of a model of many


class Model(NamedTuple):
    """A model of the table."""

    name: str
    layers: int
    shape: str  # of its widths
    batch: int  # the first that is compiled, for every GPU
    step: int  # the largest -b is a multiple of it
    whole: bool  # compiled as it is


MODELS = (
    Model("d12", 12, "NH12-C768", 64, 8, True),
    Model("d48", 48, "NH25-C1600", 16, 2, False),
)


class Size(NamedTuple):
    """Bytes on one GPU of a step with so many sequences."""

    batch: int
    state: int
    temporaries: int
    needed: int  # at least, by models/gpt2/memory.py
    whole: bool = True  # False: extrapolated in the layers

    @property
    def total(self) -> int:
        return self.state + self.temporaries


class Row(NamedTuple):
    """A line of the table."""

    gpu: str
    model: str
    stage: int
    first: Size  # of the model's own `batch`
    largest: Size


# ----- compiling ----------------------------------------------------------------------------------------------------


def plan_of(gpu: str, shape: str, stage: int, batch: int, logit_rows: int = -1) -> Plan:
    """Return the plan of a step of the table. logit_rows: -1 for those that the plan chooses."""
    tokens = A * DEVICES * batch * 1024
    return compiled.plan_for(
        gpu, f"-e {shape} -b {batch} --devices {DEVICES} -z {stage} -d {tokens} --logit-rows {logit_rows}"
    )


def size_of(gpu: str, model: Model, stage: int, batch: int) -> Size:
    """Compile a step, or twice some of its layers; return what it takes."""
    plan = plan_of(gpu, model.name, stage, batch)

    def temporaries(layers: int) -> int:
        shape = f"L{layers}-{model.shape}"
        part = plan if model.whole else plan_of(gpu, shape, stage, batch, plan.execution.logit_rows)
        return compiled.compile_step(part, gpu).memory.temporaries

    if model.whole:
        found = temporaries(model.layers)
    else:
        few, more = (temporaries(layers) for layers in FEWER)
        found = few + (more - few) * (model.layers - FEWER[0]) // (FEWER[1] - FEWER[0])
    size = Size(batch, state_bytes(plan), found, plan.needed.total, model.whole)
    print(f"{gpu} {model.name} -z {stage}: {size}", file=sys.stderr, flush=True)
    return size


# ----- the largest that fits ------------------------------------------------------------------------------------------


def largest(first: Size, size_at: Callable[[int], Size], needed: Callable[[int], int], budget: int, step: int) -> Size:
    """Return the size of the largest batch that was tried and fits into `budget` bytes.

    first: one that is known. needed: the lower bound of a batch. The next to be tried is the largest that would fit if
    the compiler were as far above the bound as last time.
    """
    last, tried = first, [first]
    for _ in range(TRIES):
        over = last.total / last.needed
        batch = next(n for n in range(step, 10**6, step) if over * needed(n + step) > budget)
        if any(batch == each.batch for each in tried):
            break
        last = size_at(batch)
        tried.append(last)
    return max((each for each in tried if each.total <= budget), key=lambda each: each.batch)


def rows_of(gpu: str) -> list[Row]:
    """Return the table's lines of one GPU: one in a process."""
    budget, found = int(MEMORY_SHARE * 1e9 * gpus.known_target(gpu).gpu.memory), []
    for model in MODELS:
        for stage in (0, 1, 2):

            @cache
            def needed(batch: int, model: Model = model, stage: int = stage) -> int:
                return plan_of(gpu, model.name, stage, batch).needed.total

            def size_at(batch: int, model: Model = model, stage: int = stage) -> Size:
                return size_of(gpu, model, stage, batch)

            first = size_at(model.batch)
            most = largest(first, size_at, needed, budget, model.step)
            found.append(Row(gpu, model.name, stage, first, confirmed(gpu, model, stage, most, budget)))
    return found


def confirmed(gpu: str, model: Model, stage: int, found: Size, budget: int) -> Size:
    """Return the size of the largest batch compiled whole, where it was extrapolated; of a smaller one if need be."""
    if model.whole:
        return found
    whole = model._replace(whole=True)
    batches = range(found.batch, 0, -model.step)
    return next(size for batch in batches if (size := size_of(gpu, whole, stage, batch)).total <= budget)


# ----- as text ------------------------------------------------------------------------------------------------------


def gb(size: int) -> str:
    return f"{size / 1e9:.2f}"


def mark(size: Size) -> str:
    return "" if size.whole else "~"


def page(rows: Iterable[Row]) -> str:
    """Return benchmarks/results/memory_by_stage.md."""
    method = (__doc__ or "").partition("cores.\n\n")[2].strip()
    head = (
        "| GPU | model | stage | state | temporaries at -b | at least | compiler / least | largest -b | temporaries | "
        "all | at least |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    lines = [
        f"| {gpus.known_target(gpu).device_kind} | {model} | {stage} | {gb(first.state)} | {mark(first)}"
        f"{gb(first.temporaries)} at {first.batch} | {gb(first.needed)} | {first.total / first.needed:.2f} | "
        f"{most.batch} | {mark(most)}{gb(most.temporaries)} | {gb(most.total)} | {gb(most.needed)} |"
        for gpu, model, stage, first, most in rows
    ]
    return (
        "# Memory of one of 8 GPUs by stage\n\n"
        f"`python benchmarks/memory_by_stage.py`; {machine_line()}.\nNothing was run on a GPU: programs are compiled. "
        f"GB are 10^9 bytes, on each GPU.\n\n{method}\n\n{head}\n" + "\n".join(lines) + "\n"
    )


# ----- the command --------------------------------------------------------------------------------------------------


def rows_apart(gpu: str) -> list[Row]:
    """`rows_of` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--gpu", gpu, "--json", str(output)]
        subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True)
        return read(output)


def read(path: Path) -> list[Row]:
    return [plain.from_json(Row, each) for each in json.loads(path.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, help="that one alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep its lines there")
    parser.add_argument("--from", type=Path, nargs="*", dest="kept", metavar="FILE", help="make the page of these")
    options = parser.parse_args()
    if options.gpu:
        rows = rows_of(options.gpu)
        if options.json:
            options.json.write_text(json.dumps(plain.to_json(rows)))
        print(page(rows))
        return
    if options.kept:
        found = [read(path) for path in options.kept]
    else:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(rows_apart, GPUS))
    RESULTS.write_text(page(row for rows in found for row in rows))


if __name__ == "__main__":
    main()
