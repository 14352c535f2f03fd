"""Programs measured in turns on one machine: each is a process that waits until it is asked.

A ratio is of neighbours in time: a machine that changes its speed meanwhile changes it for all. Imports nothing but
Python's own library, since some of the programs run under another interpreter.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """The median of several values, the least and the greatest."""

    median: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        """Return `median (low - high)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} - {self.high:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Return the median, the least and the greatest of some values."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(times: Sequence[float], base: Sequence[float]) -> Spread:
    """Return how many times as long as the base each round took."""
    return spread([a / b for a, b in zip(times, base, strict=True)])


def turns(count: int, rounds: int) -> Iterator[list[int]]:
    """Yield the order of each round: forwards and backwards in turn, so that a steady drift favours nobody."""
    for i in range(rounds):
        yield list(range(count))[:: 1 if i % 2 == 0 else -1]


def blocks_in_turns(blocks: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return what each block measured in each round, the blocks of a round being neighbours in time."""
    names = list(blocks)
    found: dict[str, list[float]] = {name: [] for name in names}
    for order in turns(len(names), rounds):
        for i in order:
            found[names[i]].append(blocks[names[i]]())
    return found


class Peer:
    """A program that says one JSON line when it is ready, and then one for each JSON line that it is sent."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.about: dict[str, Any] = {}

    def wait_ready(self) -> "Peer":
        """Wait until the program has compiled what it will run."""
        self.about = self._read()
        return self

    def ask(self, request: Any) -> dict[str, Any]:
        """Return the answer to a request; ends this program with what the peer said if there is none."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            self._fail()
        return self._read()

    def block(self, steps: int) -> float:
        """Return the median milliseconds of some steps, after one that finds the caches as the others left them."""
        return statistics.median(self.ask(steps + 1)["ms"][1:])

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            self._fail()
        return json.loads(line)

    def _fail(self) -> None:
        self._process.wait()
        self._errors.seek(0)
        raise SystemExit(f"{' '.join(self._command)}\n{self._errors.read()[-2000:]}")


def serve(about: dict[str, Any], answer: Callable[[Any], dict[str, Any]]) -> None:
    """Be a peer: say that this program is ready, then answer each line of stdin."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
