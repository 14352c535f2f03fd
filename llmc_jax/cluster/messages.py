"""Messages between a worker, its parent and the parent of rank 0: one JSON object a line, whose `is` says what it is.

Leaves out connections (links.py) and what the messages mean (hub.py, parent.py, worker.py).

Anybody may connect to a port. So a line has a greatest length, small for who has not said who it is, and whatever is no
message raises NotAMessage and nothing else.
"""

import json
from typing import Any

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
