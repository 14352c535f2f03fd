"""All events of a metrics.jsonl, none of which may be damaged."""

from pathlib import Path
from typing import Any

from llmc_jax.logs.files import parse_event


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the events in order; a last line without its newline is dropped: the run was killed while it wrote.

    Raises FormatError for any other line that is not a JSON object.
    """
    *lines, _torn = path.read_bytes().split(b"\n")
    return [parse_event(f"{path}: line {number}", line) for number, line in enumerate(lines, start=1)]
