"""What a tracker is told of a run: its facts, and a row of numbers or a text for each event of metrics.jsonl.

Leaves out who is told (sinks.py) and when (child.py).
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.logs.files import OF_ALL, figure_of, step_of, table_of

GROUPS = {"train": "train", "val": "val", "eval": "hellaswag", "gpu": "gpu"}  # by the kind of an event


class Facts(NamedTuple):
    """What is known of a run as it begins."""

    name: str  # of its folder
    folder: str
    run_id: str  # the same in each start of a run
    step: int  # which this start begins at
    resumed: bool
    parameters: dict[str, Any]  # options, model, machine and versions by name
    flops_per_token: float | None
    peak_flops: float | None  # of all devices; None where it is not known


class Row(NamedTuple):
    """One event, as a tracker takes it."""

    step: int
    time: float  # seconds since 1970
    values: dict[str, float]
    text: str | None = None  # of a sample
    may_drop: bool = False  # one training step among many


def facts_of(folder: Path, first: bytes, start: Mapping[str, Any]) -> Facts:
    """Return the facts of a start. first: the first line of metrics.jsonl, which a resume leaves as it is."""
    return Facts(
        name=folder.absolute().name,
        folder=str(folder),
        run_id=hashlib.sha256(first).hexdigest()[:16],
        step=step_of(start) or 0,
        resumed=start.get("event") == "resume",
        parameters=dict(_parameters(start)),
        flops_per_token=figure_of(start.get("flops_per_token")),
        peak_flops=figure_of(start.get("peak_flops")),
    )


def _parameters(start: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield options by their own names, other facts by their groups'. The command line and the folder stay here."""
    config = table_of(start.get("config"))
    yield from table_of(config.get("options")).items()
    for group in ("model", "device", "versions", "git"):
        yield from ((f"{group}/{name}", value) for name, value in table_of(config.get(group)).items())
    yield from (
        (name, start[name]) for name in ("steps", "parameters", "tokens_per_step", "precision") if name in start
    )


def row_of(event: Mapping[str, Any], facts: Facts) -> Row | None:
    """Return what an event of metrics.jsonl tells a tracker; None where it tells nothing."""
    kind, step = event.get("event"), step_of(event) or 0
    when = figure_of(event.get("time")) or time.time()
    if kind == "sample" and isinstance(event.get("text"), str):
        return Row(step, when, {}, event["text"])
    if kind not in GROUPS:
        return None
    numbers = ((name, figure_of(value)) for name, value in event.items() if name not in OF_ALL)
    values = {f"{GROUPS[kind]}/{name}": number for name, number in numbers if number is not None}
    if kind == "train":
        values |= _mfu(event, facts)
    return Row(step, when, values, may_drop=kind == "train")


def _mfu(event: Mapping[str, Any], facts: Facts) -> dict[str, float]:
    """Return the share of the devices' peak that a step reached, where it is known."""
    speed = figure_of(event.get("tokens_per_second"))
    if speed is None or not facts.peak_flops or not facts.flops_per_token:
        return {}
    return {"train/mfu": speed * facts.flops_per_token / facts.peak_flops}
