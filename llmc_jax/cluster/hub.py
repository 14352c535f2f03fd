"""The parent of rank 0 as the place where all parents meet: who has come, meetings, beats, and the verdict.

Leaves out who is to blame (judge.py) and the parents' side (parent.py). Strangers may connect and send what they like.
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import write_atomic
from llmc_jax.base.plain import from_json
from llmc_jax.cluster import messages
from llmc_jax.cluster.judge import Meeting, Peer, beat_interval, judge, judge_start
from llmc_jax.cluster.launchers import Member
from llmc_jax.cluster.messages import Clock, Ended, Hello, Link, Message, NotAMessage, Note, Verdict

ADDRESS_FILE = "rank_0_address.json"  # in the folder of -pf, until all have come
SECONDS_TO_SAY_WHO = 10.0  # for whoever connects: it is said at once
STRANGERS = 256  # that may be connected at a time and have not said who they are
SECRET = "LLMC_JAX_SECRET"  # environment variable: without its value no process takes a rank's place
MOST_MEETINGS = 16  # of a rank that are open at a time: it has one for each thread that waits
SECONDS_TO_PART = 5.0  # for which the hub stays until the others have heard the last word


def stranger_to(hello: Hello, member: Member, token: str) -> str:
    """Return why a process comes from another run, empty if it does not."""
    if hello.token != token:
        return f"rank 0 of another run answers there, or one with another {SECRET}"
    if hello.job != member.job:
        job = f"{member.job or 'without a name'}, this one is {hello.job or 'without'}"
        return f"another run answers there (job {job})"
    return ""


def misfit(hello: Hello, size: int, peers: Collection[Peer]) -> str:
    """Return why no run of so many can begin with a process, empty if one can. peers: that have come already."""
    rank = hello.rank
    who = f"rank {rank} on {hello.host} (process {hello.pid})"
    if hello.protocol != messages.PROTOCOL:
        return f"{who} has another version of this program; install the same one everywhere"
    if hello.size != size:
        return f"it was started as one of {hello.size} processes, rank 0 as one of {size}; give all the same -pn"
    if rank >= size:
        return f"ranks count from 0 to {size - 1}; correct -pr"
    other = next((peer for peer in peers if peer.rank == rank), None)
    if other is None:
        return ""
    return f"another rank {rank} has come from {other.host} (process {other.pid}); give each process a -pr of its own"


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens: on this machine alone where the host's name means it, else on all its networks.

    Raises InputError, naming the port.
    """
    own = host == "localhost" or host.startswith("127.")
    try:
        if not own and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("127.0.0.1" if own else "", port), backlog=1024)
    except OSError as error:
        raise InputError(
            f"port {port}, at which rank 0 waits for the others, cannot be opened ({in_words(error)}); "
            f"give all processes another one: -ps {host or 'HOST'}:PORT"
        ) from error


class Hub:
    """Where all parents meet: `open` it, let it `tick`, and `part`. Each connection is served by itself.

    All of them are told how the run ends, this process by its own connection.
    """

    def __init__(self, member: Member, timeout: float) -> None:
        self.member, self.timeout = member, timeout
        self.token = os.urandom(16).hex() if member.folder else os.environ.get(SECRET, "")
        self.clock = Clock(beat_interval(timeout))
        self.peers: dict[int, Peer] = {}
        self.links: dict[int, Link] = {}
        self.meetings: dict[str, tuple[float, dict[int, Any]]] = {}
        self.complete = False  # all have come
        self.verdict: Verdict | None = None
        self.closed = False  # all have ended as agreed
        self._began = self.clock.now()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen, and tell where if there is a folder for it. Raises InputError."""
        listener = listening_socket(self.member.host, self.member.port)
        self._server = await asyncio.start_server(self._connected, sock=listener)
        if self.member.folder:
            await asyncio.to_thread(self._write_address, self.member.folder, listener.getsockname()[1])

    async def own_link(self) -> Link:
        """Return the connection of this process's own parent."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs)
        self._connected(reader, writer)
        return Link(*await asyncio.open_connection(sock=ours))

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._serving) - len(self.links) >= STRANGERS:  # they must not take all file descriptors
            writer.close()
            return
        task = asyncio.create_task(self.serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one connection from its hello to its end, or to that of the run."""
        link = Link(reader, writer, messages.LONGEST_HELLO)
        # asyncio would print a traceback for each that is cancelled
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout(min(SECONDS_TO_SAY_WHO, self.timeout)):
                hello = await link.receive()
            if isinstance(hello, Hello) and self._admit(hello, link):
                with contextlib.suppress(NotAMessage):
                    while message := await link.receive():
                        self._heard(self.peers[hello.rank], message)
                if self.links[hello.rank] is link:
                    self._leave(hello.rank)
        link.close()

    def _admit(self, hello: Hello, link: Link) -> bool:
        """Take a process in, or say why not."""
        if words := stranger_to(hello, self.member, self.token):
            link.send(messages.Refused(words))
            return False
        before = self.links.get(hello.rank)
        there = self.peers.get(hello.rank)
        again = there is not None and not self.complete and (hello.host, hello.pid) == (there.host, there.pid)
        others = [peer for peer in self.peers.values() if not (again and peer.rank == hello.rank)]
        if words := misfit(hello, self.member.size, others):
            verdict = Verdict(hello.rank, hello.host, hello.pid, "refused", words=words)
            if not self.complete:  # a run in progress needs no further process
                self.conclude(verdict)
            link.send(verdict)
            return False
        if self.verdict:
            link.send(self.verdict)
            return False
        if before:  # of the same process, which had no answer in time
            before.close()
        link.lines.longest = messages.LONGEST
        now = self.clock.now()
        self.peers[hello.rank] = Peer(hello.rank, hello.host, hello.pid, heard=now, beat=now, since=now)
        self.links[hello.rank] = link
        link.send(Note("accepted"))
        if len(self.peers) == self.member.size:
            self._begin(now)
        return True

    def _begin(self, now: float) -> None:
        self.complete = True
        self._remove_address()
        peers = [self.peers[rank] for rank in range(self.member.size)]
        for peer in peers:
            peer.heard = peer.beat = peer.since = now
        self._send_all(messages.Welcome(tuple(peer.host for peer in peers), tuple(peer.pid for peer in peers)))

    def _heard(self, peer: Peer, message: Message) -> None:
        """Take a message in. Raises NotAMessage."""
        now = peer.heard = self.clock.now()
        match message:
            case messages.Beat():
                peer.worker, peer.step, peer.phase = message.worker, message.step, message.phase
                peer.beat, peer.since = now - message.age, now - message.seconds
            case messages.Meet():
                self._meet(peer.rank, message.name, message.value)
            case Ended():
                peer.ended, peer.ended_at = message, now
                peer.worker, peer.step, peer.phase = message.at.worker, message.at.step, message.at.phase
                self._judge()
            case Verdict():
                self.conclude(message)

    def _meet(self, rank: int, name: str, value: Any) -> None:
        """Take a rank's value of a meeting. Raises NotAMessage where it has too many that others have not reached."""
        if sum(rank in values for _, values in self.meetings.values()) >= MOST_MEETINGS:
            raise NotAMessage
        _, values = self.meetings.setdefault(name, (self.clock.now(), {}))
        values.setdefault(rank, value)
        if len(values) == self.member.size:
            del self.meetings[name]
            self._send_all(messages.Met(name, tuple(values[rank] for rank in range(self.member.size))))

    def _leave(self, rank: int) -> None:
        """Note that a connection has ended, with a goodbye where all is over."""
        del self.links[rank]
        if not self.complete:
            del self.peers[rank]
        elif not (self.closed or self.verdict):
            self.peers[rank].gone = True
            self._judge()

    def _judge(self) -> None:
        if self.verdict or self.closed:
            return
        now, peers = self.clock.now(), [*self.peers.values()]
        if not self.complete:
            early = [peer for peer in peers if peer.ended]  # told to stop before the run began
            verdict = judge(early, [], now, float("inf")) if early else None
            verdict = verdict or judge_start(peers, self.member.size, now - self._began, self.timeout)
        elif all(peer.ended and peer.ended.kind == "end" for peer in peers):
            self.closed = True
            self._send_all(Note("close"))
            return
        else:
            everybody = frozenset(self.peers)
            meetings = [
                Meeting(name, since, tuple(sorted(everybody - values.keys())))
                for name, (since, values) in self.meetings.items()
            ]
            verdict = judge(peers, meetings, now, self.timeout)
        if verdict:
            self.conclude(verdict)

    def conclude(self, verdict: Verdict) -> None:
        """End the run for everybody, unless it has ended."""
        if not (self.verdict or self.closed):
            self.verdict = verdict
            self._send_all(verdict)

    def _send_all(self, message: Message) -> None:
        line = messages.encode(message)
        for link in self.links.values():
            link.send_bytes(line)

    def tick(self) -> None:
        """Judge, and tell all where rank 0 is; to be called once in an interval."""
        self.clock.tick()
        self._judge()
        if first := self.peers.get(0):
            self._send_all(messages.Beat(first.step, first.phase, worker=first.worker))

    async def part(self) -> None:
        """Wait a little until all others have heard the last word and gone, then close everything."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(SECONDS_TO_PART, self.timeout)):
                while self.links:
                    await asyncio.sleep(0.01)
        self._remove_address()
        if self._server:
            self._server.close()
        for link in self.links.values():
            link.close()
        for task in self._serving:
            task.cancel()

    def _write_address(self, folder: Path, port: int) -> None:
        content = Address(tuple(own_addresses()), socket.gethostname(), port, self.token)._asdict()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / ADDRESS_FILE, json.dumps(content).encode())

    def _remove_address(self) -> None:
        if self.member.folder and self._server:
            place = Address.read(self.member.folder)
            if place and place.token == self.token:  # not another run's
                with contextlib.suppress(OSError):
                    (self.member.folder / ADDRESS_FILE).unlink()


class Address(NamedTuple):
    """Where rank 0 listens, as it has written it into a folder."""

    hosts: tuple[str, ...]  # names and addresses
    host: str
    port: int
    token: str

    @classmethod
    def read(cls, folder: Path) -> "Address | None":
        """Return what the folder's file says; None where there is none."""
        try:
            found: Address = from_json(cls, json.loads((folder / ADDRESS_FILE).read_bytes()[: messages.LONGEST_HELLO]))
        except (OSError, ValueError, RecursionError):
            return None
        return found


def in_words(error: OSError) -> str:
    """Return why a connection failed, without asyncio's and socket's own words."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error) or "no answer in time"


def own_addresses() -> list[str]:
    """Return this machine's name and addresses by which others may reach it."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        way_out.connect(("10.255.255.255", 1))  # sends nothing, but tells which network is used
        found.append(way_out.getsockname()[0])
    return [host for host in dict.fromkeys(found) if not host.startswith("127.") and host != "::1"]
