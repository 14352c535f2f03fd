"""The command line: its comparisons, what they share, and how it ends."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from llmc_jax.base.plain import to_json
from llmc_jax.compare import logs
from llmc_jax.compare.command import COMMANDS, main
from llmc_jax.compare.tensors import Show


@pytest.mark.parametrize("name", COMMANDS)
def test_every_comparison_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--json [FILE]" in text and "Exit status: 0" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "required: COMMAND"), (["nothing"], "invalid choice: 'nothing'"), (["logs"], "required: LOG")],
)
def test_wrong_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/anywhere")  # activated: nothing stands before the command
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("llmc-jax compare: ") and said in line


# ----- what all of them print ---------------------------------------------------------------------------------------


def test_arrays_and_odd_values_become_json() -> None:
    value = {"a": np.array([1.0, np.nan, np.inf]), "b": np.float32(0.5), "c": Path("x"), "d": (np.int64(3), np.True_)}
    assert to_json(value) == {"a": [1.0, "nan", "inf"], "b": 0.5, "c": "x", "d": [3, True]}


def test_where_json_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def said(_args: argparse.Namespace, show: Show) -> tuple[bool, dict]:
        show("table")
        return True, {"a": 1}

    monkeypatch.setattr(logs, "run", said)
    file = tmp_path / "a.json"
    assert main(["logs", "x"]) == 0 and capsys.readouterr().out == "table\n"
    assert main(["logs", "x", "--json", str(file)]) == 0 and capsys.readouterr().out == "table\n"
    assert main(["logs", "x", "--json"]) == 0 and capsys.readouterr().out == file.read_text()
    assert json.loads(file.read_text()) == {"a": 1}
    assert main(["logs", "x", "--json", str(tmp_path / "nowhere" / "a.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
