"""The command line of the live view: what it takes, what it prints once, and that it only reads."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.logs.state import own_process
from llmc_jax.watch import command as watch

ROOT = Path(__file__).resolve().parents[2]


def write_run(folder: Path, steps: int = 5, outcome: str | None = "done") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "steps": 40, **own_process()}]
    events += [{"event": "train", "step": step, "loss": 4 - step / 40, "ms": 9.0} for step in range(steps)]
    events += [{"event": "val", "step": steps, "loss": 2.5}]
    events += [] if outcome is None else [{"event": "end", "step": steps, "outcome": outcome}]
    timed = [{**event, "time": round(time.time(), 3)} for event in events]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in timed))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, outcome in (("first", "done"), ("second", "stopped"), ("third", None)):
        write_run(tmp_path / "runs" / name, outcome=outcome)
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
    [
        (["missing"], "missing: there is no such folder"),
        (["."], "contains no run"),
        (["runs/fourth\x1b[2J"], "no such folder"),
        (["runs", "second"], "second"),
        (["main.py"], "contains no run"),
    ],
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


AS_ANOTHER_USER = """
import os, sys
from llmc_jax.watch import command as watch
run, folder = sys.argv[1:]
watch.main([run])  # imports all that it needs, which another user may not be able to read
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print("as another user", flush=True)
sys.exit(max(watch.main(words) for words in ([folder], [run])))
"""


@pytest.fixture
def shown_to_all(runs: Path) -> Iterator[Path]:
    """The runs where another user comes to them: pytest's own folders, more with xdist, are this user's alone."""
    with tempfile.TemporaryDirectory() as own:
        copy = Path(own) / "runs"
        shutil.copytree(runs, copy)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        Path(own).chmod(0o755)
        if not all(path.stat().st_mode & 0o001 for path in copy.parents):
            pytest.skip(f"other users cannot enter the folders above {own}")
        yield copy


def test_it_only_reads(shown_to_all: Path) -> None:
    """A user who may read the folder and not write to it sees the same, and nothing in it changes."""
    runs = shown_to_all
    before = traces(runs)
    words = [sys.executable, "-c", AS_ANOTHER_USER, str(runs / "third"), str(runs)]
    done = subprocess.run(words, capture_output=True, cwd=ROOT, timeout=60, text=True)
    _, _, shown = done.stdout.partition("as another user")
    assert done.returncode == 0, done.stderr
    assert shown.count("5/40") == 4
    assert traces(runs) == before


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys\nfrom llmc_jax.watch import command as watch\n"
        "try:\n    watch.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'rich', 'psutil', 'matplotlib')))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
