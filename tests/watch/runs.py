"""Runs for the views: a metrics.jsonl as train.py writes it."""

import json
import time
from pathlib import Path
from typing import Any


def write_run(folder: Path, steps: int, outcome: str | None = "done", **start: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "steps": 40, **start}]
    events += [{"event": "train", "step": step, "loss": 4 - step / 40, "ms": 9.0} for step in range(steps)]
    events += [] if outcome is None else [{"event": "end", "step": steps, "outcome": outcome}]
    timed = [{**event, "time": round(time.time(), 3)} for event in events]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in timed))
    return folder
