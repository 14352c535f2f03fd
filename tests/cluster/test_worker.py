"""A worker's side alone: who is in no group, and what is no socket. With others: test_parent.py."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.cluster.messages import Welcome, encode
from llmc_jax.cluster.worker import ALONE, VARIABLE, joined

ROOT = Path(__file__).resolve().parents[2]
TOO_LONG = 120  # seconds


def test_alone() -> None:
    assert joined({}) is None
    assert (ALONE.rank, ALONE.size, ALONE.local_rank, ALONE.local_size) == (0, 1, 0, 1)
    assert ALONE.hosts == (socket.gethostname(),)
    assert ALONE.meet("a", {"b": 1}) == [{"b": 1}] and ALONE.meet("a", 2) == [2]
    ALONE.phase("step", 1)
    ALONE.folder("runs/a", "runs/a/metrics.jsonl")


@pytest.mark.parametrize("number", ["a", "-1", "0", "9999"])
def test_what_is_no_socket(number: str) -> None:
    environ = {VARIABLE: number, "PATH": "/"}
    code = "import os; from llmc_jax.cluster.worker import joined; joined(os.environ)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=TOO_LONG,
    )  # fmt: skip
    assert InputError.__name__ in ended.stderr and VARIABLE in ended.stderr


def test_leaving_hands_on_what_was_printed() -> None:
    code = "from llmc_jax.cluster.worker import ALONE; print('said'); ALONE.leave(3)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=TOO_LONG)
    assert (ended.returncode, ended.stdout) == (3, "said\n")


@pytest.mark.parametrize("welcomed", [True, False])
def test_a_worker_ends_with_its_parent(welcomed: bool) -> None:
    """Also where only the connection tells it, as on systems other than Linux."""
    code = (
        "import os, time; from llmc_jax.cluster import worker; worker.die_with_parent = lambda: None; "
        "worker.joined(os.environ); print('joined', flush=True); time.sleep(1000)"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, VARIABLE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        if welcomed:
            ours.sendall(encode(Welcome(("a", "b"), rank=1, peer_timeout=60.0)))
            assert process.stdout and process.stdout.readline() == "joined\n"
        ours.close()
        assert process.wait(TOO_LONG) == ExitCode.PEER_LOST
    finally:
        process.kill()
        process.communicate()
