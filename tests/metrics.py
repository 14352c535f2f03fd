"""All events of a metrics.jsonl, none of which may be damaged."""

import json
from pathlib import Path
from typing import Any

from llmc_jax.logs.files import NON_FINITE


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the events in order; a last line without its newline is dropped: the run was killed while it wrote.

    Raises ValueError for any other line that is not JSON.
    """
    *lines, _torn = path.read_bytes().split(b"\n")
    events = map(json.loads, lines)
    return [{name: float(each) if each in NON_FINITE else each for name, each in event.items()} for event in events]
