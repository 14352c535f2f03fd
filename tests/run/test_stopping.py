"""Asking a run to stop: what the first and the second signal do, also while the main thread is busy in C."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmc_jax.run import stopping
from llmc_jax.run.stopping import stop_on_signals
from tests.waiting import wait_until

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
    monkeypatch.setattr(os, "_exit", lambda _: left.append(True))
    with stop_on_signals(stop, said.append):
        for number in (signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
            wait_until(lambda: said)
            time.sleep(0.02)
        assert left == []
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: left)


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
