"""The process that shows a run in one tracker: it follows metrics.jsonl and hands each event on.

The run holds a pipe to it. When that ends, however the run ended, the rest is sent, within a limit; then this process
ends, whatever the tracker does. What it says to the run goes through another pipe, a line of JSON at a time; what a
tracker prints goes nowhere. Leaves out how the run starts it and hears it (run/trackers.py).
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.logs.files import METRICS
from llmc_jax.logs.follow import Follower
from llmc_jax.trackers.backlog import Backlog
from llmc_jax.trackers.rows import Facts, facts_of, first_line, line_at, row_of
from llmc_jax.trackers.sinks import KINDS, Sink

LIMIT = 9.0  # seconds for the rest, once the run has ended; the run itself waits a second longer
LOOK_EVERY = 0.5  # seconds between two looks at the file
TELL_EVERY = 2.0  # and between two messages to the run
GIVE_UP = 20  # times in a row that a tracker refused
NICE = 10  # training comes first; at 19 a busy machine would leave no time to send the rest
SECRETS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN")


class Request(NamedTuple):
    """What the process is started with."""

    kind: str  # a key of KINDS
    target: str  # project or experiment; empty where there is none
    folder: str  # of the run
    start: int  # byte of metrics.jsonl at which the line of this start begins
    limit: float = LIMIT

    @classmethod
    def of_words(cls, words: Sequence[str]) -> "Request":
        kind, target, folder, start, limit = words
        return cls(kind, target, folder, int(start), float(limit))

    def words(self) -> list[str]:
        """Return the words of a command line that `of_words` reads."""
        return [str(each) for each in self]


class Status(NamedTuple):
    """What the run is told."""

    where: str = ""  # the tracker shows the run
    sent: int = 0  # events that the tracker has taken
    dropped: int = 0  # events that it has not
    problem: str = ""  # the first thing that went wrong
    final: bool = False

    def to_line(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"


def without_secrets(text: str) -> str:
    """Return one line of a text, cut, in which nothing is left that looks like a credential or is one of ours."""
    for name in SECRETS:
        if len(secret := os.environ.get(name, "")) >= 4:
            text = text.replace(secret, "…")
    text = re.sub(r"(?<=://)[^/\s@]*@", "…@", text)
    text = re.sub(r"[0-9a-fA-F]{40,}|\bwandb_v\d\w+", "…", text)
    return " ".join(text.split())[:300]


class Teller:
    """Writes to the run, which may not be reading: then a message is left out, for the next one says more."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor, self._told_at = descriptor, -TELL_EVERY

    def tell(self, status: Status, at_once: bool = False) -> None:
        """Write a status, unless the last one is younger than TELL_EVERY and this one can wait."""
        now = time.monotonic()
        if at_once or now - self._told_at >= TELL_EVERY:
            self._told_at = now
            with suppress(OSError):  # full, or nobody is there any more
                os.write(self._descriptor, status.to_line())

    def tell_last(self, status: Status, seconds: float = 0.5) -> None:
        """Write the last status; the run is reading now, if it is there."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                os.write(self._descriptor, status._replace(final=True).to_line())
                return
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                return


def silenced() -> int:
    """Let nothing of what is printed here go anywhere; return another descriptor of standard output as it was."""
    sys.stdout.flush()
    kept = os.dup(1)  # which other programs that a tracker starts do not inherit
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for each in (1, 2):
        os.dup2(nowhere, each)
    return kept


class Child:
    """One run shown in one tracker."""

    def __init__(self, request: Request, teller: Teller, backlog: Backlog | None = None) -> None:
        self.request = request
        self._teller, self._backlog = teller, backlog or Backlog()
        self._ended = threading.Event()  # the run has
        self._outcome = "died"
        self._where, self._problem = "", ""
        self._sent = self._refused = self._under_way = 0

    # -- the sending thread --

    def run(self) -> None:
        """Send all there is to send, until the run has ended and nothing is left."""
        for work in (self._watch, self._follow):
            threading.Thread(target=work, name=f"llmc_jax tracker {work.__name__}", daemon=True).start()
        sink = self._attempt("begin", self._begun)
        refusals = 0 if sink else GIVE_UP
        while not self._backlog.over:
            rows = self._backlog.take(KINDS[self.request.kind].at_once, LOOK_EVERY)
            if not rows:
                continue
            self._under_way = len(rows)
            taken = self._send(sink, rows) if sink and refusals < GIVE_UP else 0
            refusals = 0 if taken else refusals + 1
            self._sent, self._refused, self._under_way = self._sent + taken, self._refused + len(rows) - taken, 0
            self._teller.tell(self.status())
        if sink:
            self._attempt("end", lambda: sink.close(self._outcome))

    def _begun(self) -> Sink:
        sink = KINDS[self.request.kind].sink(self.request.target)
        self._where = without_secrets(sink.begin(self._facts()))
        self._teller.tell(self.status(), at_once=True)
        return sink

    def _facts(self) -> Facts:
        folder = Path(self.request.folder)
        metrics = folder / METRICS
        return facts_of(folder, first_line(metrics), line_at(metrics, self.request.start))

    def _send(self, sink: Sink, rows: list[Any]) -> int:
        """Hand rows to the tracker; return how many it took."""
        taken = sum(self._attempt("take a step", partial(_put, sink, row)) or 0 for row in rows)
        return taken if self._attempt("send", partial(_flushed, sink)) else 0

    def _attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """Return what an action returns, None where it fails; the first failure is what the run is told."""
        try:
            return action()
        except BaseException as error:  # whatever a tracker does, this goes on: an exit, too, and an interrupt
            if not self._problem:
                self._problem = without_secrets(f"cannot {what}: {type(error).__name__}: {error}")
                self._teller.tell(self.status(), at_once=True)
            return None

    def status(self) -> Status:
        """Return how it stands. Rows that wait are neither sent nor dropped yet."""
        return Status(self._where, self._sent, self._backlog.dropped + self._refused, self._problem)

    # -- the reading thread --

    def _follow(self) -> None:
        """Read the file as it grows, to its end once the run has ended."""
        follower = Follower(Path(self.request.folder) / METRICS, self.request.start)
        facts: Facts | None = None
        try:
            facts = self._facts()
            while True:
                ended = self._ended.is_set()
                for event in follower.new():
                    self._take(event, facts)
                if follower.begun > 1:
                    raise InputError(f"{follower.path}: is no longer the file that it was")
                if ended and not follower.behind:
                    break
                if not follower.behind:
                    self._ended.wait(LOOK_EVERY)
        except Exception as error:
            self._problem = self._problem or without_secrets(f"cannot read the run: {error}")
        self._backlog.hurry()
        self._backlog.close()

    def _take(self, event: dict[str, Any], facts: Facts) -> None:
        if event.get("event") == "end":
            self._outcome = str(event.get("outcome"))
        if (row := row_of(event, facts)) is not None:
            self._backlog.put(row)

    # -- the watching thread --

    def _watch(self) -> None:
        """Wait for the run's end, and then end this process in time, even where the tracker hangs."""
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        self._ended.set()
        self._backlog.hurry()
        time.sleep(self.request.limit)
        self.leave(f"was not done {self.request.limit:g} s after the run's end")

    def leave(self, problem: str = "") -> None:
        """Tell the run how it went, and end this process and all that it started. problem: what stopped it."""
        status, self._problem = self.status(), self._problem or problem
        dropped = status.dropped + self._backlog.left + self._under_way
        self._teller.tell_last(status._replace(dropped=dropped, problem=self._problem))
        if problem and os.getsid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


def _put(sink: Sink, row: Any) -> int:
    if row.text is not None:
        sink.text(row.step, row.time, "sample", row.text)
    else:
        sink.put(row.step, row.time, row.values)
    return 1


def _flushed(sink: Sink) -> bool:
    sink.flush()
    return True


def main(words: Sequence[str]) -> None:
    """Run the process that run/trackers.py starts; it does not return."""
    if len(words) != len(Request._fields):
        print("python -m llmc_jax.trackers: train.py starts it, with --tensorboard and such", file=sys.stderr)
        sys.exit(ExitCode.BAD_INPUT)
    with suppress(OSError):
        os.nice(NICE)
    child = Child(Request.of_words(words), Teller(silenced()))
    child.run()
    child.leave()
