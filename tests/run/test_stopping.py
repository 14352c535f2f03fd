"""Asking a run to stop: what the first and the second signal do, also while the main thread is busy in C."""

import errno
import io
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.run import stopping
from llmc_jax.run.stopping import Output, print_error, stop_on_signals

ROOT = Path(__file__).resolve().parents[2]

# Python's own handlers do not run during one long call of C code; an hour of hashing stands for a step of training.
BUSY = """
import hashlib, sys, threading
from llmc_jax.run.stopping import stop_on_signals
stop = threading.Event()
with stop_on_signals(stop, lambda text: print(text, flush=True)):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.fixture
def main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("Python lets only the main thread handle signals")


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_second_signal_ends_a_busy_program_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        too_late = threading.Timer(120, program.kill)  # so that a mistake fails the test instead of holding it for ever
        too_late.start()
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            program.send_signal(signal.SIGINT)
            assert program.stdout.readline().startswith("stopping after this step")
            time.sleep(2 * stopping.ONE_REQUEST)
            assert program.poll() is None  # the first one ends nothing
            program.send_signal(signal.SIGTERM)
            assert program.wait(timeout=60) == 130
        finally:
            too_late.cancel()
            too_late.join()
            program.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_sets_the_event_and_says_so(
    number: signal.Signals, main_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "ONE_REQUEST", 3600.0)
    stop, said = threading.Event(), list[str]()
    before = [signal.getsignal(n) for n in stopping.SIGNALS]
    threads = threading.active_count()
    with stop_on_signals(stop, said.append):
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        wait_until(lambda: said)
        assert stop.is_set()
        os.kill(os.getpid(), number)  # counts as one with the first
    assert len(said) == 1
    assert [signal.getsignal(n) for n in stopping.SIGNALS] == before
    wait_until(lambda: threading.active_count() <= threads)  # an earlier test's may end meanwhile


def test_a_terminal_that_ends_may_send_its_signal_twice(main_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell sends one, the system another, any time apart; nobody has asked twice."""
    monkeypatch.setattr(stopping, "ONE_REQUEST", 0.0)
    left, said, stop = list[bool](), list[str](), threading.Event()
    monkeypatch.setattr(stopping, "_leave", lambda: left.append(True))
    with stop_on_signals(stop, said.append):
        for number in (signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
            wait_until(lambda: said)
            time.sleep(0.02)
        assert left == []
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: left)


def test_a_terminal_that_was_closed_is_a_reader_that_left() -> None:
    """Its writes fail with EIO, as those to a bad disk do, which is another thing."""
    master, slave = pty.openpty()
    stop = threading.Event()
    with os.fdopen(slave, "w") as file:
        output = Output(file, stop)
        os.close(master)
        output.write("words\n")
        output.flush()
        assert stop.is_set() and output.error is not None and output.reader_left
        output.discard_rest()
    disk = Output(io.StringIO(), stop)
    disk.error = OSError(errno.EIO, "Input/output error")
    assert not disk.reader_left


def test_other_signals_do_not_stop(main_thread: None) -> None:
    stop, said, heard = threading.Event(), list[str](), list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with stop_on_signals(stop, said.append):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: heard)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not stop.is_set() and not said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_switched_off_stays_so(main_thread: None, number: signal.Signals) -> None:
    """As a shell does it in the background, and nohup."""
    stop = threading.Event()
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_on_signals(stop, print):
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert not stop.is_set()


def test_outside_the_main_thread_nothing_is_handled() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with stop_on_signals(threading.Event(), print):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


# ---- output that may go away


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as file:
        yield reader, file


def test_output_passes_text_on(pipe: tuple[int, io.TextIOWrapper]) -> None:
    stop = threading.Event()
    output = Output(pipe[1], stop)
    assert output.write("loss\n") == 5
    output.flush()
    assert os.read(pipe[0], 100) == b"loss\n"
    assert output.encoding == "utf-8" and not output.isatty()
    assert not stop.is_set() and output.error is None
    os.close(pipe[0])


def test_output_that_nobody_reads_asks_to_stop_and_is_silent(pipe: tuple[int, io.TextIOWrapper]) -> None:
    stop = threading.Event()
    output = Output(pipe[1], stop)
    os.close(pipe[0])
    output.write("one\n")
    output.flush()
    assert stop.is_set() and isinstance(output.error, BrokenPipeError)
    output.write("two\n")
    output.flush()
    output.discard_rest()  # or closing the file would raise what it still holds


def test_a_reader_that_goes_away_is_noticed_without_a_word(pipe: tuple[int, io.TextIOWrapper]) -> None:
    reader, file = pipe
    stop = threading.Event()
    output = Output(file, stop)
    output.flush()
    assert not stop.is_set()
    os.close(reader)
    output.flush()
    assert stop.is_set() and isinstance(output.error, BrokenPipeError)
    output.discard_rest()


def test_a_file_that_is_none_of_the_systems_has_no_reader_to_lose() -> None:
    stop = threading.Event()
    Output(io.StringIO(), stop).flush()
    assert not stop.is_set()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_under_the_output() -> None:
    stop = threading.Event()
    with open("/dev/full", "w", encoding="utf-8") as file:
        output = Output(file, stop)
        output.write("x")
        output.flush()
        assert stop.is_set() and output.error is not None and output.error.errno == 28
        output.discard_rest()


def test_help_whose_reader_leaves_early() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_errors_that_nobody_reads_leave_the_status_alone(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for flags, status in (["-b", "0"], 2), (["--help"], 0):
        command = [sys.executable, str(ROOT / "train.py"), *flags]
        assert subprocess.run(command, stdout=writer, stderr=writer, check=False).returncode == status
    os.close(writer)


def test_an_error_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal takes escape sequences for orders, and a carriage return hides what was there."""
    print_error("-i \x1b]0;title\x07\r\t\x9b2J\udcff.bin: no such file\n  the second line, ä")
    shown = "-i \\x1b]0;title\\x07\\r\\t\\x9b2J\\udcff.bin: no such file\n  the second line, ä\n"
    assert capsys.readouterr().err == shown


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_do_not_matter(closed: str) -> None:
    for flags, status in ("--help", 0), ("-b 0", 2):
        command = f'"{sys.executable}" "{ROOT / "train.py"}" {flags} {closed}'
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == status
        assert "Traceback" not in done.stderr
        assert "batch size" not in done.stdout  # print(file=None) would go there
