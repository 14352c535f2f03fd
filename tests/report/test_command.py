"""The report's command: what it reads, where it writes, what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llmc_jax.report.command import MARK, main
from tests.printed_logs import c_main_log, written
from tests.report.runs import run_folder, start, train, usual, val

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs and something else, and a log beside it; the current folder is another one."""
    run_folder(tmp_path / "runs" / "b", usual())
    run_folder(tmp_path / "runs" / "a", [start(), val(0, 5.5), train(0, loss=1 / 3), train(1, loss="nan", norm="inf")])
    (tmp_path / "runs" / "notes").mkdir()
    written(tmp_path / "main.log", c_main_log({0: 4.0, 1: 3.5}, {0: 4.5}))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "runs"


def content_of(page: Path) -> list[str]:
    """The names of the runs that a page shows."""
    text = page.read_text(encoding="utf-8")
    (data,) = (part.partition("</script>")[0] for part in text.split('type="application/json"')[1:])
    return [run["name"] for run in json.loads(data.partition(">")[2])["runs"]]


def test_the_page_of_a_run_lies_in_its_folder(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second replaces the first
        assert main([str(runs / "a")]) == 0
        assert str(runs / "a" / "report.html") in capsys.readouterr().out
    assert content_of(runs / "a" / "report.html") == ["a"]
    assert MARK in (runs / "a" / "report.html").read_bytes()[:1000]
    assert main([str(runs / "b"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "") and (runs / "b" / "report.html").is_file()
    assert not list(Path().iterdir())


def test_where_other_pages_lie(runs: Path) -> None:
    assert main([str(runs), "--quiet"]) == 0
    assert content_of(runs / "report.html") == ["a", "b"]
    assert main([str(runs / "b"), str(runs.parent / "main.log"), "--quiet"]) == 0
    assert content_of(Path("report.html")) == ["b", "main.log"]
    assert main([str(runs / "a" / "metrics.jsonl"), "-o", "other.html", "--quiet"]) == 0
    assert content_of(Path("other.html")) == ["metrics.jsonl"]
    assert not (runs / "a" / "report.html").exists()


def test_a_run_without_events_does_not_hide_the_others(runs: Path) -> None:
    run_folder(runs / "c", [], torn="rubbish")
    assert main([str(runs)]) == 0
    assert content_of(runs / "report.html") == ["a", "b", "c"]


def test_what_could_not_be_read_is_said_on_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write("\x1b[2Jrubbish\n")
    assert main([str(runs / "a")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_any_name_of_a_folder(runs: Path) -> None:
    odd = run_folder(runs.parent / "</script>$_{x\n\udcff", usual())
    words = [str(odd), str(runs / "a")]
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "llmc_jax", "report"]
    done = subprocess.run([*command, *words], env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120)
    assert done.returncode == 0 and not done.stderr and len(done.stdout.splitlines()) == 3
    assert content_of(Path("report.html"))[0] == odd.name


REFUSED = {
    "no run": ([], "required: RUN"),
    "missing": (["nothing"], "nothing: cannot read it: No such file"),
    "no runs there": (["A/../notes"], "notes: neither a run folder nor a folder of them"),
    "no log": (["text.txt"], "text.txt: no losses found"),
    "output's name": (["A", "-o", "a.log"], r"--output a.log: the name must end in \.html"),
    "folder missing": (["A", "-o", "none/a.html"], "--output none/a.html: there is no folder none"),
    "output is a folder": (["A", "-o", "folder.html"], "folder.html: cannot be written: it is a folder"),
    "not ours": (["A", "-o", "letter.html"], "letter.html: exists and is no report of ours"),
    "too many": (["A"] * 27, "27 runs: a page shows 26 at most"),
    "beginning of a flag": (["A", "--titl", "x"], "--titl: unknown flag"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = REFUSED[name]
    Path("folder.html").mkdir()
    Path("letter.html").write_text("<p>Dear reader</p>")
    Path("text.txt").write_text("once upon a time\n")
    before = sorted(runs.parent.rglob("*"))
    named = [word.replace("A", str(runs / "a"), 1) if word[0] == "A" else word for word in words]
    status = main(named)
    output = capsys.readouterr()
    assert status == 2 and not output.out and re.search(expected, output.err.splitlines()[-1]), output.err
    assert sorted(runs.parent.rglob("*")) == before and Path("letter.html").read_text() == "<p>Dear reader</p>"


def test_a_page_needs_none_of_the_slow_packages(runs: Path) -> None:
    code = (
        "import sys; from llmc_jax.report.command import main; main(sys.argv[1:]); "
        "print(*{'jax', 'matplotlib', 'rich', 'pandas'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(runs / "b"), "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""
