"""The parent of a worker: it meets the other parents, starts the worker, and ends it when the run cannot continue.

Leaves out where parents meet (hub.py), who is to blame (judge.py) and the worker's side (worker.py). JAX's runtime ends
a process without a word when another one is lost, so the worker cannot say what has happened: its parent, which has no
JAX, does, and owns the exit status.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.streams import print_error
from llmc_jax.cluster import messages
from llmc_jax.cluster.hub import SECRET, Address, Hub, in_words
from llmc_jax.cluster.judge import Peer, beat_interval, end_of, judge_hub, line_of
from llmc_jax.cluster.launchers import Member
from llmc_jax.cluster.messages import Beat, Clock, Ended, Link, Message, Note, Verdict
from llmc_jax.cluster.worker import VARIABLE

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_TO_END = 5.0  # for a worker that has said that it ends, or was killed
SECONDS_BETWEEN_TRIES = 0.2
NO_HUB = "something else listens there, or it has just ended"


def supervise(member: Member, peer_timeout: float, command: list[str] | None = None) -> int:
    """Run one process of a run of several; return its exit status.

    command: the worker's, the same as this process's own by default. peer_timeout: seconds.
    """
    parent = Parent(member, peer_timeout, command or [sys.executable, *sys.orig_argv[1:]])
    try:
        return asyncio.run(parent.run())
    except InputError as error:
        print_error(f"train.py: rank {member.rank}: {error}")
        return ExitCode.BAD_INPUT


class Event(NamedTuple):
    """What a parent has to deal with."""

    kind: str
    content: Any = None


class Parent:
    """A parent. Everything that happens to it comes as an event, one after the other."""

    def __init__(self, member: Member, timeout: float, command: list[str]) -> None:
        self.member, self.timeout, self.command = member, timeout, command
        self.interval = beat_interval(timeout)
        self.clock = Clock(self.interval)
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.hub: Hub | None = None
        self.link: Link | None = None  # to the hub
        self.rank_0 = Peer(0, member.host, 0, heard=self.clock.now())
        self.worker: Worker | None = None
        self.signals = 0
        self.verdict: Verdict | None = None
        self.done = False

    async def run(self) -> int:
        """Go through the run; return the exit status. Raises InputError."""
        tasks: list[asyncio.Task[None]] = []
        with self._heard_signals():
            try:
                if self.member.rank == 0:
                    self.hub = Hub(self.member, self.timeout)
                    await self.hub.open()
                tasks = [asyncio.create_task(self._follow_hub()), asyncio.create_task(self._tick())]
                while not self.done:
                    await self._deal_with(await self.events.get())
                return await self._finish()
            finally:
                if self.worker:
                    self.worker.kill()
                for task in tasks:
                    task.cancel()

    # what happens

    @contextmanager
    def _heard_signals(self) -> Iterator[None]:
        """Within the block signals are events. One that the caller's shell has switched off (nohup) stays so."""
        loop = asyncio.get_running_loop()
        heard = [one for one in SIGNALS if signal.getsignal(one) not in (signal.SIG_IGN, None)]
        for one in heard:
            loop.add_signal_handler(one, self.events.put_nowait, Event("signal", one))
        try:
            yield
        finally:
            for one in heard:
                loop.remove_signal_handler(one)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.interval)
            self.clock.tick()
            self.events.put_nowait(Event("tick"))

    async def _follow_hub(self) -> None:
        try:
            found = await self._reach_hub()
        except Exception as error:  # a mistake of ours too: nobody else would hear of it
            self.events.put_nowait(Event("error", error))
            return
        if isinstance(found, Verdict):
            self.events.put_nowait(Event("hub", found))
            return
        self.link, self.rank_0.heard = found, self.clock.now()
        while message := await found.receive():
            self.events.put_nowait(Event("hub", message))
        self.events.put_nowait(Event("hub gone"))

    async def _reach_hub(self) -> Link | Verdict:
        """Return the connection to the hub once it has accepted this process; a verdict where the run ends before.

        Raises InputError if it is another run's.
        """
        if self.hub:
            link = await self.hub.own_link()
            await self._greet(link, self.hub.token)
            return link
        problem = f"{self.member.folder} holds no address of it" if self.member.folder else "no answer in time"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                while True:
                    async for host, port, token in self._places():
                        try:
                            return await self._try(host, port, token)
                        except OSError as error:
                            problem = f"at {host}:{port}: {in_words(error)}"
                        except UnicodeError as error:
                            raise InputError(f"-ps {host}: cannot be the name of a host") from error
                    await asyncio.sleep(min(SECONDS_BETWEEN_TRIES, self.interval))
        words = f"within {self.timeout:g} s (--peer-timeout); {problem}"
        return Verdict(0, self.member.host, 0, "missing", words=words)

    async def _places(self) -> AsyncIterator[tuple[str, int, str]]:
        """Yield hosts, ports and tokens with which rank 0 may be reached."""
        if not self.member.folder:
            yield self.member.host, self.member.port, os.environ.get(SECRET, "")
        elif address := await asyncio.to_thread(Address.read, self.member.folder):
            beside = ["127.0.0.1"] if address.host == socket.gethostname() else []
            for host in [*beside, *address.hosts]:
                yield host, address.port, address.token

    async def _try(self, host: str, port: int, token: str) -> Link | Verdict:
        """Return a connection that the hub has accepted, or a verdict. Raises OSError if not, else as _reach_hub."""
        limit = max(1.0, self.timeout / 4)
        async with asyncio.timeout(limit):  # a TimeoutError is an OSError
            link = Link(*await asyncio.open_connection(host, port))
        try:
            # of an address in a folder something else may listen there that never answers; else rank 0 may take long
            async with asyncio.timeout(limit if self.member.folder else self.timeout):
                answer = await self._greet(link, token)
        except BaseException:
            link.close()
            raise
        if isinstance(answer, Note):
            return link
        link.close()
        if isinstance(answer, Verdict):
            return answer
        if self.member.folder:  # an address of an earlier run, at which another one listens by now
            raise OSError(answer.words)
        raise InputError(f"{host}:{port}: {answer.words}; give this run another address: -ps {host}:PORT")

    async def _greet(self, link: Link, token: str) -> Note | messages.Refused | Verdict:
        """Say who comes; return the answer. Raises OSError if there is none that can be understood."""
        member = self.member
        link.send(messages.Hello(member.rank, member.size, member.job, token, socket.gethostname(), os.getpid()))
        answer = await link.receive()
        if not isinstance(answer, Note | messages.Refused | Verdict):
            raise OSError(NO_HUB)
        return answer

    # what follows from it

    async def _deal_with(self, event: Event) -> None:
        match event.kind:
            case "hub":
                await self._hear_hub(event.content)
            case "hub gone":
                self.rank_0.gone = True
                self._judge_hub()
            case "error":
                raise event.content
            case "worker":
                self._hear_worker(event.content)
            case "exit":
                self._tell_end(end_of(event.content))
            case "signal":
                self._forward(event.content)
            case "tick":
                if self.hub:
                    self.hub.tick()
                self._beat()
                self._judge_hub()

    async def _hear_hub(self, message: Message) -> None:
        self.rank_0.heard = self.clock.now()
        match message:
            case messages.Welcome():
                await self._begin(message)
            case messages.Met() if self.worker:
                self.worker.link.send(message)
            case Beat():
                self.rank_0.worker, self.rank_0.step, self.rank_0.phase = message.worker, message.step, message.phase
            case Verdict():
                self._conclude(message)
            case Note("close"):
                self.done = True

    async def _begin(self, welcome: messages.Welcome) -> None:
        self.rank_0.host, self.rank_0.pid = welcome.hosts[0], welcome.pids[0]
        assert self.link
        self.worker = await Worker.start(self.command, self.events, self.clock.now())
        self.worker.link.send(
            welcome._replace(
                rank=self.member.rank, launcher=self.member.launcher, address=self.link.other_end or "127.0.0.1",
                peer_timeout=self.timeout,
            )
        )  # fmt: skip

    def _hear_worker(self, message: Message) -> None:
        worker = self.worker
        assert worker
        match message:
            case Beat():
                worker.step, worker.phase, worker.heard = message.step, message.phase, self.clock.now()
                worker.since = worker.heard - message.seconds
            case messages.Meet() if self.link:
                self.link.send(message)
            case messages.Folder():
                worker.folder, worker.log = message
            case Ended():
                self._tell_end(message)

    def _tell_end(self, ended: Ended) -> None:
        """Tell how the worker ends: what it said itself, else how it exited."""
        worker = self.worker
        if worker and self.link and not worker.ended:
            worker.ended = ended
            self.link.send(ended._replace(at=Beat(worker.step, worker.phase, worker=worker.process.pid)))

    def _forward(self, signal_number: int) -> None:
        self.signals += 1
        if self.worker:
            self.worker.signal(signal_number)
        elif self.link:  # all are told, and the verdict comes back
            self.link.send(Ended("killed", signal_number))
        else:
            name = signal.Signals(signal_number).name
            self._conclude(Verdict(self.member.rank, socket.gethostname(), os.getpid(), "killed", words=name))

    def _beat(self) -> None:
        worker, now = self.worker, self.clock.now()
        if worker:
            worker.link.send(Note("tick"))
        if self.link and worker:
            age, seconds = max(0.0, now - worker.heard), max(0.0, now - worker.since)
            self.link.send(Beat(worker.step, worker.phase, seconds, worker.process.pid, age))
        elif self.link:
            self.link.send(Beat())

    def _judge_hub(self) -> None:
        if self.link and not self.hub and (verdict := judge_hub(self.rank_0, self.clock.now(), self.timeout)):
            self.link.send(verdict)  # should it come back
            self._conclude(verdict)

    def _conclude(self, verdict: Verdict) -> None:
        if not self.done:
            self.verdict, self.done = verdict, True

    # the end

    async def _finish(self) -> int:
        """End the worker, say why, and part from the others; return the exit status."""
        if self.worker:
            await self.worker.end(at_once=self.verdict is not None)
        if self.verdict:
            self.tell(self.verdict)
        if self.link:
            self.link.close()
        if self.hub:
            await self.hub.part()
        return self.status

    @property
    def status(self) -> int:
        """Return the exit status: the worker's own, where it ended by agreement of all or by its own fault."""
        ended = self.worker.ended if self.worker else None
        if ended and (ended.kind == "failed" or (ended.kind == "end" and not self.verdict)):
            return ended.status
        if self.signals > 1 or (self.signals and (ended is None or ended.kind == "killed")):
            return ExitCode.STOPPED
        return self.verdict.status if self.verdict else ExitCode.STOPPED

    def tell(self, verdict: Verdict) -> None:
        """Say on standard error, and in the run's folder, what has ended the run."""
        worker = self.worker
        if not (worker and worker.ended and worker.ended.kind == "failed"):  # which has said it itself
            print_error(f"train.py: rank {self.member.rank}: {line_of(verdict, worker.folder if worker else '')}")
        if worker and worker.log:
            event = {"event": "lost", **verdict.fields, "time": round(time.time(), 3)}
            flags = os.O_WRONLY | os.O_APPEND  # if it is there
            with contextlib.suppress(OSError), open(os.open(worker.log, flags), "ab", buffering=0) as file:
                file.write(json.dumps(event).encode() + b"\n")


class Worker:
    """A worker's process and what it has said."""

    def __init__(self, process: asyncio.subprocess.Process, link: Link, now: float) -> None:
        self.process, self.link = process, link
        self.step, self.phase, self.since, self.heard = 0, "start", now, now
        self.folder = self.log = ""  # the run's, as the user gave it; the file of this process's events
        self.ended: Ended | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, command: list[str], events: asyncio.Queue[Event], now: float) -> "Worker":
        """Start a worker in a session of its own, so that a terminal's signals reach its parent alone."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command, env={**os.environ, VARIABLE: str(theirs.fileno())}, pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        worker = cls(process, Link(*await asyncio.open_connection(sock=ours)), now)
        follow = asyncio.create_task(worker._follow(events))
        worker._tasks = [follow, asyncio.create_task(worker._wait(events, follow))]
        return worker

    async def _follow(self, events: asyncio.Queue[Event]) -> None:
        while message := await self.link.receive():
            events.put_nowait(Event("worker", message))

    async def _wait(self, events: asyncio.Queue[Event], follow: asyncio.Task[None]) -> None:
        code = await self.process.wait()
        await asyncio.wait([follow], timeout=SECONDS_TO_END)  # its last words come first
        events.put_nowait(Event("exit", code))

    def signal(self, signal_number: int) -> None:
        """Forward a signal."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal_number)

    def kill(self) -> None:
        """Kill it, and what it has started."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self, at_once: bool) -> None:
        """Wait until it has ended: killed, or by itself since it has said so, though not for ever."""
        if at_once:
            self.kill()
        else:
            self.link.send(Note("close"))
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), SECONDS_TO_END)
            self.kill()
        self.link.close()
        for task in self._tasks:
            task.cancel()
