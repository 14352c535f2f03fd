"""A worker's side: it meets the others, tells where it is, and says how it ends.

Leaves out its parent (parent.py), to whom it talks over a socket that it inherits, and what the run does with it.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import MutableMapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn

from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.cluster import messages
from llmc_jax.cluster.judge import LIMITS, beat_interval
from llmc_jax.cluster.messages import Beat, Ended, Kind, Message, Note, Welcome

VARIABLE = "LLMC_JAX_GROUP"  # of the environment: the number of the socket
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Group:
    """All processes of a run, seen from one of them; made without arguments, a process alone. Any thread may use it.

    Where another one fails, the parent ends this process: what returns, returns rightly.
    """

    rank = 0
    size = 1
    hosts: tuple[str, ...] = (socket.gethostname(),)  # of each rank
    local_rank = 0  # among those with the same host name
    local_size = 1
    launcher = ""
    address = "127.0.0.1"  # of rank 0's host, as it is reached from here; a colon and a port may follow
    peer_timeout = 0.0
    _connection: socket.socket | None = None  # to the parent

    def __init__(self, connection: socket.socket | None = None, welcome: Welcome | None = None) -> None:
        if connection is None or welcome is None:
            return
        self._connection = connection
        self.rank, self.size, self.hosts = welcome.rank, len(welcome.hosts), welcome.hosts
        beside = [rank for rank in range(self.size) if self.hosts[rank] == self.hosts[self.rank]]
        self.local_rank, self.local_size = beside.index(self.rank), len(beside)
        self.launcher, self.address = welcome.launcher, welcome.address
        self.peer_timeout = welcome.peer_timeout
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._place = ("start", 0, time.monotonic())
        self._tell = False  # at once
        self._met: dict[str, Future[list[Any]]] = {}
        self._all_left = threading.Event()

    def phase(self, name: str, step: int) -> None:
        """Say where the main thread has got to; the limit of that phase counts from now."""
        if self._connection is None:
            return
        assert name in LIMITS and step >= 0, (name, step)
        with self._changed:
            if name != self._place[0]:
                self._tell = True
                self._changed.notify()
            self._place = (name, step, time.monotonic())

    def meet(self, name: str, value: Any = None) -> list[Any]:
        """Wait until all have reached the point of this name; return all JSON values by rank. Each name once."""
        if self._connection is None:
            return [value]
        with self._changed:
            assert name not in self._met, name
            met = self._met[name] = Future()
        self._send(messages.Meet(name, value))
        values = met.result()
        self._met[name] = Future()  # the name stays taken, the values need not stay
        return values

    def folder(self, path: str, log: str) -> None:
        """Say which the run's folder is, for messages, and the file of this process's events, for the last one."""
        if self._connection is not None:
            self._send(messages.Folder(path, os.path.abspath(log)))

    def leave(self, status: int, words: str = "", kind: Kind = "end") -> NoReturn:
        """End this process with a status, at once.

        kind: end, as all agreed, so this waits until all have said so; failed, this process alone; broken, because an
        exchange with others broke, so probably one of them is the cause. words: why.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        if self._connection is not None:
            self._send(self._where())
            self._send(Ended(kind, int(status), words))
            if kind == "end":
                self._all_left.wait()
        os._exit(status)

    def begin(self, lines: messages.Lines) -> None:
        """Begin to send beats, and to listen. lines: what the parent has sent in part."""
        for name, work in (("beats", self._beat), ("messages", partial(self._listen, lines))):
            threading.Thread(target=work, name=f"llmc_jax {name}", daemon=True).start()

    def _send(self, message: Message) -> None:
        assert self._connection is not None
        line = messages.encode(message)
        with self._sending:
            try:
                self._connection.sendall(line)
            except OSError:
                os._exit(ExitCode.PEER_LOST)  # without its parent nobody would end this process

    def _where(self) -> Beat:
        phase, step, since = self._place
        return Beat(step, phase, time.monotonic() - since)

    def _beat(self) -> None:
        while True:
            self._send(self._where())
            with self._changed:
                self._changed.wait_for(lambda: self._tell, beat_interval(self.peer_timeout))
                self._tell = False

    def _listen(self, lines: messages.Lines) -> None:
        """Take in what the parent sends; end with it, or where it stands still although it is there."""
        assert self._connection is not None
        again = False
        while True:
            self._connection.settimeout(3 * beat_interval(self.peer_timeout) if again else self.peer_timeout)
            try:
                data = self._connection.recv(1 << 16)
                received = lines.feed(data)
            except TimeoutError:
                if not again:  # this process may have stood still itself
                    again = True
                    continue
                data = b""
            except (OSError, messages.NotAMessage):
                data = b""
            if not data:
                os._exit(ExitCode.PEER_LOST)
            again = False
            for message in received:
                if isinstance(message, messages.Met):
                    self._met[message.name].set_result(list(message.values))
                elif message == Note("close"):
                    self._all_left.set()


ALONE = Group()


def joined(environ: MutableMapping[str, str]) -> Group | None:
    """Return the group where this process is a worker, None where it is not; what it starts is none.

    environ: os.environ. Raises InputError.
    """
    number = environ.pop(VARIABLE, "")
    if not number:
        return None
    die_with_parent()
    lines = messages.Lines()
    received: list[Message] = []
    try:
        connection = socket.socket(fileno=int(number))
        connection.set_inheritable(False)
        while not received:
            data = connection.recv(1 << 16)
            if not data:
                os._exit(ExitCode.PEER_LOST)
            received = lines.feed(data)
    except (OSError, ValueError, messages.NotAMessage) as error:
        raise InputError(
            f"{VARIABLE}={number} is no socket; the program sets it for its own processes: unset it"
        ) from error
    welcome = next(message for message in received if isinstance(message, Welcome))
    group = Group(connection, welcome)
    group.begin(lines)
    return group


def die_with_parent() -> None:
    """Let Linux end this process when its parent ends, also where no thread of it runs any more."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ExitCode.PEER_LOST)
