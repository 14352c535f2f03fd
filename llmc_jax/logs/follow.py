"""The events of a running run, as they are written. Leaves out what they mean."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import reason
from llmc_jax.logs.files import event_in, events_in

AT_ONCE = 1 << 17  # bytes that one reading takes, of which the events take ten times as many
LONGEST = 1 << 22  # bytes of a line; a longer one is left out
ANCHOR = 256  # bytes before the place that was read up to: where they have changed, it is another file


class Follower:
    """Reads a metrics.jsonl that grows, a piece at a time and in bounded memory.

    A line counts once it has its end. Where the file was cut back, or a resume has put another in its place, reading
    begins again with its first line. It holds no file open between two readings.
    """

    def __init__(self, path: str | Path, start: int = 0) -> None:
        """Follow a file that need not be there yet. start: bytes to pass over, at whose end a line begins."""
        self.path = Path(path)
        self.place = start  # bytes read so far, whole lines
        self.begun = 1  # times that it began with the first line: who keeps what was read drops it when this grows
        self.lines = 0  # read since then
        self.damaged = 0  # of them left out: no event, or longer than any
        self.first_damaged: int | None = None  # the number of the first of these, from 1
        self.torn = False  # the file ends within a line
        self.behind = False  # the last reading has not reached the file's end
        self._anchor = b""
        self._inside = False  # the place is inside a line that is too long

    def new(self) -> list[dict[str, Any]]:
        """Return the events since the last call, of AT_ONCE bytes or one longer line.

        Nothing where there is no file now. Raises InputError where it cannot be read.
        """
        try:
            data = self._read()
        except FileNotFoundError:
            self.behind = False
            return []
        except OSError as error:
            raise InputError(f"{self.path}: cannot read it: {reason(error)}") from error
        return self._events(self._whole_lines(data))

    def all(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the events up to the file's end, those of each reading together."""
        yield self.new()
        while self.behind:
            yield self.new()

    def _read(self) -> bytes:
        """Return what follows the place, from the beginning where what lies before it has changed."""
        with open(self.path, "rb", opener=_open_at_once) as file:
            file.seek(self.place - len(self._anchor))
            if file.read(len(self._anchor)) != self._anchor or file.seek(0, 2) < self.place:
                self.place, self._anchor, self._inside = 0, b"", False
                self.begun, self.lines, self.damaged, self.first_damaged = self.begun + 1, 0, 0, None
            file.seek(self.place)
            data = file.read(AT_ONCE)
            if len(data) == AT_ONCE and b"\n" not in data:  # a long sample
                data += file.read(LONGEST - AT_ONCE)
            self.behind = len(data) in (AT_ONCE, LONGEST)
            return data

    def _whole_lines(self, data: bytes) -> bytes:
        """Move the place behind the last whole line of what was read, and return all of these."""
        end = data.rfind(b"\n") + 1
        self.torn = end < len(data)
        if not end and self.behind:  # one line, longer than all that is read at once: it is passed over in pieces
            self._move(data)
            self._inside = True
            return b""
        lines = data[:end]
        self._move(lines)
        if self._inside and end:
            self._inside = False
            lines = b"\n" + lines[lines.find(b"\n") + 1 :]  # an empty one in its place
        return lines

    def _move(self, data: bytes) -> None:
        self.place += len(data)
        self._anchor = (self._anchor + data[-ANCHOR:])[-ANCHOR:]

    def _events(self, lines: bytes) -> list[dict[str, Any]]:
        found = events_in(lines.split(b"\n")[:-1])
        events = [event for event in found if event is not None]
        self.damaged += len(found) - len(events)
        if self.damaged and self.first_damaged is None:
            self.first_damaged = self.lines + found.index(None) + 1
        self.lines += len(found)
        return events


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a pipe without a writer would else be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


# ----- the newest events of a long file -----------------------------------------------------------------------------

TAIL = 1 << 16  # bytes at the end that are read as they stand, about 200 steps
STARTS = ("start", "resume")


def recent(path: str | Path, kinds: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return the last start or resume, the events of some kinds since then, and the last TAIL bytes' events.

    A start that no step follows does not count: the events before it are still the newest. In order; nothing where
    there is no file. Other lines are passed over and not parsed, so that a long file takes little time. Raises
    InputError where it cannot be read.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            lines = _lines_backwards(file, file.seek(0, 2))
            next(lines)  # which has no end
            events = [event_in(line) for line in _chosen(lines, kinds)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {reason(error)}") from error
    return [event for event in reversed(events) if event is not None]


def _chosen(lines: Iterable[bytes], kinds: Iterable[str]) -> Iterator[bytes]:
    """Yield of the lines, the last one first, those that `recent` returns."""
    starts, wanted = (tuple(map(_beginning, each)) for each in (STARTS, (*STARTS, *kinds)))
    room, trained = TAIL, False
    for line in lines:
        trained |= line.startswith(_beginning("train")) or room <= 0
        if room > 0 or line.startswith(wanted):
            yield line
            if line.startswith(starts) and trained:
                return
            room -= len(line)


def _beginning(kind: str) -> bytes:
    """Return how the line of an event of a kind begins, as run/folder.py writes it."""
    return b'{"event": "%s"' % kind.encode()


def _lines_backwards(file: Any, place: int) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first: it has no end, and is often empty. Of one that is longer than
    LONGEST, the end.
    """
    rest = b""  # the end of a line whose beginning is in the piece before
    while place:
        begin = max(0, place - TAIL)
        file.seek(begin)
        first, *lines = (file.read(place - begin) + rest).split(b"\n")
        yield from reversed(lines)
        rest, place = first[-LONGEST:], begin
    yield rest
