"""What compute-sanitizer finds in a kernel: accesses to shared memory that do not wait for each other."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmc_jax.trials.children import Figures, NotMeasured

TOOL = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")  # where it is if not on PATH
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
# What `run` prints: the tool sums up a program that raised as well, and does not tell why.
FINISHED, NOT_HERE = "all calls returned", "not measured: "
REFUSED = re.compile(r"not supported|failed to initialize", re.IGNORECASE)  # as on a machine that hides the counters


def measure(function: str, dtype: str, sizes: list[int], implementation: str = "pallas", form: str = "") -> Figures:
    """Hazards in a function, of attention forward and backward, as racecheck counts them."""
    tool = find()
    if tool is None:
        raise NotMeasured(f"{TOOL} is not installed: it comes with CUDA's toolkit")
    asked = f"{function!r}, {dtype!r}, {sizes}, {implementation!r}, {form!r}"
    program = f"from benchmarks.gpu import races; races.run({asked})"
    command = [tool, "--tool", "racecheck", "--print-limit", "10", sys.executable, "-c", program]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return figures_of(done.stdout + done.stderr, done.returncode)


def find() -> str | None:
    """Return the path of the tool, which need not be on PATH."""
    home = os.environ.get("CUDA_HOME")
    folders = [*([str(Path(home) / "bin")] if home else []), *PLACES]
    return shutil.which(TOOL) or shutil.which(TOOL, path=os.pathsep.join(folders))


def figures_of(output: str, status: int) -> Figures:
    """Return what a run of the tool printed. Raises NotMeasured where this GPU has no such kernel, or keeps it out."""
    found = SUMMARY.search(output)
    lines = [line for line in output.splitlines() if line.strip()]
    if found is None or FINISHED not in output:
        for line in lines:
            if line.startswith(NOT_HERE) or REFUSED.search(line):
                raise NotMeasured(line.removeprefix(NOT_HERE).strip(" =")[:200])
        raise RuntimeError(f"{TOOL} ended with status {status}: {' / '.join(lines[-2:])[-300:]}")
    hazards, errors, warnings = (int(number) for number in found.groups())
    first = next((line.strip(" =") for line in lines if "hazard" in line and "SUMMARY" not in line), "")
    return {"hazards": hazards, "errors": errors, "warnings": warnings} | ({"first": first[:200]} if first else {})


def run(function: str, dtype: str, sizes: list[int], implementation: str, form: str) -> None:
    """Compute a function once, attention forward and backward."""
    import jax

    from benchmarks.gpu import solvers
    from llmc_jax.trials import problems

    given: Any = problems.problem(function, dtype, sizes, seed=1)
    try:
        program = jax.jit(given.bind(solvers.implementation(function, implementation, form=form)))
    except NotMeasured as why:
        print(f"{NOT_HERE}{why}")
        return
    jax.block_until_ready(program(*given.arrays))
    print(FINISHED)
