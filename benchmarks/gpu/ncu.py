"""What Nsight Compute counts in one launch of a kernel: memory, multiprocessors, registers, what its warps wait for."""

import csv
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterable

from benchmarks.gpu import races
from llmc_jax.trials.figures import Figures, NotMeasured

TOOL = "ncu"
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
TIME = "gpu__time_duration.sum"  # ns
METRICS = {  # as the tool names them: as the page does
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
    "launch__registers_per_thread": "registers",
}
STALLS = "group:smsp__pcsamp_warp_stall_reasons"
STALL = re.compile(r"smsp__pcsamp_warps_issue_stalled_(?!\w+_not_issued$)(\w+)$")
TOP = 4  # reasons that are named
CALLS = 4  # of the kernel, of which the third is looked at
CLOSED = re.compile(r"ERR_NVGPUCTRPERM|not supported|failed to initialize", re.IGNORECASE)


def measure(kernel: str, function: str, sizes: list[int], implementation: str) -> Figures:
    """Return what the tool counts. kernel: a part of the kernel's name, which `function` launches once in each call."""
    tool = races.find(TOOL, PLACES)
    if tool is None:
        raise NotMeasured(f"{TOOL}, Nsight Compute, is not installed: it comes with CUDA's toolkit")
    program = f"from benchmarks.gpu import races; races.run({function!r}, {sizes}, {implementation!r}, {CALLS})"
    command = [
        tool, "--csv", "--print-units", "base", "--clock-control", "none",  # the card's settings are left alone
        "-k", f"regex:{kernel}", "--launch-skip", "2", "--launch-count", "1",
        "--metrics", ",".join([TIME, *METRICS, STALLS]), sys.executable, "-c", program,
    ]  # fmt: skip
    # in a CUDA graph the tool sees one launch of the whole
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=".strip()
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return figures_of(done.stdout, done.stderr, done.returncode)


def figures_of(output: str, errors: str = "", status: int = 0) -> Figures:
    """Return what a run of the tool printed. Raises NotMeasured where it may not look into this GPU."""
    lines = output.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found = dict(_numbers(csv.DictReader(io.StringIO("\n".join(lines[start:])))))
    if not found:
        said = [line for line in (output + errors).splitlines() if line.strip()]
        if why := races.reason(said, TOOL, CLOSED):
            raise NotMeasured(why)
        raise RuntimeError(f"{TOOL} ended with status {status}: {' / '.join(said[-2:])[-300:]}")
    figures: Figures = {"us": found[TIME] / 1e3} if TIME in found else {}
    figures |= {name: found[metric] for metric, name in METRICS.items() if metric in found}
    samples = {match[1]: number for metric, number in found.items() if (match := STALL.match(metric))}
    waits = sorted((name for name in samples if name != "selected"), key=lambda name: -samples[name])[:TOP]
    if total := sum(samples.values()):
        figures["warps wait for"] = ", ".join(f"{name} {100 * samples[name] / total:.0f} %" for name in waits)
    return figures


def _numbers(rows: Iterable[dict[str, str]]) -> Iterable[tuple[str, float]]:
    """Yield the metrics that are numbers."""
    for row in rows:
        try:
            yield row["Metric Name"], float(row["Metric Value"].replace(",", ""))
        except (KeyError, TypeError, ValueError, AttributeError):  # what else was printed
            continue
