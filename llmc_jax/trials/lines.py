"""How a measuring process tells its parent what it found, and how it measures time. Imports JAX only when used."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

Figures = dict[str, float | int | str]


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


def seconds_per_call(run: Callable[[], Any], calls: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a call of `run`, `calls` of them queued at a time, and the spread: largest less least, as a
    share of the median. run returns JAX arrays and does not wait for them; two calls that do not count come first.
    """
    import jax

    for _ in range(2):
        jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median
