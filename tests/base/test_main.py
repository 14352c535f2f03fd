"""One command for all programs: which one a first word runs, and what each calls itself."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc_jax.base.commands import COMMANDS
from llmc_jax.base.main import main
from llmc_jax.machine import jax_setup

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `llmc-jax` with words, and return the exit status. A restart would start pytest again."""
    monkeypatch.setenv("LLMC_JAX_NO_RESTART", "1")
    monkeypatch.setenv("VIRTUAL_ENV", "/anywhere")  # activated: nothing stands before the command

    def run(*words: str, program: str = "/usr/bin/llmc-jax") -> int:
        monkeypatch.setattr(sys, "argv", [program, *words])
        try:
            return main()
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_each_explains_itself_by_the_name_that_was_typed(
    name: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: llmc-jax {name} [")
    assert any(line.startswith("  llmc-jax ") for line in shown.partition("\nExamples:\n")[2].splitlines())


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        (["-b", "0"], "llmc-jax train: -b 0: "),
        (["train", "-b", "0"], "llmc-jax train: -b 0: "),
        (["convert", "inspect", "/none.bin"], "llmc-jax convert: /none.bin: "),
        (["checkpoint", "runs/a"], "llmc-jax checkpoint: COMMAND: invalid choice: 'runs/a' (choose from 'verify'"),
        (["checkpoint", "verify", "/none"], "llmc-jax checkpoint: /none: "),
        (["compare", "logs", "a.log"], "llmc-jax compare: 1 log given"),
        (["data", "inspect", "/none.bin"], "llmc-jax data: inspect /none.bin: "),
        (["data", "prepare", "x", "--tokeniser", "bytes"], "llmc-jax data: --tokeniser: unknown flag; --help "),
        (["convert", "inspect", "x", "-t", "4"], "llmc-jax convert: -t: unknown flag; --help "),
        (["kernels", "--nonsense"], "llmc-jax kernels: --nonsense: "),
        (["model", "check", "/none.py"], "llmc-jax model: /none.py: "),
        (["plan", "--nonsense"], "llmc-jax plan: --nonsense: "),
        (["profile", "--nonsense"], "llmc-jax profile: --nonsense: "),
    ],
)
def test_messages_begin_with_what_was_typed(
    words: list[str], begin: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(begin)


@pytest.mark.parametrize("name", ["checkpoint", "compare", "convert", "data", "model", "report", "watch"])
def test_what_a_terminal_would_obey_is_escaped(name: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"checkpoint": ["verify", "x"], "compare": ["logs", "x"], "convert": ["inspect", "x"], "data": ["list"],
             "model": ["check", "x"]}  # fmt: skip
    assert run(name, *words.get(name, ["x"]), "--\x1b]0;title\x07\x9b2J") == 2
    error = capsys.readouterr().err
    assert "\\x1b]0;title\\x07\\x9b2J" in error
    assert error.replace("\n", "").isprintable()


def test_a_number_of_very_many_digits_is_bad_input(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("data", "prepare", "x", "--shard-size", "9" * 5000) == 2
    assert "--shard-size 999" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["trian", ""])
def test_another_word_is_one_line_that_names_the_subcommands(
    word: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(word, "-b", "4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("llmc-jax: ") and ", ".join(COMMANDS) in line


def test_help_lists_the_subcommands_only_where_none_was_given(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*words: str) -> bool:
        assert run(*words) == 0
        text = capsys.readouterr().out
        found = {name for name in COMMANDS if f"\n  {name} " in text}
        assert found in (set(), set(COMMANDS)) and max(map(len, text.splitlines())) <= 100
        return bool(found)

    assert listed("--help") and listed("-e", "d12", "--help")
    assert not listed("train", "--help")


def test_training_starts_again_with_huge_pages_and_what_is_shown_does_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts: list[int] = []
    monkeypatch.setattr(jax_setup, "restart_with_huge_pages", lambda: restarts.append(1))
    for count, words in enumerate([("-b", "0"), ("train", "-b", "0"), ("train", "-x", "no")], start=1):
        assert (run(*words), len(restarts)) == (2, count)
    assert (run("train", "--help"), len(restarts)) == (0, 3)


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "llmc_jax", "train", "-b", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "llmc-jax train: -b 0: batch size must be at least 1, or auto\n"
