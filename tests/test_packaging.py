"""The shell scripts of the two commands, run against fake Pythons, GPUs and pips; and what the metadata promises."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"


def write_script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


PRETEND = {  # what to change in this Python to make it one that does not serve
    "old": "sys.version_info = (3, 11, 9)",
    "untried": "sys.version_info = (3, 99, 0)",
    "pypy": "sys.implementation.name = 'pypy'",
    "free-threaded": "import sysconfig; sysconfig.get_config_var = lambda name: name == 'Py_GIL_DISABLED'",
    "intel-mac": "import platform; platform.system, platform.machine = lambda: 'Darwin', lambda: 'x86_64'",
    "no-venv": "sys.modules['ensurepip'] = None",
}


def fake_python(path: Path, kind: str = "good") -> Path:
    """good: this very Python; shim: what pyenv leaves on PATH for a version that is not selected; else see PRETEND."""
    if kind == "good":
        return write_script(path, f'exec {sys.executable} "$@"')
    if kind == "shim":
        return write_script(path, 'echo "pyenv: python3.13: command not found" >&2; exit 127')
    return write_script(
        path, f'shift; exec {sys.executable} -c "import sys; {PRETEND[kind]}; exec(sys.argv.pop(1))" "$@"'
    )


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without any Python: a home, and a PATH of bin and the tools that scripts need."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "uname", "cat", "awk", "chmod", "cksum", "dirname", "mkdir", "rm", "sed", "tail"):
        found = shutil.which(tool)
        assert found, f"this machine has no {tool}"
        (tools / tool).symlink_to(found)
    return {"PATH": f"{tmp_path}/bin:{tools}", "HOME": str(tmp_path / "home"), "PYTHON_DIRS": ""}


def run(script: Path, *args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([script, *args], env=env, capture_output=True, text=True, timeout=60, check=False)


def find_python(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run(SCRIPTS / "find_python.sh", env=env)


# --- find_python.sh


@pytest.mark.parametrize(
    ("variable", "place"),
    [
        ("", "bin/python3"), ("", "bin/python3.14"), ("", "bin/python"), ("", "brew/bin/python3.13"),
        ("", "home/.pyenv/versions/3.13.0/bin/python3"), ("", "home/miniforge3/bin/python3"),
        ("", "home/.local/share/uv/python/cpython-3.14.2-macos-aarch64-none/bin/python3"),
        ("", "home/.asdf/installs/python/3.12.4/bin/python3"), ("CONDA_PREFIX", "x/bin/python3"),
        ("PYENV_ROOT", "x/versions/3.12.1/bin/python3"),
        ("UV_PYTHON_INSTALL_DIR", "x/cpython-3.13.1-linux-x86_64-gnu/bin/python3"), ("PYTHON", "with space/python3"),
    ],
)  # fmt: skip
def test_finds_python_in_every_usual_place(variable: str, place: str, bare: dict[str, str], tmp_path: Path) -> None:
    script = fake_python(tmp_path / place)
    if variable:
        bare[variable] = str(script if variable == "PYTHON" else tmp_path / "x")
    bare["PYTHON_DIRS"] = f"{tmp_path}/brew/bin"
    result = find_python(bare)
    assert (result.returncode, result.stderr) == (0, "")
    assert Path(result.stdout.strip()).samefile(sys.executable)  # the interpreter itself, not the shim


@pytest.mark.parametrize("kind", ["shim", *PRETEND])
def test_passes_over_pythons_that_do_not_serve(kind: str, bare: dict[str, str], tmp_path: Path) -> None:
    fake_python(tmp_path / "bin/python3", kind)
    result = find_python(bare)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert (f"apt install python3.{sys.version_info[1]}-venv" in result.stderr) == (kind == "no-venv")
    fake_python(tmp_path / "home/.pyenv/versions/3.12.1/bin/python3")
    assert find_python(bare).returncode == 0


def test_says_in_one_line_how_to_get_python(bare: dict[str, str], tmp_path: Path) -> None:
    def answer(system: str, machine: str = "x86_64") -> str:
        write_script(tmp_path / "bin/uname", f'[ "$1" = -s ] && echo {system} || echo {machine}')
        result = find_python(bare)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        return result.stderr

    assert "brew install python" in answer("Darwin", "arm64")
    intel = answer("Darwin", "x86_64")
    assert "Intel" in intel and "docker run" in intel and "arch -arm64" in intel
    linux = answer("Linux")
    assert "uv python install" in linux and "apt install" not in linux and "PYTHON=" in linux
    write_script(tmp_path / "bin/apt-get", "true")
    assert "sudo apt install python3-venv" in answer("Linux")
    bare["PYTHON"] = str(fake_python(tmp_path / "elsewhere/python2", "old"))
    assert bare["PYTHON"] in answer("Linux")


# --- find_accelerator.sh


@pytest.mark.parametrize(
    ("gpus", "extra"),
    [
        ("590.12, 12.0\n590.12, 7.5", "cuda13"),
        ("580.65.06, 9.0\n580.65.06, 7.0", "cuda12"),  # CUDA 13 has left Volta behind
        ("525.60.13, 5.2", "cuda12"),
        ("470.82.01, 8.0", "cpu"),
        ("550.54.14, 3.5", "cpu"),
        ("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", "cpu"),
        ("", "cpu"),
    ],
)
def test_accelerator_follows_driver_and_gpu(gpus: str, extra: str, bare: dict[str, str], tmp_path: Path) -> None:
    write_script(tmp_path / "bin/nvidia-smi", f"cat <<'EOF'\n{gpus}\nEOF")
    write_script(tmp_path / "bin/uname", "echo Linux")
    result = run(SCRIPTS / "find_accelerator.sh", env=bare)
    assert (result.returncode, result.stdout) == (0, f"{extra}\n")
    assert ("too old" in result.stderr) == (extra == "cpu" and gpus[:1].isdigit())
    write_script(tmp_path / "bin/uname", "echo Darwin")
    assert run(SCRIPTS / "find_accelerator.sh", env=bare).stdout == "cpu\n"
    assert run(SCRIPTS / "find_accelerator.sh", env=bare | {"JAX": "cuda12"}).stdout == "cuda12\n"
    wrong = run(SCRIPTS / "find_accelerator.sh", env=bare | {"JAX": "rocm"})
    assert wrong.returncode == 1 and "JAX=rocm" in wrong.stderr


# --- setup.sh, with a Python whose venvs hold a pip that only writes down how it was called

FAKE_PYTHON = """case "$*" in
"-m venv "*)
    mkdir -p "$3/bin" && cat "$0" >"$3/bin/python" && chmod +x "$3/bin/python" ;;
"-m pip install "*) echo "$*" >>calls && [ ! -e offline ] || { echo 'pip: no route to host'; exit 1; } ;;
--version) echo Python 3.12.0 ;;
-c*sys.version_info*) echo "$0" ;;
esac"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with the setup's files, on a machine with the fake Python as its only one."""
    clone = tmp_path / "a clone"
    shutil.copytree(SCRIPTS, clone / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone)
    write_script(tmp_path / "bin/python3", FAKE_PYTHON)
    return clone


def calls(clone: Path) -> list[str]:
    """The extras of each pip install so far."""
    log = clone / "calls"
    return [line.rpartition(" -e ")[2] for line in log.read_text().splitlines()] if log.exists() else []


def setup(clone: Path, *args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run(clone / "scripts/setup.sh", *args, env=env)


def test_setup_installs_once_and_follows_the_project_file_and_the_gpu(
    clone: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    first = setup(clone, "dev", env=bare)
    assert (first.returncode, first.stderr, first.stdout.count("\n")) == (0, "", 1)
    for extras in ([], ["dev"]):
        again = setup(clone, *extras, env=bare)
        assert (again.returncode, again.stdout, again.stderr, calls(clone)) == (0, "", "", [".[dev]"])
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    setup(clone, env=bare)
    (clone / ".venv/kept").touch()
    setup(clone, "dev", env=bare)
    assert calls(clone) == [".[dev]", ".", ".[dev]"]
    assert (clone / ".venv/kept").exists()
    write_script(tmp_path / "bin/nvidia-smi", "echo '580.65.06, 9.0'")
    write_script(tmp_path / "bin/uname", "echo Linux")
    setup(clone, "dev", env=bare)
    assert calls(clone)[3:] == [".[cuda13,dev]"]
    assert not (clone / ".venv/kept").exists()
    setup(clone, "dev", env=bare)
    assert len(calls(clone)) == 4


def test_setup_remakes_a_moved_or_broken_environment(clone: Path, bare: dict[str, str]) -> None:
    setup(clone, env=bare)
    moved = clone.rename(clone.with_name("moved"))
    (moved / ".venv/old").touch()
    setup(moved, env=bare)
    assert calls(moved) == [".", "."] and not (moved / ".venv/old").exists()
    (moved / ".venv/bin/python").unlink()
    setup(moved, env=bare)
    assert len(calls(moved)) == 3 and (moved / ".venv/bin/python").exists()


def test_setup_shows_why_it_failed_and_tries_again(clone: Path, bare: dict[str, str]) -> None:
    (clone / "offline").touch()
    failed = setup(clone, env=bare)
    assert failed.returncode != 0
    assert "no route to host" in failed.stderr and "PIP_INDEX_URL" in failed.stderr
    (clone / "offline").unlink()
    assert setup(clone, env=bare).returncode == 0
    assert calls(clone) == [".", "."]


def test_setup_leaves_an_environment_of_the_users_alone_and_needs_a_python(
    clone: Path, bare: dict[str, str], tmp_path: Path
) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv/mine").touch()
    result = setup(clone, env=bare)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and ".venv" in result.stderr
    assert (clone / ".venv/mine").exists() and calls(clone) == []
    shutil.rmtree(clone / ".venv")
    (tmp_path / "bin/python3").unlink()
    result = setup(clone, env=bare)
    assert result.returncode == 1 and result.stderr.startswith("No Python 3.12")
    assert not (clone / ".venv").exists()


# --- Makefile and metadata


@pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")
def test_make_passes_flags_on() -> None:
    def dry_run(*args: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        return subprocess.run(["make", "-n", *args], cwd=ROOT, env=env, capture_output=True, text=True).stdout

    train = dry_run("train", "ARGS=-b 4 --preset tinyshakespeare").splitlines()
    assert train[0] == "scripts/setup.sh" and train[-1].endswith("train.py -b 4 --preset tinyshakespeare")
    test = dry_run("test", "ARGS=-k loader")
    assert "scripts/setup.sh dev" in test and '-m "not slow" -k loader' in test


@pytest.fixture(scope="module")
def whole() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def project(whole: dict) -> dict:
    return whole["project"]


def test_console_command_exists(project: dict) -> None:
    module, function = project["scripts"]["llmc-jax"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_extras(project: dict) -> None:
    assert {"cuda12", "cuda13", "triton", "data", "hf", "dev"} <= set(project["optional-dependencies"])
    for cuda in ("cuda12", "cuda13"):
        jax, nvml = project["optional-dependencies"][cuda]
        assert nvml.startswith("nvidia-ml-py")
        assert jax.replace(f"[{cuda}]", "") == project["dependencies"][0]  # the same versions as without a GPU


def test_uv_takes_the_same_versions_as_make(project: dict, whole: dict) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    block = re.search(r"^# /// script\n(.*?)^# ///$", (ROOT / "train.py").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    script = tomllib.loads(re.sub("^# ?", "", block[1], flags=re.MULTILINE))
    versions = [line for line in lines if not line.startswith("#")]
    assert script["tool"]["uv"]["constraint-dependencies"] == versions
    assert script["requires-python"] == project["requires-python"]
    assert whole["tool"]["uv"]["constraint-dependencies"] == versions
    assert "/uv.lock" in (ROOT / ".gitignore").read_text().splitlines()  # it holds addresses of one machine's index


def test_uv_takes_the_newest_jax_and_triton_its_own(project: dict, whole: dict) -> None:
    # One lock has one version of a package, unless what demands others is said to exclude each other.
    ((triton, group),) = whole["tool"]["uv"]["conflicts"]
    assert (triton, group) == ({"extra": "triton"}, {"group": "newest-jax"})
    assert whole["tool"]["uv"]["default-groups"] == [group["group"]]
    (newest,) = whole["dependency-groups"][group["group"]]
    (held,) = (each for each in project["optional-dependencies"]["triton"] if each.startswith("jax>"))
    assert newest.removeprefix("jax>=") == held.rpartition("<")[2]


def test_the_citation_and_the_changelog_know_the_version(project: dict) -> None:
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
