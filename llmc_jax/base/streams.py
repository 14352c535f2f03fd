"""Standard output and error: what is shown and not obeyed, and what happens when nobody reads any more.

Leaves out how a command line ends (base/kit.py).
"""

import codecs
import errno
import io
import os
import select
import sys
import threading
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


def escaped(text: str, keep: str = "", instead: str | None = None) -> str:
    """Return foreign text so that it can be shown: without what a terminal would obey or a font has no picture of.

    keep: characters that stay, such as newlines; all spaces do. instead: what stands for each of the others; None: its
    escape, as Python writes it.
    """

    def shown(c: str) -> str:
        if c.isprintable() or c in keep or unicodedata.category(c) == "Zs":
            return c
        return c.encode("unicode_escape").decode() if instead is None else instead

    return "".join(map(shown, text))


def open_missing_streams() -> None:
    """Let standard output and error that the caller's shell has closed (`>&-`) go nowhere; Python has None for them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  as long as the program


def escape_what_cannot_be_written() -> None:
    """Let standard output escape what its encoding lacks (ASCII, Latin-1), and let standard input hold any bytes.

    A name of a file that is not UTF-8 keeps its bytes.
    """
    codecs.register_error("escaped", _encoded_anyhow)
    for stream, errors in ((sys.stdout, "escaped"), (sys.stdin, "surrogateescape")):
        with suppress(io.UnsupportedOperation):  # of an input that was read already
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=errors)


def _encoded_anyhow(error: UnicodeError) -> tuple[bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    parts = (os.fsencode(c) if "\udc80" <= c <= "\udcff" else c.encode("ascii", "backslashreplace") for c in text)
    return b"".join(parts), error.end


def takes_ascii_only(encoding: str | None) -> bool:
    """Return whether an encoding lacks the characters of curves, bars and lines."""
    try:
        "⠿━─│└●…".encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return True
    return False


def print_error(line: str) -> None:
    """Print a line, or several, on standard error; nothing where nobody reads that any more (`2>&1 | head`).

    What flags and names of files hold is shown and not obeyed: control characters are escaped.
    """
    output = Output(sys.stderr, threading.Event())
    output.write(f"{escaped(line, keep=chr(10))}\n")
    output.flush()
    output.discard_rest()


def discard_rest(file: TextIO) -> None:
    """Point a lost stream to nowhere, so that what it still holds raises nothing at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


class Output:
    """A text stream whose loss (`train.py | head`, a full disk) sets `stop` instead of raising; then it is silent.

    plain: it counts as no terminal, whatever it is.
    """

    def __init__(self, file: TextIO, stop: threading.Event, plain: bool = False) -> None:
        self._file, self._stop = file, stop
        self._was_terminal = file.isatty()
        self._plain = plain
        self.error: OSError | None = None  # why it was lost

    @property
    def reader_left(self) -> bool:
        """Return whether nobody reads it any more: it is a pipe without a reader, or a terminal that was closed."""
        closed = self._was_terminal and self.error is not None and self.error.errno == errno.EIO
        return closed or isinstance(self.error, BrokenPipeError)

    def isatty(self) -> bool:
        """Return whether it is a terminal that may be written to as one."""
        return self._was_terminal and not self._plain

    def _guarded(self, action: Callable[[], Any]) -> None:
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error
                self._stop.set()

    def write(self, text: str) -> int:
        self._guarded(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """Hand on what was written; a reader that went away is noticed even where there is nothing to hand on."""
        self._guarded(self._file.flush)
        self._guarded(self._check_reader)

    def _check_reader(self) -> None:
        try:
            descriptor = self._file.fileno()
        except (OSError, ValueError):  # no file of the system's
            return
        poll = select.poll()
        poll.register(descriptor, 0)  # errors and hang-ups are told unasked
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def discard_rest(self) -> None:
        """Point the stream to nowhere where it was lost, as the function of this name does."""
        if self.error is not None:
            discard_rest(self._file)

    def __getattr__(self, name: str) -> Any:  # encoding, fileno …
        return getattr(self._file, name)
