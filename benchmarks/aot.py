"""Compiles every kernel and whole training steps for GPUs that are not there, and prints what the compiler says.

    python benchmarks/aot.py [h200 a100 …]          registers and spilled bytes of each kernel, memory of each step
    python benchmarks/aot.py --only layernorm       those cases alone
    python benchmarks/aot.py --write                all of it into tests/aot/table.json and benchmarks/results/aot.md

Needs a Python with JAX's CUDA plugin: `make test-aot` makes one for each supported JAX (.venv-aot-*). One process per
GPU, two at a time. Nothing runs on a GPU: the figures are the assembler's and XLA's, and the same on every machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TARGETS = ("h200", "a100", "rtx4090", "b200")
TABLE = ROOT / "tests/aot/table.json"
RESULTS = ROOT / "benchmarks/results/aot.md"

# JAX version -> GPU -> case -> what `measure` returns
Table = dict[str, dict[str, dict[str, dict[str, Any]]]]


def measure(target: str, only: str, output: Path) -> None:
    """Compiles the cases in this process and writes {case: what came out, or the error} as JSON; once in a process."""
    from llmc_jax import deviceless
    from tests.aot import cases

    rows = {}
    for case in cases.compiled_for(target):
        if only not in case.name:
            continue
        print(f"{target}: {case.name}", file=sys.stderr, flush=True)  # the last one, should the compiler abort
        try:
            with deviceless.kernel_resources() as kernels:
                program = case.compile(target)
        except Exception as error:
            rows[case.name] = {"error": "".join(traceback.format_exception(error)[-3:])}
            continue
        rows[case.name] = {
            "kernels": sorted({tuple(kernel) for kernel in kernels}),
            "arguments": program.memory.arguments,
            "donated": case.donated_bytes,
            "aliased": program.memory.aliased,
            "temporaries": program.memory.temporaries,
            "copies": program.copies(least=cases.LARGE),
        }
    output.write_text(json.dumps(rows))


def measure_apart(target: str, only: str = "") -> dict[str, dict[str, Any]]:
    """`measure` in a process of its own. Raises RuntimeError with the last lines it printed if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--measure", str(output), "--only", only, target]
        run = subprocess.run(
            command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
        )
        if run.returncode:
            lines = [line[:500] for line in run.stderr.splitlines()]
            last = [line for line in lines if line.startswith(f"{target}: ")][-1:]
            raise RuntimeError("\n".join([f"exit status {run.returncode} after", *last, "…", *lines[-20:]]))
        return json.loads(output.read_text())


def measure_all(targets: Iterable[str], only: str = "") -> dict[str, dict[str, dict[str, Any]]]:
    """{GPU: {case: what came out}}, two processes at a time."""
    targets = tuple(targets)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(targets, pool.map(partial(measure_apart, only=only), targets), strict=True))


def read_table() -> Table:
    """The committed table."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


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


def render(table: Table) -> str:
    """The table as Markdown: the newest JAX in full, of the others the cells that differ."""
    newest, *others = sorted(table, key=lambda version: [int(part) for part in version.split(".")], reverse=True)
    head = (
        "# What the compiler makes of the kernels\n\n"
        "`python benchmarks/aot.py --write`, once for each supported JAX; the figures do not depend on the machine and "
        "nothing\nwas run on a GPU (docs/kernels/proof.md). `make test-aot` compiles all of it again and fails where a "
        "kernel spills more.\n\nA cell holds the registers per thread of each kernel of the function, at most 255; "
        "`+12` are bytes per thread that\nwent to memory for want of registers.\n"
    )
    parts = [head, f"## JAX {newest}\n\n{kernel_table(table[newest], table[newest])}"]
    parts.append(f"## Memory of a training step, JAX {newest}\n\n{step_table(table[newest])}")
    for version in others:
        differing = kernel_table(table[version], table[newest], only_differing=True)
        parts.append(f"## JAX {version}, where it differs\n\n{differing}")
    return "\n".join(parts)


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "error"
    return ", ".join(f"{registers}{f' **+{spilled}**' if spilled else ''}" for _, registers, spilled in row["kernels"])


def kernel_table(
    targets: dict[str, dict[str, Any]], beside: dict[str, dict[str, Any]], only_differing: bool = False
) -> str:
    names = [name for name in dict.fromkeys(name for rows in targets.values() for name in rows) if "step " not in name]
    lines = [f"| function | dtype | shape | {' | '.join(targets)} |\n|---|---|---|{'---|' * len(targets)}"]
    for name in names:
        cells = [cell(rows.get(name)) for rows in targets.values()]
        if only_differing and cells == [cell(beside.get(target, {}).get(name)) for target in targets]:
            continue
        function, dtype, shape = name.split(" ", 2)
        lines.append(f"| {function.partition('.')[2]} | {dtype} | {shape} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def step_table(targets: dict[str, dict[str, Any]]) -> str:
    lines = [
        "Arguments are the state and the batch; all of the state is updated where it lies. MiB of one GPU.\n\n"
        "| step | GPU | arguments | aliased | temporaries | kernels that spill |\n|---|---|---|---|---|---|"
    ]
    for target, rows in targets.items():
        for name, row in rows.items():
            if name.startswith("step "):
                sizes = [f"{row[key] / 2**20:,.0f}" for key in ("arguments", "aliased", "temporaries")]
                spilling = sum(spilled > 0 for _, _, spilled in row["kernels"])
                lines.append(f"| {name.removeprefix('step ')} | {target} | {' | '.join(sizes)} | {spilling} |")
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
    rows = measure_all(options.targets, options.only)
    errors = [(gpu, name, row["error"]) for gpu, cases in rows.items() for name, row in cases.items() if "error" in row]
    for gpu, name, error in errors:
        print(f"{gpu}: {name}\n{error}", file=sys.stderr)
    if options.write and not errors:
        import jax

        table = read_table()
        version = table.setdefault(jax.__version__, {})
        for target, measured in rows.items():  # --only replaces what it measured
            version[target] = {**version.get(target, {}), **measured} if options.only else measured
        write_table(table)
    print(kernel_table(rows, rows) + "\n" + step_table(rows))
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
