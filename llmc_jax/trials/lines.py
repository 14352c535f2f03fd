"""How a measuring process tells its parent what it found."""

import json
import sys
from typing import Any

Figures = dict[str, float | int | str]
SAME, OTHER, FREE = "the same", "OTHER", "not promised"  # the figure `bits` of numerics


class NotMeasured(Exception):
    """This line cannot be measured here; the message says why. No error."""


def tell(kind: str, name: str, content: Any = None) -> None:
    """One line on stdout: `kind`, a space, and JSON."""
    print(kind, json.dumps({"name": name, "content": content}), flush=True)


def heard(line: str) -> tuple[str, str, Any] | None:
    """(kind, name, content) of a line that `tell` printed; None for anything else that a program may print."""
    kind, _, text = line.partition(" ")
    if kind not in ("BEGIN", "DONE", "SKIPPED", "FAILED", "SPOILT"):
        return None
    try:
        message = json.loads(text)
        return kind, message["name"], message["content"]
    except (ValueError, KeyError, TypeError):
        return None


def error_text(error: BaseException) -> str:
    """The error in one line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else text[:200] + " … " + text[-190:]


def note(text: str) -> None:
    """Something for the log, which the parent keeps of a process that fails."""
    print(text, file=sys.stderr, flush=True)
