"""Messages between a worker, its parent and the parent of rank 0: one JSON object a line, whose `is` says what it is.

One of asyncio's connections, as messages; and the clock by which silence is measured. Leaves out what the messages mean
(hub.py, parent.py, worker.py).

Anybody may connect to a port. So a line has a greatest length, small for who has not said who it is, and whatever is no
message raises NotAMessage and nothing else.
"""

import contextlib
import json
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

MAGIC = "llmc-jax"
PROTOCOL = 2
LONGEST = 1 << 26  # bytes of a message: facts and digests of thousands of processes
LONGEST_HELLO = 1 << 12  # of the first one, which says who comes

Message = dict[str, Any]


class NotAMessage(Exception):
    """Bytes that are no message of ours."""


def encode(kind: str, /, **fields: Any) -> bytes:
    """Return a message as a line."""
    return json.dumps({"is": kind, **fields}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes | bytearray) -> Message:
    """Return the message of a line. Raises NotAMessage."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotAMessage from error
    if not isinstance(message, dict) or not isinstance(message.get("is"), str):
        raise NotAMessage
    return message


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


def number(message: Message, name: str) -> int:
    """Return a field that must be a number from 0 on. Raises NotAMessage."""
    value = message.get(name)
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise NotAMessage
    return value


def seconds(message: Message, name: str) -> float:
    """Return a field that must be a time from 0 on, in seconds. Raises NotAMessage."""
    value = message.get(name)
    if isinstance(value, int | float) and 0 <= value < 1e12:  # so not NaN
        return float(value)
    raise NotAMessage


def text(message: Message, name: str) -> str:
    """Return a field that must be text. Raises NotAMessage."""
    value = message.get(name)
    if not isinstance(value, str):
        raise NotAMessage
    return value


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

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send a message, without waiting; nothing where the connection has ended."""
        self.send_bytes(encode(kind, **fields))

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
