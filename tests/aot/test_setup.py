"""scripts/setup_aot.sh, run with a Python whose environments hold a pip that only writes down how it was called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import aot
from tests.test_packaging import FAKE_PYTHON, ROOT, run, write_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin exists for Linux only")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with the script's files, and the fake Python beside it."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    shutil.copy(ROOT / "constraints.txt", clone)
    write_script(tmp_path / "python", FAKE_PYTHON)
    return clone


def setup(clone: Path, *versions: str) -> subprocess.CompletedProcess[str]:
    return run(clone / "scripts/setup_aot.sh", *versions, env=os.environ | {"PYTHON": str(clone.parent / "python")})


def calls(clone: Path) -> list[str]:
    return (clone / "calls").read_text().splitlines()


def test_plugin_is_installed_once_and_without_cuda(clone: Path) -> None:
    first = setup(clone, "0.11.2")
    assert (first.returncode, first.stderr, first.stdout.count("\n")) == (0, "", 1)
    plugin, others = calls(clone)
    assert "--no-deps jax==0.11.2 jaxlib==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2" in plugin
    assert f"nvidia-cuda-nvcc=={aot.ASSEMBLER}" in plugin
    assert "-c constraints.txt" in others and "jax" not in others
    second = setup(clone, "0.11.2")
    assert (second.returncode, second.stdout, second.stderr, len(calls(clone))) == (0, "", "", 2)
    setup(clone, "0.12.0")
    assert len(calls(clone)) == 4 and (clone / ".venv-aot-0.12.0/.ready").exists()


def test_failure_is_shown_and_tried_again(clone: Path) -> None:
    (clone / "offline").touch()
    failed = setup(clone, "0.11.2")
    assert failed.returncode == 1
    assert "no route to host" in failed.stderr and "PIP_INDEX_URL" in failed.stderr
    (clone / "offline").unlink()
    assert setup(clone, "0.11.2").returncode == 0
    assert setup(clone, "0.11.2").stdout == ""
    failed = setup(clone)  # without a version
    assert failed.returncode != 0 and "usage: scripts/setup_aot.sh JAX-VERSION" in failed.stderr
