"""Which versions fit together, and that asking imports nothing."""

import subprocess
import sys

import pytest

from llmc_jax.kernels import triton


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"jax-triton": "0.4.1", "triton": "3.7.1", "jax": "0.11.2"}, None),
        ({"jax-triton": "0.4.1", "triton": "3.7.0+git12ab", "jax": "0.11.3.dev20260801"}, None),
        ({"jax": "0.11.2"}, "jax-triton not installed, triton not installed: run python -m pip install"),
        ({"jax-triton": "0.3.1", "triton": "3.7.1", "jax": "0.11.2"}, "jax-triton 0.3.1: run"),
        ({"jax-triton": "0.4.1", "triton": "3.6.0", "jax": "0.11.2"}, "triton 3.6.0: run"),
        ({"jax-triton": "0.4.1", "triton": "3.7.1", "jax": "0.12.0.1"}, "jax 0.12.0.1: run"),
    ],
)
def test_versions(versions: dict[str, str], words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "installed", lambda *names: versions)
    found = triton.availability()
    assert found is None if words is None else str(found).startswith(words)


def test_asking_imports_no_heavy_package() -> None:
    code = (
        "import sys, llmc_jax.kernels.triton; llmc_jax.kernels.triton.availability(); "
        "print([name for name in ('triton', 'jax_triton') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
