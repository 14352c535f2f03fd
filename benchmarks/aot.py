"""Compiles every kernel and whole training steps for GPUs that are not there, and prints what the compiler says.

    python benchmarks/aot.py [h200 a100 …]          registers and spilled bytes of each kernel, memory of each step
    python benchmarks/aot.py --only layernorm       those cases alone
    python benchmarks/aot.py --write                all of it into tests/aot/table.json and benchmarks/results/aot.md

Needs a Python with JAX's CUDA plugin: `make test-aot` makes one for each supported JAX (.venv-aot-*), all with the same
assembler. One process per GPU, two at a time. Nothing runs on a GPU: the figures are the assembler's and XLA's, and the
same on every machine.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from llmc_jax.plan.plan import Plan

KEPT = ("kernels", "calls", "arguments", "aliased", "temporaries")  # in the table; the rest must be empty or equal
ASSEMBLER = "13.0.88"  # version of nvidia-cuda-nvcc: another one allocates registers in another way
TARGETS = ("h200", "a100", "rtx4090", "b200")
TABLE = ROOT / "tests/aot/table.json"
MADE_OF = ROOT / "tests/aot/made_of.json"  # the table
RESULTS = ROOT / "benchmarks/results/aot.md"
# What a kernel's row depends on, beside JAX, the assembler and the cases: the kernels, and how they are compiled.
SOURCES = ("pallas_kernels/*.py", "benchmarks/assembler.py", "benchmarks/hlo.py", "llmc_jax/machine/deviceless.py")

Row = dict[str, Any]  # what came out of a case: see `measure`
Rows = dict[str, dict[str, Row]]  # GPU -> case -> row
Table = dict[str, Rows]  # JAX version -> …
Sources = dict[str, dict[str, str]]  # JAX version -> GPU -> `sources_of` it when all its rows were measured


def problem() -> str:
    """Return why this Python cannot make or check the table, or nothing."""
    from llmc_jax.machine import deviceless

    try:
        found = importlib.metadata.version("nvidia-cuda-nvcc")
    except importlib.metadata.PackageNotFoundError:
        found = ""
    if deviceless.plugin_installed() and found == ASSEMBLER:
        return ""
    return f"needs JAX's CUDA plugin and nvidia-cuda-nvcc {ASSEMBLER}: make test-aot installs them"


def state_bytes(plan: "Plan") -> int:
    """Return the bytes of a run's state on each of its devices."""
    import jax

    from llmc_jax.plan.compiled import state_of
    from llmc_jax.training.parallel.stage import EVERYWHERE, SPLIT, state_specs

    leaves, devices = jax.tree.leaves(state_of(plan)), plan.parallel.devices
    specs = jax.tree.leaves(
        state_specs(state_of(plan), plan.parallel), is_leaf=lambda each: each in (SPLIT, EVERYWHERE)
    )
    return sum(
        leaf.size * leaf.dtype.itemsize // (devices if spec == SPLIT else 1)
        for leaf, spec in zip(leaves, specs, strict=True)
    )


def measure(target: str, only: str, output: Path) -> None:
    """Compiles the cases in this process; appends a line of JSON for each to output: its name, and what came out.

    Cases that output has already are left out. Run it once in a process.
    """
    from benchmarks import assembler
    from benchmarks.hlo import copied_arrays
    from tests.aot import cases

    done = dict(read_rows(output))
    for case in cases.compiled_for(target):
        if only not in case.name or case.name in done:
            continue
        began = time.monotonic()
        print(f"{target}: {case.name}", file=sys.stderr, flush=True)  # the last one, should the compiler abort
        try:
            with assembler.kernel_resources() as kernels:
                program = case.compile(target)
            row = {
                # A step's kernels may have been compiled before in this process, and are not compiled again.
                "kernels": [] if case.name.startswith("step ") else sorted({tuple(kernel[:3]) for kernel in kernels}),
                "serialized": sorted({kernel.name for kernel in kernels if kernel.serialized}),
                "calls": program.hlo.count('custom_call_target="mosaic_gpu'),
                "arguments": program.memory.arguments,
                "donated": case.donated_bytes,
                "aliased": program.memory.aliased,
                "temporaries": program.memory.temporaries,
                "copies": [name for name, _ in copied_arrays(program.hlo, cases.LARGE)],
            }
        except Exception as error:
            row = {"error": "".join(traceback.format_exception(error)[-3:])}
        print(f"{target}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        append_row(output, case.name, row)


def read_rows(output: Path) -> list[tuple[str, Row]]:
    return [tuple(json.loads(line)) for line in output.read_text().splitlines()] if output.exists() else []


def append_row(output: Path, name: str, row: Row) -> None:
    with output.open("a") as file:
        print(json.dumps([name, row]), file=file)


def measure_apart(target: str, only: str = "", log: bool = False) -> dict[str, Row]:
    """`measure` in a process of its own. An abort of the compiler is its case's error; another process does the rest.

    Raises RuntimeError with the last lines of the process if it ends before the first case. log: show what it prints.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--measure", str(output), "--only", only, target]
        while True:
            run = subprocess.run(
                command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True, check=False,
            )  # fmt: skip
            if log:
                sys.stderr.write(run.stderr)
            if run.returncode == 0:
                return dict(read_rows(output))
            aborted = -run.returncode in (signal.SIGABRT, signal.SIGSEGV)
            started = re.findall(rf"^{target}: (\w+\.\w+ .*|step .*)$", run.stderr, re.MULTILINE)[-1:]
            if not (aborted and started) or started[0] in dict(read_rows(output)):
                raise RuntimeError(run.stderr[-2000:])
            reasons = [line[:500] for line in run.stderr.splitlines() if re.search("ERROR|ptxas|Check failed", line)]
            append_row(output, started[0], {"error": "\n".join([f"exit status {run.returncode}", *reasons])})


def measure_all(targets: Iterable[str], only: str = "") -> Rows:
    """{GPU: {case: what came out}}, two processes at a time."""
    targets = tuple(targets)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(targets, pool.map(partial(measure_apart, only=only, log=True), targets), strict=True))


def sources_of(target: str) -> str:
    """Return a digest of what the kernels of a GPU are compiled from, and for."""
    from llmc_jax.base.files import digest_of_files
    from llmc_jax.machine import gpus
    from tests.aot import cases

    files = digest_of_files(path for pattern in SOURCES for path in ROOT.glob(pattern))
    parts = f"{files} {gpus.known_target(target)} {cases.cases(target)}"
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def kernels_unchanged(target: str) -> bool:
    """Return whether the committed table was made of these kernels: compiled again they would give the same rows."""
    import jax

    return read_sources().get(jax.__version__, {}).get(target) == sources_of(target)


def problems_of(name: str, row: Row) -> list[str]:
    """Return what no figure in the table may excuse."""
    wrong = {
        "no Mosaic kernel in the program": not row["calls"],
        "the assembler said nothing of a kernel": not (row["kernels"] or name.startswith("step ")),
        "wgmma instructions wait for each other": row["serialized"],
        "what is donated is not overwritten": row["aliased"] < row["donated"],
        f"copied: {row['copies']}": row["copies"],
    }
    return [words for words, is_so in wrong.items() if is_so]


def read_table() -> Table:
    """The committed table."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def read_sources() -> Sources:
    """What the committed table was made of."""
    return json.loads(MADE_OF.read_text()) if MADE_OF.exists() else {}


def write_table(table: Table) -> None:
    """Replaces the committed table and its readable rendering; a line per case, so that changes show."""
    parts = []
    for version, targets in sorted(table.items()):
        inner = []
        for target, rows in targets.items():
            lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
            inner.append(f"  {json.dumps(target)}: {{\n{lines}\n  }}")
        parts.append(f" {json.dumps(version)}: {{\n" + ",\n".join(inner) + "\n }")
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    RESULTS.write_text(render(table))


def write_measured(rows: Rows, complete: bool) -> None:
    """Puts what was measured into the table, among what it has of this JAX; cases that there are no more go.

    complete: rows are all cases of their GPUs. MADE_OF says of what they were made, where none has a problem.
    """
    import jax

    from tests.aot import cases

    table = read_table()
    version = table.setdefault(jax.__version__, {})
    for target, measured in rows.items():
        known = version.get(target, {}) | {name: {key: row[key] for key in KEPT} for name, row in measured.items()}
        names = [case.name for case in cases.compiled_for(target)]
        version[target] = {name: known[name] for name in names if name in known}
    table[jax.__version__] = {target: version[target] for target in TARGETS if target in version}
    if complete:
        sources = read_sources()
        sound = [target for target, measured in rows.items() if not any(starmap(problems_of, measured.items()))]
        sources.setdefault(jax.__version__, {}).update({target: sources_of(target) for target in sound})
        MADE_OF.write_text(json.dumps(sources, indent=1, sort_keys=True) + "\n")
    write_table(table)


def render(table: Table) -> str:
    """The table as Markdown: the newest JAX in full, of the others the cells that differ."""
    newest, *others = sorted(table, key=lambda version: [int(part) for part in version.split(".")], reverse=True)
    head = (
        "# What the compiler makes of the kernels\n\n"
        "`python benchmarks/aot.py --write`, once for each supported JAX; the figures do not depend on the machine and "
        "nothing\nwas run on a GPU (docs/kernels/proof.md). `make test-aot` fails where a kernel spills more.\n\n"
        "A cell holds the registers per thread of each kernel of the function, at most 255; `+12` are bytes per thread "
        "that\nwent to memory for want of registers.\n"
    )
    parts = [head, f"## JAX {newest}\n\n{kernel_table(table[newest], table[newest])}"]
    parts.append(f"## Memory of a training step, JAX {newest}\n\n{step_table(table[newest])}")
    for version in others:
        differing = kernel_table(table[version], table[newest], only_differing=True)
        parts.append(f"## JAX {version}, where it differs\n\n{differing}")
    return "\n".join(parts)


def cell(row: Row | None) -> str:
    if row is None or "error" in row:
        return "" if row is None else "error"
    return ", ".join(f"{registers}{f' **+{spilled}**' if spilled else ''}" for _, registers, spilled in row["kernels"])


def kernel_table(targets: Rows, beside: Rows, only_differing: bool = False) -> str:
    names = [
        name
        for name in dict.fromkeys(name for rows in targets.values() for name in rows)
        if not name.startswith("step ")
    ]
    lines = [f"| function | dtype | shape | {' | '.join(targets)} |\n|---|---|---|{'---|' * len(targets)}"]
    for name in names:
        cells = [cell(rows.get(name)) for rows in targets.values()]
        if only_differing and cells == [cell(beside.get(target, {}).get(name)) for target in targets]:
            continue
        function, dtype, shape = name.split(" ", 2)
        lines.append(f"| {function.partition('.')[2]} | {dtype} | {shape} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def step_table(targets: Rows) -> str:
    lines = [
        "Arguments are the state and the batch; all of the state is updated where it lies. MiB.\n\n"
        "| step | GPU | arguments | aliased | temporaries | calls of our kernels |\n|---|---|---|---|---|---|"
    ]
    for target, rows in targets.items():
        for name, row in rows.items():
            if name.startswith("step ") and "error" not in row:
                sizes = [f"{row[key] / 2**20:,.0f}" for key in ("arguments", "aliased", "temporaries")]
                lines.append(f"| {name.removeprefix('step ')} | {target} | {' | '.join(sizes)} | {row['calls']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="GPU", help=" ".join(TARGETS))
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument("--write", action="store_true", help="replace this JAX's part of the table")
    parser.add_argument("--measure", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.targets[0], options.only, options.measure)
        return
    if options.write and problem():
        parser.exit(2, f"--write {problem()}\n")
    rows = measure_all(options.targets, options.only)
    errors = [(gpu, name, row["error"]) for gpu, cases in rows.items() for name, row in cases.items() if "error" in row]
    for gpu, name, error in errors:
        print(f"{gpu}: {name}\n{error}", file=sys.stderr)
    if options.write and not errors:
        write_measured(rows, complete=not options.only)
    print(kernel_table(rows, rows) + "\n" + step_table(rows))
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
