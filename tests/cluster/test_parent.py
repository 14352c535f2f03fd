"""Parents and workers for real, on one host, without JAX: whatever happens to one, all end by themselves and name it.

What they say is read from the verdict's fields, never from sentences. Cases of one kind run side by side.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmc_jax.base.errors import ExitCode
from llmc_jax.cluster.hub import ADDRESS_FILE, SECRET, STRANGERS
from llmc_jax.cluster.messages import Hello, encode
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
TOO_LONG = 120  # seconds, for whatever should happen; so that a mistake fails the test instead of holding it for ever
PATIENT, SHORT = 60.0, 2.0  # --peer-timeout, where it must not pass and where the test waits for it
LOST = ExitCode.PEER_LOST


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    """Kill what a test that fails leaves behind; workers end with their parents."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
            process.communicate()
    STARTED.clear()


class Run:
    """Processes of one run, by name; the name is the rank where nothing else is said."""

    def __init__(self, out: Path, size: int, timeout: float = PATIENT, **told: Any) -> None:
        out.mkdir()
        self.out, self.size = out, size
        self.told = {"size": size, "timeout": timeout, "out": str(out), "address_folder": str(out), **told}
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, rank: int, name: str = "", **told: Any) -> "Run":
        name = name or str(rank)
        told = {**self.told, "rank": rank, "name": name, **told}
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.fake", json.dumps(told)], cwd=ROOT, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        STARTED.append(self.processes[name])
        return self

    def start_all(self, special: int = -1, **told: Any) -> "Run":
        for rank in range(self.size):
            self.start(rank, **(told if rank == special else {}))
        return self

    def statuses(self) -> list[int]:
        """Wait until all have ended; return their exit statuses in the order in which they were started."""
        for name, process in self.processes.items():
            self.out.joinpath(f"said_{name}").write_text(process.communicate(timeout=TOO_LONG)[0])
        self.check_workers_ended()
        return [process.returncode for process in self.processes.values()]

    def verdict(self, name: str = "0") -> dict[str, Any]:
        return json.loads(self.out.joinpath(f"verdict_{name}.json").read_bytes())

    def blamed(self, name: str = "0") -> tuple[int, str]:
        """Who is named by a process, and for what."""
        return self.verdict(name)["rank"], self.verdict(name)["cause"]

    def blamed_by(self, ranks: Iterable[int]) -> set[tuple[int, str, int]]:
        """The same of several, with the number of the process that each names."""
        return {(*self.blamed(str(rank)), self.verdict(str(rank))["pid"]) for rank in ranks}

    def has_verdict(self) -> bool:
        return any(self.out.glob("verdict_*"))

    def said(self, name: str) -> str:
        return self.out.joinpath(f"said_{name}").read_text()

    def worker(self, name: str) -> dict[str, Any]:
        """Wait until a worker has met the others; return what it has seen."""
        file = self.out / f"worker_{name}.json"
        wait_until(lambda: file.exists() and file.read_bytes().endswith(b"}"))
        return json.loads(file.read_bytes())

    def pids(self) -> list[int]:
        """Wait until all workers have met; return their numbers by rank."""
        return [self.worker(str(rank))["pid"] for rank in range(self.size)]

    def check_workers_ended(self) -> None:
        for file in self.out.glob("worker_*"):
            pid = json.loads(file.read_bytes())["pid"]
            wait_until(lambda pid=pid: not runs(pid))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def side_by_side(*cases: Callable[[], None]) -> None:
    """Run cases in threads; raise what the first of them that failed has raised."""
    with ThreadPoolExecutor(len(cases)) as pool:
        for future in [pool.submit(case) for case in cases]:
            future.result()


@contextmanager
def free_port() -> Iterator[int]:
    """Yield a port that nobody else is given: a socket is bound to it, which does not listen, so that one other may."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def test_all_end_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As agreed, with one status; nobody is blamed, and the file with the address is gone."""

    def agreed() -> None:
        run = Run(tmp_path / "agreed", 3, status=3).start_all()
        assert run.statuses() == [3, 3, 3]
        assert not run.has_verdict() and not (run.out / ADDRESS_FILE).exists()
        for rank in range(3):
            seen = run.worker(str(rank))
            assert (seen["hosts"], seen["local"]) == ([socket.gethostname()] * 3, [rank, 3])

    def late() -> None:
        """Rank 0 comes last, at a port at which nobody listened before; all have the secret that it asks for."""
        with free_port() as port:
            run = Run(tmp_path / "late", 2, address_folder="", port=port).start(1)
            time.sleep(1)
            run.start(0)
            assert run.statuses() == [0, 0] and not run.has_verdict()

    def stopped() -> None:
        run = Run(tmp_path / "stopped", 2, steps=10**6).start_all()
        run.pids()
        run.processes["1"].send_signal(signal.SIGTERM)
        assert run.statuses() == [130, 130] and not run.has_verdict()

    def stale() -> None:
        """An address of an earlier run is in the folder: something else listens there, or nothing."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            other.settimeout(TOO_LONG)
            run = Run(tmp_path / "stale", 2, timeout=8.0)
            place = {"hosts": ["127.0.0.1"], "host": socket.gethostname(), "port": other.getsockname()[1], "token": "x"}
            (run.out / ADDRESS_FILE).write_text(json.dumps(place))
            run.start(1)
            other.accept()
            run.start(0)
            assert run.statuses() == [0, 0] and not run.has_verdict()

    monkeypatch.setenv(SECRET, "theirs")
    side_by_side(agreed, late, stopped, stale)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_is_named(victim: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "rank_00001.jsonl"):
        folder.joinpath(name).touch()

    def worker() -> None:
        run = Run(tmp_path / "worker", 3, steps=10**6, folder=str(folder)).start_all()
        pids = run.pids()
        os.kill(pids[victim], signal.SIGKILL)
        assert run.statuses() == [LOST, LOST, LOST]
        assert run.blamed_by(range(3)) == {(victim, "killed", pids[victim])}
        assert run.verdict()["host"] == socket.gethostname() and run.verdict()["phase"] in ("start", "step")
        for name in ("metrics.jsonl", "rank_00001.jsonl"):
            event = json.loads(folder.joinpath(name).read_bytes())
            assert event.pop("time") > 0 and event == {"event": "lost", **run.verdict()}
        assert not folder.joinpath("rank_00002.jsonl").exists()

    def parent() -> None:
        """The worker goes with it."""
        run = Run(tmp_path / "parent", 3, steps=10**6).start_all()
        run.pids()
        run.processes[str(victim)].kill()
        assert run.statuses() == [-signal.SIGKILL if rank == victim else LOST for rank in range(3)]
        assert run.blamed_by({0, 1, 2} - {victim}) == {(victim, "gone", run.processes[str(victim)].pid)}

    side_by_side(worker, parent)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_stopped_is_named(victim: int, tmp_path: Path) -> None:
    def worker() -> None:
        run = Run(tmp_path / "worker", 2, SHORT, steps=10**6).start_all()
        pids = run.pids()
        os.kill(pids[victim], signal.SIGSTOP)
        assert run.statuses() == [LOST, LOST]
        assert run.blamed_by(range(2)) == {(victim, "silent", pids[victim])}

    def parent() -> None:
        """All others end; it does when it goes on, and its worker meanwhile."""
        run = Run(tmp_path / "parent", 2, SHORT, steps=10**6).start_all()
        pids = run.pids()
        process, other = run.processes[str(victim)], run.processes[str(1 - victim)]
        process.send_signal(signal.SIGSTOP)
        assert other.wait(TOO_LONG) == LOST
        wait_until(lambda: not runs(pids[victim]))
        process.send_signal(signal.SIGCONT)
        assert run.statuses() == [LOST, LOST]
        assert run.blamed_by(range(2)) == {(victim, "unheard", process.pid)}

    side_by_side(worker, parent)


@pytest.mark.slow  # waits for timeouts of seconds
def test_processes_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    def missing() -> None:
        run = Run(tmp_path / "missing", 4, SHORT).start(0).start(2)
        assert run.statuses() == [LOST, LOST]
        assert run.blamed("0") == run.blamed("2") == (1, "missing") and run.verdict()["also"] == [3]

    def without_rank_0() -> None:
        with free_port() as port:
            run = Run(tmp_path / "without", 2, SHORT, address_folder="", port=port).start(1)
            assert run.statuses() == [LOST] and run.blamed("1") == (0, "missing")

    def no_name() -> None:
        """What cannot be the name of a host is no reason to wait."""
        run = Run(tmp_path / "no_name", 2, address_folder="", host="a..b", port=1).start(1)
        assert run.statuses() == [2] and "a..b" in run.said("1")

    def not_of_ours() -> None:
        """Something that answers like rank 0, but says nothing."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            other.settimeout(TOO_LONG)
            run = Run(tmp_path / "not_of_ours", 2, SHORT, address_folder="", port=other.getsockname()[1]).start(1)
            connection, _ = other.accept()
            with connection:
                connection.sendall(b'{"is":"refused"}\n')
                assert run.statuses() == [LOST]

    def duplicate() -> None:
        run = Run(tmp_path / "duplicate", 3).start(0).start(1).start(1, "again")
        assert run.statuses() == [2, 2, 2]
        both = [run.processes[name].pid for name in ("1", "again")]
        for name in ("0", "1", "again"):
            assert run.blamed(name) == (1, "refused") and run.verdict(name)["pid"] in both
        assert all(str(pid) in run.said(name) for pid, name in zip(both, ("1", "again"), strict=True))

    def of_another_run() -> None:
        """It is refused; a stranger is not answered; the run goes on as if they had never come."""
        with free_port() as port:
            run = Run(tmp_path / "foreign", 2, address_folder="", port=port, job="7").start(0)
            wait_until(lambda: connects(port, b"GET / HTTP/1.1\r\n\r\n"))
            run.start(1, "foreign", job="8")
            assert run.processes["foreign"].wait(TOO_LONG) == 2
            with socket.create_connection(("127.0.0.1", port)) as silent:
                silent.sendall(b"{")  # and says no more
                run.start(1)
                assert run.statuses() == [0, 2, 0] and not run.has_verdict()
            assert run.said("0") == ""

    def again() -> None:
        """One had no answer in time, and came again: it is not taken for two, and what it left is of no account."""
        with free_port() as port:
            run = Run(tmp_path / "again", 3, SHORT, address_folder="", port=port).start(0)
            wait_until(lambda: connects(port, b"no message\n"))
            line = encode(Hello(1, 3, "", "", "elsewhere", 7))
            with socket.create_connection(("127.0.0.1", port)) as first:
                first.sendall(line)
                assert b"accepted" in first.recv(1000)
                with socket.create_connection(("127.0.0.1", port)) as second:
                    second.sendall(line)
                    assert b"accepted" in second.recv(1000)
                    while first.recv(1000):  # the first one is closed, after what had been sent
                        pass
                    assert run.statuses() == [LOST] and run.blamed() == (2, "missing")

    def crowd() -> None:
        """Strangers who say nothing do not keep anybody out."""
        with free_port() as port:
            run = Run(tmp_path / "crowd", 2, address_folder="", port=port).start(0)
            wait_until(lambda: connects(port, b"no message\n"))
            with ExitStack() as crowd:
                for _ in range(STRANGERS + 20):
                    crowd.enter_context(socket.create_connection(("127.0.0.1", port)))
                run.start(1)
                assert run.statuses() == [0, 0]
            assert run.said("0") == ""

    def port_in_use() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            run = Run(tmp_path / "port", 2, address_folder="", port=port).start(0)
            assert run.statuses() == [2] and "-ps 127.0.0.1:PORT" in run.said("0") and str(port) in run.said("0")

    side_by_side(missing, without_rank_0, no_name, not_of_ours, duplicate, of_another_run, again, crowd, port_in_use)


def connects(port: int, data: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), TOO_LONG) as connection:
            connection.sendall(data)
            return connection.recv(1) == b""
    except ConnectionRefusedError:
        return False


@pytest.mark.slow  # waits for timeouts of seconds
def test_one_that_gets_no_further_is_named(tmp_path: Path) -> None:
    def hung() -> None:
        run = Run(tmp_path / "hung", 2, SHORT, limits={"validate": 1}).start_all(1, does="phase validate")
        assert run.statuses() == [LOST, LOST]
        assert run.blamed("0") == run.blamed("1") == (1, "hung")
        assert (run.verdict()["step"], run.verdict()["phase"]) == (1, "validate")

    def absent() -> None:
        run = Run(tmp_path / "absent", 3, SHORT, meeting=1, limits={"step": 1.5}).start_all(1, does="hang")
        assert run.statuses() == [LOST, LOST, LOST]
        assert run.blamed() in [(1, "absent"), (1, "hung")]

    def left() -> None:
        run = Run(tmp_path / "left", 2).start_all(1, does="exit 0")
        assert run.statuses() == [LOST, LOST] and run.blamed() == (1, "left")

    side_by_side(hung, absent, left)


@pytest.mark.slow  # waits for timeouts of seconds
def test_one_that_ends_by_itself_is_named(tmp_path: Path) -> None:
    def failed(name: str, rank: int, does: str) -> None:
        run = Run(tmp_path / name, 2).start_all(rank, does=does)
        assert run.statuses() == [2 if one == rank else LOST for one in range(2)]
        assert run.blamed(str(1 - rank)) == (rank, "failed")

    def consequence() -> None:
        """Rank 0 only loses an exchange; the cause is known later."""
        run = Run(tmp_path / "consequence", 2, PATIENT)
        run.start(0, does="leave broken 75")
        run.start(1, does="hang")
        for rank in range(2):
            wait_until((run.out / f"there_{rank}").exists)
        os.kill(run.worker("1")["pid"], signal.SIGSEGV)
        assert run.statuses() == [LOST, LOST] and run.blamed() == (1, "killed")

    def no_cause() -> None:
        run = Run(tmp_path / "no_cause", 2, SHORT).start_all(1, does="signal 6")
        assert run.statuses() == [LOST, LOST] and run.blamed() == (1, "broken")

    def signalled() -> None:
        """A worker without a handler dies by a signal that its parent forwards."""
        run = Run(tmp_path / "signalled", 2, steps=10**6).start_all(1, heeds_signals=False)
        run.pids()
        run.processes["1"].send_signal(signal.SIGTERM)
        assert run.statuses() == [LOST, 130] and run.blamed() == (1, "killed")

    def twice() -> None:
        """The second signal is forwarded too, and ends the worker at once."""
        run = Run(tmp_path / "twice", 2).start_all(1, does="wait for two")
        wait_until((run.out / "there_1").exists)
        run.processes["1"].send_signal(signal.SIGTERM)
        wait_until((run.out / "first_1").exists)
        run.processes["1"].send_signal(signal.SIGTERM)
        assert run.statuses() == [LOST, 130] and run.blamed() == (1, "failed")

    def early() -> None:
        """The others have not come yet."""
        run = Run(tmp_path / "early", 3).start(0)
        wait_until((run.out / ADDRESS_FILE).exists)
        run.processes["0"].send_signal(signal.SIGHUP)
        assert run.statuses() == [130] and run.blamed() == (0, "killed")

    side_by_side(
        lambda: failed("exit", 1, "exit 2"), lambda: failed("leave", 0, "leave failed 2"), consequence, no_cause,
        signalled, twice, early,
    )  # fmt: skip
