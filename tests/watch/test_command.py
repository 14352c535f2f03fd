"""The command line of the live view: what it takes, what it prints once, and that it only reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from llmc_jax.logs.state import own_process
from llmc_jax.watch import command as watch
from tests.watch.runs import write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, outcome in (("first", "done"), ("second", "stopped"), ("third", None)):
        write_run(tmp_path / "runs" / name, 5, outcome, **own_process())
    return tmp_path / "runs"


def test_a_pipe_gets_the_view_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main([str(runs / "third")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("5/40" in line for line in lines) and all(len(line) <= 80 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert watch.main([str(runs / "second")]) == 0 and "stopped" in capsys.readouterr().out
    assert watch.main([str(runs)]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in ("first", "second", "third"))


@pytest.mark.parametrize(
    ("words", "part"),
    [(["."], "no run"), (["runs/fourth\x1b[2J"], "no run"), (["runs", "second"], "second"), (["main.py"], "no run")],
)
def test_bad_input_is_one_line(
    runs: Path, words: list[str], part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.parent)
    Path("main.py").touch()
    assert watch.main(words) == 2
    got = capsys.readouterr()
    assert got.out == "" and len(got.err.splitlines()) == 1 and got.err.strip().isprintable()
    assert part in got.err


@pytest.mark.parametrize("words", [["runs", "--every", "0"], ["runs", "--every", "nan"], ["--once"], ["runs", "--on"]])
def test_wrong_flags_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main(words) == 2 and len(capsys.readouterr().err.splitlines()) == 1


def traces(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything of a folder's files that writing would change."""
    found = [folder, *sorted(folder.rglob("*"))]
    return {str(path): (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path in found for s in [path.stat()]}


def test_it_only_reads(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = traces(runs)
    assert max(watch.main([str(path)]) for path in (runs / "third", runs)) == 0
    assert capsys.readouterr().out.count("5/40") == 4 and traces(runs) == before


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys\nfrom llmc_jax.watch import command as watch\n"
        "try:\n    watch.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'rich', 'psutil', 'matplotlib')))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
