"""What a tracker is told of a run: its facts, and a row of numbers or a text for each event of metrics.jsonl.

Leaves out who is told (sinks.py) and when (child.py).
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.logs.files import NON_FINITE, parse_event, step_of

GROUPS = {"train": "train", "val": "val", "eval": "hellaswag", "gpu": "gpu"}  # by the kind of an event
ASIDE = ("event", "step", "time")  # they say of what and when the numbers are
LONGEST_LINE = 1 << 22


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
        flops_per_token=_number(start.get("flops_per_token")),
        peak_flops=_number(start.get("peak_flops")),
    )


def first_line(path: Path) -> bytes:
    """Return the first line of a file. Raises OSError."""
    with path.open("rb") as file:
        return file.readline(LONGEST_LINE)


def line_at(path: Path, place: int) -> dict[str, Any]:
    """Return the event whose line begins at a place. Raises OSError, and FormatError where none does."""
    with path.open("rb") as file:
        file.seek(place)
        return parse_event(f"{path}: byte {place}", file.readline(LONGEST_LINE))


def _parameters(start: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield options by their own names, other facts by their groups'. The command line and the folder stay here."""
    config = start.get("config")
    config = config if isinstance(config, Mapping) else {}
    options = config.get("options")
    yield from (options if isinstance(options, Mapping) else {}).items()
    for group in ("model", "device", "versions", "git"):
        facts = config.get(group)
        yield from ((f"{group}/{name}", value) for name, value in (facts if isinstance(facts, Mapping) else {}).items())
    yield from (
        (name, start[name]) for name in ("steps", "parameters", "tokens_per_step", "precision") if name in start
    )


def row_of(event: Mapping[str, Any], facts: Facts) -> Row | None:
    """Return what an event of metrics.jsonl tells a tracker; None where it tells nothing."""
    kind, step = event.get("event"), step_of(event) or 0
    when = _number(event.get("time")) or time.time()
    if kind == "sample" and isinstance(event.get("text"), str):
        return Row(step, when, {}, event["text"])
    if kind not in GROUPS:
        return None
    numbers = ((name, _number(value)) for name, value in event.items() if name not in ASIDE)
    values = {f"{GROUPS[kind]}/{name}": number for name, number in numbers if number is not None}
    if kind == "train":
        values |= _mfu(event, facts)
    return Row(step, when, values, may_drop=kind == "train")


def _mfu(event: Mapping[str, Any], facts: Facts) -> dict[str, float]:
    """Return the share of the devices' peak that a step reached, where it is known."""
    speed = _number(event.get("tokens_per_second"))
    if speed is None or not facts.peak_flops or not facts.flops_per_token:
        return {}
    return {"train/mfu": speed * facts.flops_per_token / facts.peak_flops}


def _number(value: Any) -> float | None:
    """Return a number, a switch as 0 or 1, and what stands for a number that JSON has not; None for anything else."""
    if isinstance(value, bool | int | float) or value in NON_FINITE:
        try:
            return float(value)
        except OverflowError:  # an integer of hundreds of digits
            return None
    return None
