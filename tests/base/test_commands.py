"""How commands are typed in a terminal: in an environment that is active or not, under uv, as a script."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from llmc_jax.base import commands
from llmc_jax.base.commands import COMMANDS, program_name, typed


def test_the_command_in_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert (typed("train"), typed("data")) == ("python train.py", "llmc-jax data")
    (tmp_path / ".venv").mkdir()
    assert typed("train") == "python train.py"  # another Python than the one that runs
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert (typed("train"), typed("data")) == (".venv/bin/python train.py", ".venv/bin/llmc-jax data")
    assert (program_name("train"), program_name("data")) == ("train.py", "llmc-jax data")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / ".venv"))
    assert typed("convert") == "python convert_checkpoint.py"
    for place in ("/usr/bin/llmc-jax", "/elsewhere/llmc_jax/__main__.py"):
        monkeypatch.setattr(sys, "argv", [place])
        assert (typed("train"), program_name("train")) == ("llmc-jax train", "llmc-jax train")


@pytest.mark.parametrize(
    ("place", "venv", "train"),
    [
        ("/bin/llmc-jax", ".venv", "uv run llmc-jax train"),
        ("/llmc_jax/plan/__main__.py", ".venv", "uv run python train.py"),
        ("train.py", ".venv", "uv run python train.py"),
        ("train.py", "train-1f", "uv run train.py"),  # a script's environment
    ],
)
def test_hints_begin_with_uv_run_where_that_was_typed(
    place: str, venv: str, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    monkeypatch.setenv("VIRTUAL_ENV", str(commands.ROOT / venv))
    monkeypatch.setattr(sys, "prefix", str(commands.ROOT / venv))
    monkeypatch.setattr(sys, "argv", [place, "x"])
    assert (typed("train"), typed("data")) == (train, "uv run llmc-jax data")


def test_each_command_has_its_module_and_its_script() -> None:
    for about in COMMANDS.values():
        assert callable(import_module(f"llmc_jax.{about.module}").main)
        assert not about.script or (commands.ROOT / about.script).is_file()
