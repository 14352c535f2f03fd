"""Messages between a worker, its parent and the parent of rank 0: one JSON object a line, whose `is` names its record.

One of asyncio's connections, as messages; and the clock by which silence is measured. Leaves out what the messages mean
(hub.py, parent.py, worker.py).

Anybody may connect to a port. So a line has a greatest length, small for who has not said who it is, and whatever is no
message raises NotAMessage and nothing else.
"""

import contextlib
import json
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from llmc_jax.base.errors import ExitCode
from llmc_jax.base.plain import Count, Seconds, from_json, hints_of, to_json

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

PROTOCOL = 3
LONGEST = 1 << 26  # bytes of a message: facts and digests of thousands of processes
LONGEST_HELLO = 1 << 12  # of the first one, which says who comes
CAUSES = {  # what a verdict may say of somebody
    "missing": "did not come {words}",
    "refused": "does not fit: {words}",
    "killed": "was killed by {words}",
    "failed": "has failed: {words}",
    "gone": "is gone: its connection broke, so its process or its host died",
    "unheard": "has been silent for {words}: its host or the network is down, or it was stopped",
    "silent": "has a worker that has been silent for {words}: it was stopped, or its interpreter hangs",
    "left": "has exited, while others wait for it at {words}",
    "absent": "has not reached {words}, where the others wait for it",
    "hung": "gets no further: {words}",
    "broken": "lost an exchange with the others, and which of them caused it is not known: {words}",
}
# How a worker ends: as agreed by all; by itself; since an exchange broke; by a signal.
Kind = Literal["end", "failed", "broken", "killed"]


class Hello(NamedTuple):
    """What a parent says first."""

    rank: Count
    size: Count
    job: str
    token: str
    host: str
    pid: Count
    protocol: Count = PROTOCOL
    magic: Literal["llmc-jax"] = "llmc-jax"


class Note(NamedTuple):
    """What needs no more words: the hub has accepted a process, all have ended, a parent is there."""

    what: Literal["accepted", "close", "tick"]


class Refused(NamedTuple):
    """Why the hub does not take a process in."""

    words: str


class Welcome(NamedTuple):
    """All have come: what the hub tells a parent, and, with the rest, a parent its worker."""

    hosts: tuple[str, ...]  # of each rank, as what follows
    pids: tuple[Count, ...] = ()  # of the parents
    rank: Count = 0
    launcher: str = ""
    address: str = ""
    peer_timeout: Seconds = 0.0


class Beat(NamedTuple):
    """Where a worker is, as it says itself, as its parent tells the hub, and as the hub tells all of rank 0's."""

    step: Count = 0
    phase: str = "start"
    seconds: Seconds = 0.0  # for which it has been there
    worker: Count = 0  # its pid
    age: Seconds = 0.0  # of what is known of it


class Meet(NamedTuple):
    """A process has come to a meeting."""

    name: str
    value: Any


class Met(NamedTuple):
    """All have come to it."""

    name: str
    values: tuple[Any, ...]  # by rank


class Folder(NamedTuple):
    """Which the run's folder is, as the user gave it, and the file of this process's events."""

    folder: str
    log: str


class Ended(NamedTuple):
    """How a worker has ended."""

    kind: Kind
    status: Count  # its exit status; of killed the signal
    words: str = ""
    at: Beat = Beat()


class Verdict(NamedTuple):
    """Who has ended a run, and why."""

    rank: Count
    host: str
    pid: Count
    cause: Annotated[str, CAUSES.__contains__]
    step: Count = 0
    phase: str = "start"
    words: str = ""
    also: tuple[Count, ...] = ()  # ranks of which the same holds

    @property
    def status(self) -> int:
        """Return the exit status: of its cause alone, since a stranger may have sent the verdict."""
        return ExitCode.BAD_INPUT if self.cause == "refused" else ExitCode.PEER_LOST

    @property
    def fields(self) -> dict[str, Any]:
        """Return what of it is worth recording."""
        return {**self._asdict(), "also": list(self.also), "status": self.status}


Message = Hello | Note | Refused | Welcome | Beat | Meet | Met | Folder | Ended | Verdict
BY_NAME: dict[str, Any] = {kind.__name__.lower(): kind for kind in get_args(Message)}


class NotAMessage(Exception):
    """Bytes that are no message of ours."""


def encode(message: Message) -> bytes:
    """Return a message as a line."""
    fields = {"is": type(message).__name__.lower(), **to_json(message)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes | bytearray) -> Message:
    """Return the message of a line; what another version's has beside our fields does not count. Raises NotAMessage."""
    try:
        found = json.loads(line)
        kind = BY_NAME[found["is"]]
        return from_json(kind, {name: found[name] for name in hints_of(kind) if name in found})
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise NotAMessage from error


class Lines:
    """Bytes as they come, put together to messages."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes; return the messages that they complete. Raises NotAMessage; then nothing more can be read."""
        *ends, rest = data.split(b"\n")
        messages = []
        for end in ends:
            self._take(end)
            messages.append(decode(self._rest))
            self._rest.clear()
        self._take(rest)
        return messages

    def _take(self, data: bytes) -> None:
        if len(self._rest) + len(data) > self.longest:
            raise NotAMessage
        self._rest += data


class Link:
    """A connection over which messages go both ways."""

    def __init__(self, reader: "StreamReader", writer: "StreamWriter", longest: int = LONGEST) -> None:
        self.lines = Lines(longest)
        self._reader, self._writer = reader, writer
        self._received: deque[Message] = deque()

    async def receive(self) -> Message | None:
        """Return the next message; None where the connection has ended, or what came is no message."""
        while not self._received:
            try:
                data = await self._reader.read(1 << 16)
                self._received.extend(self.lines.feed(data))
            except (OSError, NotAMessage):
                return None
            if not data:
                return None
        return self._received.popleft()

    def send(self, message: Message) -> None:
        """Send a message, without waiting; nothing where the connection has ended."""
        self.send_bytes(encode(message))

    def send_bytes(self, line: bytes) -> None:
        """Send a message that is encoded already."""
        if not self._writer.is_closing():
            self._writer.write(line)

    @property
    def other_end(self) -> str:
        """Return the address of the other end, as it stands before a colon and a port; empty where it has none."""
        name = self._writer.get_extra_info("peername")
        address = str(name[0]) if isinstance(name, tuple) else ""
        return f"[{address}]" if ":" in address else address

    def close(self) -> None:
        """Close the connection when what was sent is on its way."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()


class Clock:
    """Seconds, but for those in which this process itself stood still: its own pause is nobody else's silence."""

    def __init__(self, interval: float) -> None:
        self._longest = 3 * interval
        self._last = time.monotonic()
        self._paused = 0.0

    def tick(self) -> None:
        """Say that this process runs, about once in an interval."""
        now = time.monotonic()
        self._paused += max(0.0, now - self._last - self._longest)
        self._last = now

    def now(self) -> float:
        """Return the seconds on this clock."""
        return min(time.monotonic(), self._last + self._longest) - self._paused
