"""Shares that were measured on a card, out of what gpu_check.sh keeps: they take the place of others and estimates.

Looks into benchmarks/results beside the package, so only a checkout has them. What the package knows of a card by
itself stands in efficiency.py, and stays. Leaves out the times of whole steps (benchmarks/plan_error.py).
"""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.plan.efficiency import ATTENTION, ATTENTION_BACKWARD, COPY, MEMORY, PRODUCTS, Efficiency, Hardware

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
# Kernels that wait for memory, and the operations that they run in a step.
KERNELS = {
    "residual_layernorm_forward": ("forward ln1", "forward ln2", "forward lnf"),
    "residual_layernorm_backward": ("backward ln1", "backward ln2"),
    "layernorm_forward": (),
    "layernorm_backward": ("backward lnf",),
    "gelu_forward": ("forward gelu",),
    "gelu_backward": ("backward gelu",),
    "classifier": ("forward classifier",),
    "adamw_update": ("update adamw",),
    "global_norm": ("update norm",),
}
ALONE = 0.05  # by how much a share may be off where only one was measured: an estimate


def file_of(kind: str, folder: Path = RESULTS) -> Path:
    """Return the file of a card, as gpu_check.sh names it, whether or not it is there."""
    return folder / f"gpu_{re.sub(r'[^a-z0-9]+', '_', kind.lower()).strip('_')}.json"


def with_measured(hardware: Hardware, folder: Path = RESULTS) -> Hardware:
    """Return a GPU with the shares that were measured on such a card; as it is where none were.

    Raises InputError for a file that is something else.
    """
    path = file_of(hardware.kind, folder)
    if not path.exists() or hardware.shares[PRODUCTS].measured_on == hardware.kind:
        return hardware
    try:
        content = json.loads(path.read_text())
        done = [(part, name, figures) for part, name, status, figures, *_ in content["records"] if status == "done"]
        return hardware._replace(shares={**hardware.shares, **shares_in(done, hardware, path.name)})
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{path}: not what gpu_check.sh writes ({error}); move it away") from error


def shares_in(
    done: Iterable[tuple[str, str, Mapping[str, Any]]], hardware: Hardware, source: str
) -> dict[str, Efficiency]:
    """Return the shares that were measured, by kind of work. The best of each shape counts: it is what a run takes."""
    flops, bandwidth = hardware.flops / 1e12, hardware.bandwidth / 1e9
    best: dict[str, dict[str, float]] = defaultdict(dict)

    def keep(kind: str, shape: str, share: float) -> None:
        best[kind][shape] = max(share, best[kind].get(shape, 0.0))

    for part, name, figures in done:
        what, *shape = name.split(" ")
        if part == "machine" and what == "product" and "TFLOP/s" in figures and shape[:1] == ["bf16"]:
            rows, _, columns = map(int, shape[1].split("x"))  # whose tiles' share a step's products have by themselves
            keep(PRODUCTS, name, figures["TFLOP/s"] / flops / hardware.filled(rows, columns))
        if part == "machine" and what == "copy" and "GB/s" in figures:
            keep(COPY, "", figures["GB/s"] / bandwidth)
        if part == "kernels" and what == "attention" and "forward TFLOP/s" in figures:
            keep(ATTENTION, " ".join(shape[:2]), figures["forward TFLOP/s"] / flops)
            keep(ATTENTION_BACKWARD, " ".join(shape[:2]), figures["backward TFLOP/s"] / flops)
        if part == "kernels" and what in KERNELS and "GB/s" in figures:
            for kind in (MEMORY, *KERNELS[what]):
                keep(kind, name, figures["GB/s"] / bandwidth)
    return {kind: _efficiency(list(found.values()), hardware.kind, source) for kind, found in best.items()}


def _efficiency(shares: list[float], kind: str, source: str) -> Efficiency:
    typical = statistics.median(shares)
    low, high = min([*shares, (1 - ALONE) * typical]), max([*shares, (1 + ALONE) * typical])
    return Efficiency(low, typical, high, kind, f"benchmarks/results/{source}")
