"""The process that shows a run in one tracker: `python -m llmc_jax.trackers.child REQUEST`.

It follows metrics.jsonl and hands each event on. The run holds a pipe to it. When that ends, however the run ended, the
rest is sent, within a limit; then this process ends, whatever the tracker does. What it says to the run goes to its
output, a line of JSON at a time; what a tracker prints goes nowhere. Leaves out how the run starts it and hears it
(run/trackers.py).
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.logs.files import METRICS, event_in
from llmc_jax.logs.follow import LONGEST, Follower
from llmc_jax.trackers.rows import Facts, Row, facts_of, row_of
from llmc_jax.trackers.sinks import KINDS, Sink

LIMIT = 9.0  # seconds for the rest, once the run has ended; the run itself waits a second longer
LOOK_EVERY = 0.5  # seconds between two looks at the file
TELL_EVERY = 30.0  # and between two messages to the run, all of which stay in a file
GIVE_UP = 20  # times in a row that a tracker refused
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN")


class Request(NamedTuple):
    """What the process is started with."""

    kind: str  # a key of KINDS
    target: str  # project or experiment; empty where there is none
    folder: str  # of the run
    start: int  # byte of metrics.jsonl at which the line of this start begins
    limit: float = LIMIT


class Status(NamedTuple):
    """What the run is told."""

    where: str = ""  # the tracker shows the run
    sent: int = 0  # events that the tracker has taken
    dropped: int = 0  # events that it has not
    problem: str = ""  # the first thing that went wrong
    final: bool = False


def without_secrets(text: str) -> str:
    """Return one line of a text, cut, in which nothing is left that looks like a credential or is one of ours."""
    for name in SECRETS:
        if len(secret := os.environ.get(name, "")) >= 4:
            text = text.replace(secret, "…")
    text = re.sub(r"(?<=://)[^/\s@]*@", "…@", text)
    text = re.sub(r"[0-9a-fA-F]{40,}|\bwandb_v\d\w+", "…", text)
    return " ".join(text.split())[:300]


def silenced() -> int:
    """Let nothing of what is printed here go anywhere; return another descriptor of standard output as it was."""
    sys.stdout.flush()
    kept = os.dup(1)  # which other programs that a tracker starts do not inherit
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for each in (1, 2):
        os.dup2(nowhere, each)
    return kept


class Shower:
    """One run shown in one tracker. metrics.jsonl is the queue: what waits is in the file."""

    def __init__(self, request: Request, output: int) -> None:
        """output: descriptor of the file that the run reads."""
        self.request, self._output = request, output
        self._path = Path(request.folder) / METRICS
        self._ended = threading.Event()  # the run has
        self._outcome = "died"
        self._where, self._problem = "", ""
        self._sent = self._tried = self._total = self._refusals = 0  # the total is known in the end
        self._read = (request.start, 0)  # up to where the file was read, and how many rows that were
        self._told_at = 0.0

    def run(self) -> None:
        """Send all there is to send, until the run has ended and nothing is left."""
        threading.Thread(target=self._watch, name="llmc_jax tracker", daemon=True).start()
        sink = None
        with self._attempt("read the run"):
            facts = self._facts()
            with self._attempt("begin"):
                begun = KINDS[self.request.kind].sink(self.request.target)
                self._where = without_secrets(begun.begin(facts))
                self._tell(at_once=True)
                sink = begun
            self._send_all(sink, facts)
        with self._attempt("end"):
            if sink:
                sink.close(self._outcome)

    def _facts(self) -> Facts:
        with self._path.open("rb") as file:
            first = file.readline(LONGEST)
            file.seek(self.request.start)
            return facts_of(Path(self.request.folder), first, event_in(file.readline(LONGEST)) or {})

    def _send_all(self, sink: Sink | None, facts: Facts) -> None:
        """Send rows as they come; once the run has ended, the rest: what must not be dropped first."""
        follower, rows = Follower(self._path, self.request.start), deque[Row]()
        at_once = KINDS[self.request.kind].at_once
        while not self._ended.is_set():
            if not rows:
                rows.extend(self._rows(follower.new(), facts))
                if follower.begun > 1:
                    raise InputError(f"{self._path}: has been replaced by another file")
                self._read = follower.place, self._read[1] + len(rows)
            if rows:
                self._send(sink, [rows.popleft() for _ in range(min(at_once, len(rows)))])
            elif not follower.behind:
                self._ended.wait(LOOK_EVERY)
        for may_drop in (False, True):
            left = (row for row in chain(rows, self._rest(follower.place, facts)) if row.may_drop == may_drop)
            while batch := list(islice(left, at_once)):
                self._send(sink, batch)

    def _rest(self, place: int, facts: Facts) -> Iterator[Row]:
        """Yield the rows from a place of the file to its end."""
        follower = Follower(self._path, place)
        while (events := follower.new()) or follower.behind:
            yield from self._rows(events, facts)

    def _rows(self, events: Sequence[dict[str, Any]], facts: Facts) -> Iterator[Row]:
        for event in events:
            if event.get("event") == "end":
                self._outcome = str(event.get("outcome"))
            if (row := row_of(event, facts)) is not None:
                yield row

    def _send(self, sink: Sink | None, rows: list[Row]) -> None:
        """Hand rows to the tracker, unless it has refused too often."""
        self._tried += len(rows)
        if sink is None or self._refusals >= GIVE_UP:
            return
        taken, sent = 0, self._sent
        for row in rows:
            with self._attempt("take a step"):
                if row.text is not None:
                    sink.text(row.step, row.time, "sample", row.text)
                else:
                    sink.put(row.step, row.time, row.values)
                taken += 1
        with self._attempt("send"):
            sink.flush()
            self._sent += taken
        self._refusals = 0 if self._sent > sent else self._refusals + 1
        self._tell()

    @contextmanager
    def _attempt(self, what: str) -> Iterator[None]:
        """End the block where it fails, and continue behind it; the first failure is what the run is told."""
        try:
            yield
        except BaseException as error:  # whatever a tracker does, this continues: an exit, too, and an interrupt
            if not self._problem:
                self._problem = without_secrets(f"cannot {what}: {type(error).__name__}: {error}")
                self._tell(at_once=True)

    def _tell(self, *, at_once: bool = False, final: bool = False) -> None:
        """Write how it stands, unless the last time is less than TELL_EVERY ago and this can wait."""
        now = time.monotonic()
        if at_once or now - self._told_at >= TELL_EVERY:
            self._told_at = now
            status = Status(self._where, self._sent, max(self._tried, self._total) - self._sent, self._problem, final)
            with suppress(OSError):  # a full disk
                os.write(self._output, json.dumps(status._asdict()).encode() + b"\n")

    # -- the watching thread --

    def _watch(self) -> None:
        """Wait for the run's end, and then end this process in time, even where the tracker hangs."""
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        until = time.monotonic() + self.request.limit
        self._ended.set()
        place, before = self._read
        with suppress(Exception):
            self._total = before + sum(1 for _ in self._rest(place, self._facts()))
        time.sleep(max(0.0, until - time.monotonic()))
        self.leave(f"was not done {self.request.limit:g} s after the run's end")

    def leave(self, problem: str = "") -> None:
        """Tell the run how it went, and end this process and all that it started. problem: what stopped it."""
        self._problem = self._problem or problem
        self._tell(at_once=True, final=True)
        if problem and os.getsid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


def main() -> None:
    shower = Shower(Request(*json.loads(sys.argv[1])), silenced())
    shower.run()
    shower.leave()


if __name__ == "__main__":
    main()
