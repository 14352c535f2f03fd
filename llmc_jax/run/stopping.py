"""How a run is asked to stop: Ctrl-C, SIGTERM, SIGHUP, or a reader of its output that went away.

Leaves out what stopping does.

The request is an event that whoever works for long looks at. A second signal ends the program at once.
"""

import errno
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from llmc_jax.errors import ExitCode, InputError, printable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one where the terminal is closed
ONE_REQUEST = 0.5  # seconds within which signals count as one: `timeout`, for one, signals its child and then its group


@contextmanager
def stop_on_signals(stop: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
    """Within the block the first signal sets `stop` and says so; the second ends the program at once.

    A signal that the caller's shell has switched off (nohup, jobs in the background) stays so. Outside the main thread,
    where Python allows no handlers, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python runs its handlers between two of its own instructions, so not while the main thread waits for a step to be
    # computed. The byte that the interpreter writes into this pipe comes at once, and a thread waits for it.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    heard = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in heard}
    pipe_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reader, stop, say), name="llmc_jax signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(pipe_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)  # the watcher then reads the end and returns
        watcher.join()
        os.close(reader)


def _watch(reader: int, stop: threading.Event, say: Callable[[str], None]) -> None:
    first: float | None = None
    while number := os.read(reader, 1):
        if number[0] not in SIGNALS:
            continue
        stop.set()
        now = time.monotonic()
        if first is None:
            first = now
            words = "stopping after this step; once more ends at once and saves nothing"
            # in a thread of its own: where nobody reads the output, printing waits, and the second signal must not
            threading.Thread(target=say, args=(words,), name="llmc_jax stopping", daemon=True).start()
        elif number[0] != signal.SIGHUP and now - first > ONE_REQUEST:  # one terminal's end may send several
            _leave()


def _leave() -> None:
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # shows the cursor, which the progress bar hides
    os._exit(ExitCode.STOPPED)


def open_missing_streams() -> None:
    """Standard output and error that the caller's shell has closed (`>&-`) go nowhere; Python has None for them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  as long as the program


def exit_status(program: str, run: Callable[[], int | None]) -> int:
    """Run a command line and return its exit status: what `run` returns, where nothing (None) that of success.

    Bad input, and what the system refuses, is one line on standard error that begins with the program's name. A reader
    of the output that went away is no error.
    """
    try:
        status = run()
        sys.stdout.flush()
        return int(status or ExitCode.DONE)
    except BrokenPipeError:
        discard_rest(sys.stdout)
        return ExitCode.DONE
    except (InputError, OSError) as error:
        print_error(f"{program}: {error}")
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print_error(f"{program}: stopped")
        return ExitCode.STOPPED


def print_error(line: str) -> None:
    """A line, or several, on standard error; nothing where nobody reads that any more (`2>&1 | head`).

    What flags and names of files hold is shown and not obeyed: control characters are escaped.
    """
    output = Output(sys.stderr, threading.Event())
    output.write(f"{printable(line, keep=chr(10))}\n")
    output.flush()
    output.discard_rest()


def discard_rest(file: TextIO) -> None:
    """Point a lost stream to nowhere, so that what it still holds raises nothing at exit.

    A command calls it for standard output on BrokenPipeError: the reader (`| head`) has seen enough.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


class Output:
    """A text stream whose loss (`train.py | head`, a full disk) sets `stop` instead of raising; then it is silent."""

    def __init__(self, file: TextIO, stop: threading.Event) -> None:
        self._file, self._stop = file, stop
        self._was_terminal = file.isatty()
        self.error: OSError | None = None  # why it was lost

    @property
    def reader_left(self) -> bool:
        """Whether it was lost because nobody reads it any more: a pipe without a reader, a terminal that was closed."""
        closed = self._was_terminal and self.error is not None and self.error.errno == errno.EIO
        return closed or isinstance(self.error, BrokenPipeError)

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

    def __getattr__(self, name: str) -> Any:  # encoding, isatty, fileno …
        return getattr(self._file, name)
