"""The report's command: what it reads, where it writes, what it refuses."""

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmc_jax.report.command import MARK, main
from llmc_jax.report.gather import read_runs
from tests.printed_logs import c_main_log, written
from tests.report.runs import BEGAN, run_folder, start, train, usual, val

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
    assert main([str(runs / "b"), str(runs.parent / "main.log"), "--name", "ours,llm.c's", "--quiet"]) == 0
    assert content_of(Path("report.html")) == ["ours", "llm.c's"]
    assert main([str(runs / "a" / "metrics.jsonl"), "-o", "other.html", "--quiet"]) == 0
    assert content_of(Path("other.html")) == ["metrics.jsonl"]
    assert not (runs / "a" / "report.html").exists()


def test_the_csv_holds_every_point_with_every_digit(runs: Path) -> None:
    log = runs.parent / "main.log"
    assert main([str(runs / "a"), str(runs / "b"), str(log), "--csv", "all.csv", "--quiet"]) == 0
    with open("all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    paths = {"a": runs / "a", "b": runs / "b", "main.log": log}
    assert list(dict.fromkeys(row["run"] for row in rows)) == list(paths)
    for run in read_runs(list(paths.values())):
        own = {int(row["step"]): row for row in rows if row["run"] == run.shown.name}
        for key, series in run.figures.items():
            found = [own[step][key] for step in series.steps.tolist()]
            np.testing.assert_array_equal(np.array(found, np.float64), series.values)
            assert sum(bool(row[key]) for row in own.values()) == len(series.steps)
    first, second = rows[:2]
    assert (float(first["train.loss"]), first["val.loss"], first["tokens"], first["time"]) == (
        1 / 3,
        "5.5",
        "8.0",
        "2.0",
    )
    assert math.isnan(float(second["train.loss"])) and (second["norm"], second["val.loss"]) == ("inf", "")


@pytest.mark.parametrize("first", ["=", "+", "-", "@"])
def test_a_spreadsheet_runs_no_name_as_a_formula(runs: Path, first: str) -> None:
    name = f"{first}A1"
    run_folder(runs / name, [{"event": "train", "step": 0, "loss": -1.5}])
    assert main([str(runs / name), "--csv", "c.csv", "--quiet"]) == 0
    with open("c.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["run"] == f"'{name}" and row["train.loss"] == "-1.5"  # a number stays one


def test_a_row_of_the_csv_stands_at_its_last_value(runs: Path) -> None:
    rows = [start(), val(0, 5.0), {"event": "eval", "step": 0, "accuracy": 0.5, "time": BEGAN + 1.6}, train(0)]
    folder = run_folder(runs.parent / "c", [*rows, val(1, 4.0)])
    assert main([str(folder), "--csv", "c.csv", "--quiet"]) == 0
    with open("c.csv", newline="") as file:
        first, last = csv.DictReader(file)
    assert (first["accuracy"], first["tokens"], first["time"]) == ("50.0", "8.0", "2.0")
    assert (last["tokens"], last["time"]) == ("8.0", "2.5")


def test_a_run_without_events_does_not_hide_the_others(runs: Path) -> None:
    run_folder(runs / "c", [], torn="rubbish")
    assert main([str(runs), "--png", "c.png", "--csv", "c.csv"]) == 0
    assert content_of(runs / "report.html") == ["a", "b", "c"]


def test_pictures_and_json(runs: Path) -> None:
    words = [str(runs / "a"), "--png", "a.png", "--json", "a.json", "--title", "$a <b>\n", "--quiet"]
    assert main(words) == 0 and main([str(runs), "--png", "b.png", "--quiet"]) == 0
    assert {Path(name).read_bytes()[:8] for name in ("a.png", "b.png")} == {b"\x89PNG\r\n\x1a\n"}
    found = json.loads(Path("a.json").read_text())
    assert found["title"] == "$a <b>\n" and found["runs"][0]["curves"]["train.loss"]["y"] == [1 / 3, "nan"]


def test_what_could_not_be_read_is_said_on_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write("\x1b[2Jrubbish\n")
    assert main([str(runs / "a")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_any_name_of_a_folder(runs: Path) -> None:
    odd = run_folder(runs.parent / "</script>$_{x\n\udcff", usual())
    words = [str(odd), str(runs / "a"), "--png", "a.png", "--csv", "a.csv"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "llmc_jax.report"]
    done = subprocess.run([*command, *words], env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120)
    assert done.returncode == 0 and not done.stderr and len(done.stdout.splitlines()) == 5
    assert content_of(Path("report.html"))[0] == odd.name
    assert main([str(odd), "--png", "b.png", "--quiet"]) == 0


REFUSED = {
    "no run": ([], "required: RUN"),
    "missing": (["nothing"], "nothing: cannot read it: No such file"),
    "no runs there": (["A/../notes"], "notes: neither a run folder nor a folder of them"),
    "no log": (["text.txt"], "text.txt: no losses found"),
    "output's name": (["A", "-o", "a.log"], r"--output a.log: the name must end in \.html"),
    "png's name": (["A", "--png", "a.jpg"], r"--png a.jpg: the name must end in \.png"),
    "folder missing": (["A", "--csv", "none/a.csv"], "--csv none/a.csv: there is no folder none"),
    "output is a folder": (["A", "-o", "folder.html"], "folder.html: cannot be written: it is a folder"),
    "not ours": (["A", "-o", "letter.html"], "letter.html: exists and is no report of ours"),
    "names": (["A", "B", "--name", "x"], "--name x: not a name for each of 2 runs"),
    "empty name": (["A", "B", "--name", "x,"], "--name x,: not a name for each of 2 runs"),
    "same names": (["A", "B", "--name", "x,x"], "two names are the same"),
    "too many": (["A"] * 27, "27 runs: a page shows 26 at most"),
    "beginning of a flag": (["A", "--titl", "x"], "--titl: unknown flag; did you mean --title"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = REFUSED[name]
    Path("folder.html").mkdir()
    Path("letter.html").write_text("<p>Dear reader</p>")
    Path("text.txt").write_text("once upon a time\n")
    before = sorted(runs.parent.rglob("*"))
    named = [
        word.replace("A", str(runs / "a"), 1) if word[0] in "A" else {"B": str(runs / "b")}.get(word, word)
        for word in words
    ]
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
