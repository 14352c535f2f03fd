"""Run folders made by hand, for the tests of the report."""

import json
from pathlib import Path
from typing import Any

BEGAN = 1_700_000_000.0
CONFIG = {
    "options": {
        "learning_rate": 0.004,
        "seed": 42,
        "output_dir": "runs/a",
        "train_data": "https://me:pass@host/x",
        "gone": 1,
    },
    "model": {"num_layers": 4, "channels": 128},
    "device": {"platform": "cpu", "kind": "a processor", "memory_bytes": 2**34, "cpu_cores": 2},
    "versions": {"python": "3.12", "jax": "0.6"},
    "git": {"commit": "abc", "modified": True},
    "environment": {"XLA_FLAGS": "--xla_x=1"},
    "command_line": "python train.py --train-data https://me:pass@host/x",
    "started": "2026-01-01T00:00:00+0000",
}
KERNELS = {"choices": [{"operation": "attention", "implementation": "naive, xla", "why": "on a CPU"}]}


def start(**fields: Any) -> dict[str, Any]:
    counts = {"steps": 40, "parameters": 858880, "tokens_per_step": 8, "flops_per_token": 1e6, "peak_flops": None,
              "bigram_nats": 2.4}  # fmt: skip
    return {"event": "start", "step": 0, **counts, "config": CONFIG, **fields, "time": BEGAN}


def train(step: int, **fields: Any) -> dict[str, Any]:
    figures = {"loss": 5.0 - step / 40, "norm": 1.5, "lr": 1e-3, "ms": 500.0, "tokens_per_second": 16.0}
    row = {**figures, "skipped": False, "tokens": 8 * (step + 1), "memory": 2**30, **fields}
    return {"event": "train", "step": step, **row, "time": BEGAN + 2.0 + step}


def val(step: int, loss: float) -> dict[str, Any]:
    return {"event": "val", "step": step, "loss": loss, "batches": 2, "time": BEGAN + 1.5 + step}


def end(step: int, outcome: str = "done") -> dict[str, Any]:
    return {"event": "end", "step": step, "outcome": outcome, "skipped": 0, "time": BEGAN + 3.0 + step}


def usual(steps: int = 40) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [start()]
    for step in range(steps):
        rows += [val(step, 5.0 - step / 20)] if step % 10 == 0 else []
        rows.append(train(step))
    return [
        *rows,
        {"event": "sample", "step": steps, "tokens": 4, "text": "<b>\n", "time": BEGAN + 2.5 + steps},
        end(steps),
    ]


def run_folder(folder: Path, events: list[dict[str, Any]], config: Any = CONFIG, torn: str = "") -> Path:
    """A run folder with these events."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events) + torn)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "kernels.json").write_text(json.dumps(KERNELS))
    return folder
