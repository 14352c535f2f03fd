"""Rows that wait to be sent, never more than a bound: what is too much is dropped and counted.

Leaves out reading them (child.py) and sending them (sinks.py).
"""

import threading
from collections import deque

from llmc_jax.trackers.rows import Row

MOST = 10_000  # rows; a row is about 1 KB


class Backlog:
    """A queue between one thread that reads and one that sends.

    Where it is full, every other training step in it is dropped: of a slow tracker's curves the shape stays, to the
    end. Rows that must not be dropped wait in the file until there is room.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._rows: deque[Row] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._dropped = 0

    def put(self, row: Row) -> None:
        """Add a row; wait while nothing can be dropped for it. One that is added after the end counts as dropped."""
        with self._changed:
            while not self._closed and len(self._rows) >= self._most and not self._thin():
                self._changed.wait()
            if self._closed:
                self._dropped += 1
                return
            self._rows.append(row)
            self._changed.notify_all()

    def _thin(self) -> bool:
        """Drop every other row that may be dropped; return whether there was one."""
        droppable = [index for index, each in enumerate(self._rows) if each.may_drop]
        gone = set(droppable[::2])
        self._rows = deque(each for index, each in enumerate(self._rows) if index not in gone)
        self._dropped += len(gone)
        return bool(gone)

    def take(self, most: int, seconds: float) -> list[Row]:
        """Return up to so many rows, the oldest first; none if none comes within the time, or at the end."""
        with self._changed:
            if not self._rows and not self._closed:
                self._changed.wait(seconds)
            taken = [self._rows.popleft() for _ in range(min(most, len(self._rows)))]
            self._changed.notify_all()
            return taken

    def hurry(self) -> None:
        """Put the rows that must not be dropped first: there may be no time left for the others."""
        with self._changed:
            self._rows = deque(sorted(self._rows, key=lambda row: row.may_drop))

    def close(self) -> None:
        """Take no further rows; those that are here can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Return whether no row is left and none will come."""
        with self._changed:
            return self._closed and not self._rows

    @property
    def left(self) -> int:
        """Return how many rows wait."""
        with self._changed:
            return len(self._rows)

    @property
    def dropped(self) -> int:
        """Return how many rows were dropped here."""
        with self._changed:
            return self._dropped
