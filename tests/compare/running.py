"""Comparisons as the command makes them, in this process."""

import json
from pathlib import Path
from typing import Any

from llmc_jax.compare import command


def compare(*words: str | Path) -> int:
    """The exit status."""
    return command.run(command.make_parser().parse_args(list(map(str, words))))


def compared(folder: Path, *words: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON."""
    status = compare(*words, "--json", folder / "result.json")
    return status, json.loads((folder / "result.json").read_text())
