"""What compute-sanitizer finds in a kernel: accesses to shared memory that do not wait for each other."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from llmc_jax.trials.figures import Figures, NotMeasured

TOOL = "compute-sanitizer"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")  # where it is if not on PATH
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
REFUSED = re.compile(r"not supported|failed to initialize", re.IGNORECASE)  # as on a machine that hides the counters


def measure(sizes: list[int], implementation: str) -> Figures:
    """Hazards in forward and backward of attention on (B, T, NH, HS), as racecheck counts them."""
    tool = find()
    if tool is None:
        raise NotMeasured(f"{TOOL} is not installed: it comes with CUDA's toolkit")
    program = f"from benchmarks.gpu import races; races.run({json.dumps(sizes)}, {implementation!r})"
    command = [tool, "--tool", "racecheck", "--print-limit", "10", sys.executable, "-c", program]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return figures_of(done.stdout + done.stderr, done.returncode)


def find() -> str | None:
    """Return the tool's path."""
    home = os.environ.get("CUDA_HOME")
    places = [*([str(Path(home) / "bin")] if home else []), *PLACES]
    return shutil.which(TOOL) or shutil.which(TOOL, path=os.pathsep.join(places))


def figures_of(output: str, status: int) -> Figures:
    """Return what a run of the tool printed. Raises NotMeasured where it may not look into this GPU."""
    found = SUMMARY.search(output)
    lines = [line for line in output.splitlines() if line.strip()]
    if found is None:
        if refused := next((line for line in lines if REFUSED.search(line)), None):
            raise NotMeasured(f"{TOOL}: {refused.strip(' =')}")
        raise RuntimeError(f"{TOOL} ended with status {status}: {' / '.join(lines[-2:])[-300:]}")
    hazards, errors, warnings = (int(number) for number in found.groups())
    first = next((line.strip(" =") for line in lines if "hazard" in line and "SUMMARY" not in line), "")
    return {"hazards": hazards, "errors": errors, "warnings": warnings} | ({"first": first[:200]} if first else {})


def run(sizes: list[int], implementation: str) -> None:
    """Compute attention forward and backward once."""
    import jax

    from benchmarks.gpu import solvers
    from llmc_jax.trials import problems

    given: Any = problems.problem("attention", "bf16", sizes, seed=1)
    jax.block_until_ready(jax.jit(given.bind(solvers.implementation("attention", implementation)))(*given.arrays))
