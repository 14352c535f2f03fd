"""`llmc-jax model check`: table, JSON, exit status, and one line for a file that cannot be used."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc_jax.models.command import main
from tests.families import none_loaded
from tests.models.own_models import GPT2, SMALL, changed, line_of

SYNTAX = changed(SMALL, "return Program(hidden=hidden)", "return Program(hidden=hidden")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with none_loaded():
        yield Path("model.py")


def test_a_right_file_and_its_json(file: Path, capsys: Capture) -> None:
    file.write_text(SMALL)
    assert main(["check", "model.py", "-e", "4", "--json", "found.json"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.endswith("  ok")]
    assert [row[0] for row in rows] == ["hidden", "loss_and_gradients", "decoder"]
    found = json.loads(Path("found.json").read_text())
    assert found["agrees"] and (found["family"], found["shape"]) == ("small", "4")
    assert [(each["function"], each["wrong"]) for each in found["comparisons"]] == [(row[0], []) for row in rows]
    assert all(note in " ".join(shown.split()) for note in found["notes"])


@pytest.mark.slow
def test_a_difference_is_status_4(file: Path, capsys: Capture) -> None:
    file.write_text(changed(SMALL, "(2 * dout,)", "(3 * dout,)"))
    assert main(["check", "model.py", "-e", "4"]) == 4
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert row[0] == "hidden" and row[3] == "table" and row[-2:] == ["DIFFERS:", "table"]
    assert main(["check", "model.py", "-e", "4", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["wrong"] == ["table"]


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        (SYNTAX, "return Program(", "SyntaxError"),
        (changed(SMALL, "x = double", "x = undouble"), "undouble", "hidden: NameError"),
        (SMALL + "1 / 0\n", "1 / 0", "ZeroDivisionError"),
    ],
)
def test_one_line_names_the_line(file: Path, text: str, line: str, named: str, capsys: Capture) -> None:
    file.write_text(text)
    assert main(["check", "model.py", "-e", "4"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"llmc-jax model: model.py: line {line_of(text, line)}: ") and named in said


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        (SMALL.replace("FAMILY", "FAMILIES"), ["-e", "4"], "FAMILY"),
        (SMALL, [], "-e"),
        (GPT2, ["-e", "nothing"], "-e nothing"),
        (None, [], "model.py"),
    ],
)
def test_what_cannot_be_used(file: Path, text: str | None, words: list[str], named: str, capsys: Capture) -> None:
    if text is not None:
        file.write_text(text)
    assert main(["check", "model.py", *words]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("llmc-jax model: model.py: ") and named in said


@pytest.mark.slow
def test_gpt2_under_another_name(file: Path, capsys: Capture) -> None:
    file.write_text(GPT2)
    assert main(["check", "model.py"]) == 0
    assert capsys.readouterr().out.count("  ok\n") == 12
