"""The files that a run folder has, by name, and what is read back of them: events, the last start's configuration.

Leaves out writing them (run/folder.py), and other programs' logs (reading.py).
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmc_jax.base.files import refusing

MAIN_LOG = "main.log"
METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
CONFIG = "config.json"
REPORT = "report.html"
CURVES = "curves.png"
KERNELS = "kernels.json"  # which implementation of each operation the run has
LARGEST = 1 << 24  # bytes that the last two are read up to
STEP = "train"  # the kind of most events
OF_STEPS = frozenset({STEP, "val", "eval", "gpu"})  # kinds of events that are figures of a step
LARGEST_NUMBER, LARGEST_STEP, LARGEST_TIME = 1e300, 10**12, 1e11  # of events; the last in seconds since 1970

# JSON has no number for these; they are written as strings
NON_FINITE = ("nan", "inf", "-inf")
OF_ALL = frozenset({"event", "step", "time"})  # fields that every event has, and that are no figures


def read_bytes(path: Path) -> bytes:
    """Return a file's content. Raises InputError, naming it."""
    with refusing(f"{path}: cannot read it"):
        return path.read_bytes()


def holds(folder: Path, names: Sequence[str]) -> bool:
    """Return whether a folder has one of these files; False too where it must not be looked into."""
    return any(os.path.isfile(folder / name) for name in names)  # pathlib would raise there


def runs_in(folder: Path, names: Sequence[str] = (METRICS,)) -> list[Path]:
    """Return the run folders in a folder, each with one of the files. Raises InputError where it cannot be read."""
    with refusing(f"{folder}: cannot read the folder"):
        return sorted(each for each in folder.iterdir() if os.path.isdir(each) and holds(each, names))


def rank_log(folder: Path, rank: int) -> Path:
    """Return the log of one of several processes: of the first one metrics.jsonl, of another one rank_%05d.jsonl."""
    return folder / (f"rank_{rank:05d}.jsonl" if rank else METRICS)


def event_in(line: bytes) -> dict[str, Any] | None:
    """Return the event that a line of a metrics.jsonl is; None for a line that is none."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and is_event(event) else None


def is_event(event: Mapping[str, Any]) -> bool:
    """Return whether an object has a kind, and where that is one of OF_STEPS a step."""
    kind = event.get("event")
    return isinstance(kind, str) and (kind not in OF_STEPS or step_of(event) is not None)


def events_in(lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
    """Return what `event_in` does of each line. All at once take a quarter of the time, where none is damaged."""
    with suppress(ValueError, RecursionError):
        found = json.loads(b"[%s]" % b",".join(lines))
        if len(found) == len(lines) and set(map(type, found)) <= {dict} and all(map(is_event, found)):
            return found
    return [event_in(line) for line in lines]


def finite_number(value: Any, least: float = -LARGEST_NUMBER, most: float = LARGEST_NUMBER) -> float | None:
    """Return a number of an event if it is within limits; None for anything else, such as a damaged file may have."""
    return value if type(value) in (int, float) and least <= value <= most else None


def figure_of(value: Any) -> float | None:
    """Return a figure of an event: a number, a switch as 0 or 1, what stands for a number that JSON has not; else None.

    None, too, for an integer that is too large.
    """
    if isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
        return None
    return float(value) if isinstance(value, bool | int | float) or value in NON_FINITE else None


def table_of(value: Any) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for what is none."""
    return value if isinstance(value, Mapping) else {}


def time_of(value: Any) -> float | None:
    """Return the time of an event, in seconds since 1970; None for what no clock shows."""
    return finite_number(value, 0, LARGEST_TIME)


def step_of(event: Mapping[str, Any]) -> int | None:
    """Return the step of an event; None where it has none."""
    step = event.get("step")
    return step if type(step) is int and 0 <= step <= LARGEST_STEP else None


def config_file(folder: Path) -> Path | None:
    """Return the file with the `config_record` of a run's last start; None where no run of ours was."""
    return folder / CONFIG if (folder / CONFIG).is_file() else None
