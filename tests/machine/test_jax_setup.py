"""The program's surroundings: packages that are missing, the command in hints, a cache that cannot be written."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import pytest

from llmc_jax.machine import jax_setup

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("script", "flags", "setup"), [
    ("train.py", ["-b", "2"], "make train"), ("convert_checkpoint.py", ["inspect", "x.bin"], "make setup"),
])  # fmt: skip
def test_a_python_without_the_packages_is_one_line(script: str, flags: list[str], setup: str) -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / script)]  # -S: without site-packages; -I: nor PYTHONPATH
    code = f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); sys.argv = {[script, *flags]!r}; "
    code += f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    done = subprocess.run([*command[:3], "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"{script}: needs the package ")
    assert f"run `{setup}`, or `.venv/bin/python {script}`, or `pip install .`" in done.stderr


@pytest.mark.parametrize("name", ["llmc_jax.nothing", None])
def test_a_module_of_ours_that_is_missing_is_a_mistake(name: str | None) -> None:
    with pytest.raises(ModuleNotFoundError), jax_setup.packages_for("train.py", "make train"):
        raise ModuleNotFoundError("missing", name=name)


def test_the_command_in_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert jax_setup.train_command() == "python train.py"
    (tmp_path / ".venv").mkdir()
    assert jax_setup.train_command() == "python train.py"  # another Python than the one that runs
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert jax_setup.train_command() == ".venv/bin/python train.py"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / ".venv"))
    assert jax_setup.train_command() == "python train.py"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/llmc-jax"])
    assert jax_setup.train_command() == "llmc-jax"
    monkeypatch.setattr(sys, "argv", ["/elsewhere/llmc_jax/__main__.py"])
    assert jax_setup.train_command() == "python -m llmc_jax"
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    monkeypatch.setattr(jax_setup, "__file__", str(tmp_path / "site-packages/llmc_jax/machine/jax_setup.py"))
    assert jax_setup.train_command() == "llmc-jax"  # installed: there is no train.py


def test_a_cache_that_cannot_be_written_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    try:
        (tmp_path / "file").write_text("x")
        monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path / "file"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (note,) = jax_setup.configure()
        assert note.startswith(f"{tmp_path / 'file' / 'xla'}: cannot be written (")
        assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path / "new"))
        assert jax_setup.configure() == []
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "new" / "xla")
        assert os.listdir(tmp_path / "new" / "xla") == []
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
