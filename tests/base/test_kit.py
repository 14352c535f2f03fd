"""How every command line ends: its exit status, its one line, and readers that go away."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.kit import exit_status

ROOT = Path(__file__).resolve().parents[2]


def raising(error: BaseException) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("-e x: no such model"), 2, "me: -e x: no such model\n"),
        (FormatError("a\x1b.bin: truncated\n  twice"), 2, "me: a\\x1b.bin: truncated\n  twice\n"),
        (FileNotFoundError(2, "No such file or directory", "a.bin"), 2, "me: a.bin: No such file or directory\n"),
        (FileNotFoundError("a.bin: not there"), 2, "me: a.bin: not there\n"),
        (OSError(17, "File exists", "a.tmp", None, "a.bin"), 2, "me: a.bin: File exists\n"),
        (OSError(28, "No space left on device"), 2, "me: No space left on device\n"),
        (KeyboardInterrupt(), 130, "me: stopped\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status("me", lambda: raising(error)) == status
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("nameless"), AssertionError()])
def test_mistakes_of_ours_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        exit_status("me", lambda: raising(error))


def test_a_full_disk_under_the_output_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux's /dev/full")
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert exit_status("me", lambda: print("words")) == 2
    assert "No space left" in capsys.readouterr().err


def test_closed_streams_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of streams that the caller's shell has closed, Python has None; print(file=None) would be standard output."""
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", None)
    assert exit_status("me", lambda: raising(InputError("bad"))) == 2
    monkeypatch.setattr(sys, "stdout", None)
    assert exit_status("me", lambda: print("words")) == 0
    assert output.getvalue() == ""


@pytest.mark.parametrize(("flags", "status"), [(["--help"], 0), (["-b", "0"], 2)])
def test_a_program_that_nobody_reads_ends_quietly(flags: list[str], status: int) -> None:
    """What a stream still holds at the end of the process would be 120 as the status, and words on standard error."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    errors = subprocess.PIPE if status == 0 else writer
    done = subprocess.run(command, stdout=writer, stderr=errors, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr or b"") == (status, b"")
