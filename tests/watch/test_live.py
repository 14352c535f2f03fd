"""The view of a folder and of a run that goes on: what is read again, and a terminal that is left as it was."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.base.streams import takes_ascii_only
from llmc_jax.logs.files import runs_in
from llmc_jax.logs.state import DIED, own_process
from llmc_jax.report import command as report
from llmc_jax.watch.folder import ShelfPage, table
from llmc_jax.watch.live import RunPage, look_all, page_of
from llmc_jax.watch.view import Room
from tests.watch.runs import write_run

LIMIT = 60.0  # seconds, after which a wait has failed


def add(folder: Path, **event: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_the_table_has_the_newest_first(tmp_path: Path) -> None:
    for at, name in enumerate(["b", "c", "a"]):
        add(write_run(tmp_path / name, 3, None), event="val", step=3, loss=2.5, time=2e9 + at)
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    shelf = ShelfPage(tmp_path)
    shelf.look(2e9 + 5)
    rows = shelf.rows
    assert [row.path.name for row in rows] == ["a", "c", "b"]
    assert [row.state.silent for row in rows] == [3.0, 4.0, 5.0]
    for width in (30, 60, 80, 200):
        lines = [line.plain for line in table(rows, Room(width), 2e9 + 5)]
        assert all(any(name in line and "3.9500" in line for line in lines) for name in "abc")
    assert len(table(rows, Room(80, 5), 2e9)) == 4  # the heading, its rule, one run and how many more


def test_a_run_that_must_not_be_read_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 3)
    (tmp_path / "b/metrics.jsonl").mkdir(parents=True)
    assert runs_in(tmp_path) == [tmp_path / "a"]
    assert isinstance(page_of(tmp_path / "a/metrics.jsonl"), RunPage)
    with pytest.raises(InputError, match="no run"):
        page_of(tmp_path / "b")
    with pytest.raises(InputError, match="cannot read the folder"):
        runs_in(tmp_path / "missing")


def test_another_users_run_hides_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, 3)
    monkeypatch.chdir(tmp_path)  # which this user need not come to from outside
    tmp_path.chmod(0o755)
    closed, user = tmp_path / "b", os.geteuid()
    closed.chmod(0)
    os.seteuid(user or 65534)  # root may look into every folder
    try:
        found = [runs_in(Path()), report.runs_at(Path())]
    finally:
        os.seteuid(user)
        closed.chmod(0o755)
    assert found == [[Path("a")], [Path("a")]]


def test_what_a_resume_cut_off_is_forgotten(tmp_path: Path) -> None:
    page = RunPage("a", write_run(tmp_path / "a", 20, None) / "metrics.jsonl")
    look_all(page)
    assert page.moment().state.step == 20
    write_run(tmp_path / "a", 5, None)
    look_all(page)
    found = page.moment()
    assert found.state.step == 5 and found.story.latest["train"]["step"] == 4


def test_what_cannot_be_read_is_said_and_tried_again(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", 3, None) / "metrics.jsonl"
    page = RunPage("a", path)
    look_all(page)
    path.rename(tmp_path / "aside")
    assert page.look() is False and len(page.moment().notes) == 1
    path.mkdir()
    assert page.look() is False and len(page.moment().notes) == 1
    path.rmdir()
    (tmp_path / "aside").rename(path)
    add(tmp_path / "a", event="train", step=3, loss=1.0)
    look_all(page)
    assert page.moment().notes == () and page.moment().state.step == 4


@pytest.mark.parametrize(("encoding", "ascii_only"), [("utf-8", False), ("ascii", True), ("latin-1", True)])
def test_the_characters_are_those_of_the_terminal(encoding: str, ascii_only: bool) -> None:
    assert takes_ascii_only(encoding) == ascii_only


class Terminal:
    """A terminal that a program runs on: what it wrote, and keys for it."""

    def __init__(self, process: subprocess.Popen, descriptor: int) -> None:
        self.process, self.descriptor, self.output = process, descriptor, b""

    def until(self, found: Callable[[bytes], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not found(self.output):
            assert time.monotonic() < end, self.output[-2000:]
            if select.select([self.descriptor], [], [], 0.1)[0]:
                self.output += os.read(self.descriptor, 65536)


@contextmanager
def terminal(*words: str, **environment: str) -> Iterator[Terminal]:
    """Run the program on a terminal of 80 by 24 cells."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    environment = {**os.environ, "TERM": "xterm", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "llmc_jax", "watch", *words],
        stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(its)


ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen
SHOW = b"\x1b[?25h"  # the cursor


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that goes on, as far as can be seen: its process is that of the tests."""
    return write_run(tmp_path_factory.mktemp("runs") / "going", 20, None, **own_process())


@pytest.mark.parametrize("end", ["key", "interrupt", "terminate"])
def test_however_it_ends_the_terminal_is_as_it_was(going: Path, end: str) -> None:
    with terminal(str(going), "--every", "0.1") as screen:
        before = termios.tcgetattr(screen.descriptor)
        screen.until(lambda output: b"20/40" in output and b"q: quit" in output)
        if end == "key":
            assert termios.tcgetattr(screen.descriptor) != before  # keys come without Enter
            os.write(screen.descriptor, b"q")
            screen.until(lambda output: b"20/40" in output[output.find(LEAVE) :])  # the last view stays
        else:
            screen.process.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGTERM)
        assert screen.process.wait(LIMIT) == {"key": 0, "interrupt": 130, "terminate": 143}[end]
        screen.until(lambda output: LEAVE in output)
        assert screen.output.count(ENTER) == screen.output.count(LEAVE) == 1 and SHOW in screen.output
        assert termios.tcgetattr(screen.descriptor) == before


def test_the_view_follows_the_run_and_the_window(going: Path) -> None:
    with terminal(str(going), "--every", "0.1") as screen:
        screen.until(lambda output: b"20/40" in output)
        screen.process.send_signal(signal.SIGTSTP)  # would leave the terminal as it is now
        add(going, event="val", step=20, loss=1.625)
        screen.until(lambda output: b"1.6250" in output)
        termios.tcsetwinsize(screen.descriptor, (12, 40))
        screen.process.send_signal(signal.SIGWINCH)
        screen.until(lambda output: "─" * 9 in output.decode(errors="replace").rpartition("q: quit")[0])
        os.write(screen.descriptor, b"q")
        assert screen.process.wait(LIMIT) == 0


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {}])
def test_a_run_that_died_is_shown_once_with_colours_where_they_are_wanted(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_run(tmp_path / "a", 3, None, **{**own_process(), "pid": ended.pid})
    page = RunPage("a", tmp_path / "a/metrics.jsonl")
    look_all(page)
    assert page.moment().state.state == DIED
    with terminal(str(tmp_path / "a"), **environment) as screen:
        assert screen.process.wait(LIMIT) == 0
        screen.until(lambda output: b"3/40" in output)
    assert ENTER not in screen.output
    assert (b"\x1b[1;31m" in screen.output) == (environment == {})
    assert (b"\x1b[" in screen.output) == (environment.get("TERM") != "dumb")


def test_a_run_that_is_killed_while_it_is_watched_has_died(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as trainer:
        write_run(tmp_path / "a", 3, None, **{**own_process(), "pid": trainer.pid})
        with terminal(str(tmp_path / "a"), "--every", "0.1") as screen:
            screen.until(lambda output: b"running on" in output)
            trainer.kill()  # and nobody asks for its status: it stays as a zombie
            screen.until(lambda output: b"died on" in output and b"last event: train step 2" in output)
            os.write(screen.descriptor, b"q")
            assert screen.process.wait(LIMIT) == 0
