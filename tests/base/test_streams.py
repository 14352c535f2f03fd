"""Output that may go away, and errors that are shown and not obeyed."""

import errno
import io
import os
import pty
import threading
from collections.abc import Iterator

import pytest

from llmc_jax.base.streams import Output, print_error


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as file:
        yield reader, file


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


def test_an_error_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal takes escape sequences for orders, and a carriage return hides what was there."""
    print_error("-i \x1b]0;title\x07\r\t\x9b2J\udcff.bin: no such file\n  the second line, ä")
    shown = "-i \\x1b]0;title\\x07\\r\\t\\x9b2J\\udcff.bin: no such file\n  the second line, ä\n"
    assert capsys.readouterr().err == shown
