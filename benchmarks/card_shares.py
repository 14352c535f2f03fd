"""Shares of the peaks that a card's own check measured, as rows for llmc_jax/plan/efficiency.py.

    python benchmarks/card_shares.py "NVIDIA H200"

Reads what gpu_check.sh keeps in results/. The package's own of Hopper were adapted from these: a product is slower
in a step, where the clock falls, and a kernel that waits for memory as fast as in a traced step.
"""

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from llmc_jax.machine import gpus  # noqa: E402
from llmc_jax.plan import efficiency  # noqa: E402
from llmc_jax.plan.efficiency import Efficiency, Hardware  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
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


def shares_in(content: Mapping[str, Any], hardware: Hardware, source: str) -> dict[str, Efficiency]:
    """Return the shares that were measured, by kind of work. The best of each shape counts: it is what a run takes.

    content: of the card's file.
    """
    done = [(part, name, figures) for part, name, status, figures, *_ in content["records"] if status == "done"]
    flops, bandwidth = hardware.flops / 1e12, hardware.bandwidth / 1e9
    best: dict[str, dict[str, float]] = defaultdict(dict)

    def keep(kind: str, shape: str, share: float) -> None:
        best[kind][shape] = max(share, best[kind].get(shape, 0.0))

    for part, name, figures in done:
        what, *shape = name.split(" ")
        if part == "machine" and what == "product" and "TFLOP/s" in figures and shape[:1] == ["bf16"]:
            rows, _, columns = map(int, shape[1].split("x"))  # whose tiles' share a step's products have by themselves
            keep(efficiency.PRODUCTS, name, figures["TFLOP/s"] / flops / hardware.filled(rows, columns))
        if part == "machine" and what == "copy" and "GB/s" in figures:
            keep(efficiency.COPY, "", figures["GB/s"] / bandwidth)
        if part == "kernels" and what == "attention" and "forward TFLOP/s" in figures:
            keep(efficiency.ATTENTION, " ".join(shape[:2]), figures["forward TFLOP/s"] / flops)
            keep(efficiency.ATTENTION_BACKWARD, " ".join(shape[:2]), figures["backward TFLOP/s"] / flops)
        if part == "kernels" and what in KERNELS and "GB/s" in figures:
            for kind in (efficiency.MEMORY, *KERNELS[what]):
                keep(kind, name, figures["GB/s"] / bandwidth)
    return {kind: _efficiency(list(found.values()), hardware.kind, source) for kind, found in best.items()}


def _efficiency(shares: list[float], kind: str, source: str) -> Efficiency:
    typical = statistics.median(shares)
    low, high = min([*shares, (1 - ALONE) * typical]), max([*shares, (1 + ALONE) * typical])
    return Efficiency(low, typical, high, kind, f"benchmarks/results/{source}")


def main() -> None:
    kind = sys.argv[1] if len(sys.argv) == 2 else ""
    if kind not in gpus.GPUS or not (path := file_of(kind)).exists():
        raise SystemExit(f'expected the name of a GPU whose gpu_check.sh has run, as in "NVIDIA H200", not {kind!r}')
    for name, share in shares_in(json.loads(path.read_text()), efficiency.gpu(kind, "bf16"), path.name).items():
        low, typical, high = (f"{value:.3f}" for value in share[:3])
        print(f'    "{name}": Efficiency({low}, {typical}, {high}, "{kind}", "{share.source}"),')


if __name__ == "__main__":
    main()
