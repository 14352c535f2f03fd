"""One of asyncio's connections, as messages; and the clock by which silence is measured.

Leaves out what is said over it (hub.py, parent.py).
"""

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

from llmc_jax.cluster.messages import LONGEST, Lines, Message, NotAMessage, encode


class Link:
    """A connection over which messages go both ways."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, longest: int = LONGEST) -> None:
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
