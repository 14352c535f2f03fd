"""How a run is asked to stop by signals: Ctrl-C, SIGTERM, SIGHUP.

Leaves out what stopping does, and a reader of the output that went away (streams.py).

The request is an event that whoever works for long looks at. A second signal ends the program at once.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llmc_jax.base.errors import ExitCode

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
            words = "stopping after this step; a second signal exits at once and saves nothing"
            # in a thread of its own: where nobody reads the output, printing waits, and the second signal must not
            threading.Thread(target=say, args=(words,), name="llmc_jax stopping", daemon=True).start()
        elif number[0] != signal.SIGHUP and now - first > ONE_REQUEST:  # one terminal's end may send several
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # shows the cursor, which the progress bar hides
            os._exit(ExitCode.STOPPED)
