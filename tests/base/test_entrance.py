"""What programs say instead of a traceback before their own modules are there: old Pythons, lost packages, Ctrl-C."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmc_jax.base import entrance

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_PACKAGES = [sys.executable, "-S", "-s"]
ENTRANCES = {
    "train.py": ["train.py"],
    "convert_checkpoint.py": ["convert_checkpoint.py", "inspect", "x.bin"],
    "llmc_jax": ["-m", "llmc_jax", "generate", "x"],
    "llmc_jax.kernels": ["-m", "llmc_jax.kernels"],
}


def ended(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": "", **environment}
    return subprocess.run([*WITHOUT_PACKAGES, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ENTRANCES)
def test_a_python_without_the_packages_is_one_line(name: str) -> None:
    done = ended(ENTRANCES[name])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"{name}: needs the package ")
    again = shlex.join([".venv/bin/python", *WITHOUT_PACKAGES[1:], *ENTRANCES[name]])
    assert f"run `make setup`, then `{again}`, or `pip install .`" in done.stderr


@pytest.mark.parametrize("name", ["train.py", "llmc_jax", "llmc-jax"])
def test_ctrl_c_before_a_program_has_begun_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "textwrap.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    (tmp_path / "llmc-jax").write_text("import sys\nfrom llmc_jax.base.main import program\nsys.exit(program())\n")
    words = ENTRANCES.get(name, [str(tmp_path / name)])
    done = ended(words, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{name}: stopped\n")


@pytest.mark.parametrize("name", ["train.py", "convert_checkpoint.py", "-m"])
def test_an_old_python_is_one_line(name: str) -> None:
    what = "import llmc_jax" if name == "-m" else f"runpy.run_path({name!r}, run_name='__main__')"
    code = f"import runpy, sys; sys.path.insert(0, ''); sys.version_info = (3, 11); sys.argv = [{name!r}]; {what}"
    done = ended(["-c", code])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"{name.replace('-m', 'llmc_jax')}: Python 3.12 or newer is needed")


def test_old_pythons_can_read_what_refuses_them() -> None:
    for name in ("train.py", "convert_checkpoint.py", "llmc_jax/__init__.py", "llmc_jax/base/entrance.py"):
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"), feature_version=(3, 7))
        annotations = [node.returns for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert all(
            isinstance(each, ast.Name | ast.Constant) for each in annotations
        )  # no list[str], which they evaluate


@pytest.mark.parametrize("error", [
    ModuleNotFoundError("missing", name="llmc_jax.nothing"), ModuleNotFoundError("missing"), ValueError("missing"),
])  # fmt: skip
def test_a_mistake_of_ours_keeps_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    entrance.one_line(type(error), error, None)
    assert capsys.readouterr().err == f"{type(error).__name__}: missing\n"
