"""The files that a run folder has, by name, and what is read back of them: events, the last start's configuration.

Leaves out writing them (run/folder.py), and other programs' logs (reading.py).
"""

import json
import re
from pathlib import Path
from typing import Any

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import reason

MAIN_LOG = "main.log"
METRICS = "metrics.jsonl"
SAMPLES = "samples.txt"
CONFIG = "config.json"
LOCK = ".lock"  # whose run it is, where the file system has no locks
REPORT = "report.html"
KERNELS = "kernels.json"  # which implementation of each operation the run has
LARGEST = 1 << 24  # bytes that the last two are read up to

# JSON has no number for these; they are written as strings and read back as floats, in the fields that hold numbers
NON_FINITE = ("nan", "inf", "-inf")
NUMBER_FIELDS = frozenset({"loss", "norm", "lr", "ms", "tokens_per_second"})


def read_bytes(path: Path) -> bytes:
    """Return a file's content. Raises InputError, naming it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {reason(error)}") from error


def rank_log(folder: Path, rank: int) -> Path:
    """Return the log of one of several processes: of the first one metrics.jsonl, of another one rank_%05d.jsonl."""
    return folder / (f"rank_{rank:05d}.jsonl" if rank else METRICS)


def rank_of(path: Path) -> int | None:
    """Return the rank of the process whose log a file is by its name; None for any other file, the first one's too."""
    match = re.fullmatch(r"rank_(\d{5,9})\.jsonl", path.name)
    return int(match[1]) if match and rank_log(path.parent, int(match[1])) == path else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the events of a metrics.jsonl, in order; non-finite losses and norms come back as floats.

    A last line without its newline is dropped: the run was killed while it wrote.
    Raises FormatError for any other line that is not a JSON object, InputError if the file cannot be read.
    """
    *lines, _torn = read_bytes(path).split(b"\n")
    return [parse_event(f"{path}: line {number}", line) for number, line in enumerate(lines, start=1)]


def parse_event(where: str, line: bytes) -> dict[str, Any]:
    """Return a line of a metrics.jsonl. where: what an error names. Raises FormatError if it is not a JSON object."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise FormatError(f"{where} is not a JSON object; expected one event a line")
    for key in NUMBER_FIELDS & event.keys():
        if event[key] in NON_FINITE:
            event[key] = float(event[key])
    return event


def event_in(line: bytes) -> dict[str, Any] | None:
    """Return the event that a line of a metrics.jsonl is; None for a line that is none."""
    try:
        event = parse_event("", line)
    except FormatError:
        return None
    return event if isinstance(event.get("event"), str) else None


def config_file(folder: Path) -> Path | None:
    """Return the file with the `config_record` of a run's last start; None where no run of ours was.

    Earlier versions moved the one before aside, as config-1.json, config-2.json, …, and could be killed right then.
    """
    aside = [path for path in folder.glob("config-*.json") if re.fullmatch(r"config-[1-9][0-9]{0,8}", path.stem)]
    newest_first = sorted(aside, key=lambda path: int(path.stem.removeprefix("config-")), reverse=True)
    return next((path for path in [folder / CONFIG, *newest_first] if path.is_file()), None)
