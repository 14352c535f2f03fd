"""Which versions fit together, and that asking imports nothing."""

import importlib.metadata
import subprocess
import sys

import pytest

from llmc_jax.kernels import triton


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"jax-triton": "0.4.1", "triton": "3.7.1", "jax": "0.11.2"}, None),
        ({"jax-triton": "0.4.1", "triton": "3.7.0+git12ab", "jax": "0.11.3.dev20260801"}, None),
        ({"jax-triton": "0.4.2", "triton": "3.10.0", "jax": "0.12.0.1"}, None),  # not known not to work
        ({"jax": "0.11.2"}, ["not installed: jax-triton and triton", "pip install"]),
        ({"triton": "3.7.1", "jax": "0.11.2"}, ["not installed: jax-triton; ", "pip install"]),
        ({"jax-triton": "0.3.1", "triton": "3.7.1", "jax": "0.11.2"}, ["jax-triton 0.3.1", "0.4.1 or later"]),
        ({"jax-triton": "0.4.1", "triton": "3.6.0", "jax": "0.11.2"}, ["triton 3.6.0", "3.7 or later"]),
        (
            {"jax-triton": "0.4.1", "triton": "3.7.1", "jax": "0.12.0.1"},
            ["jax-triton 0.4.1 does not work with jax 0.12.0.1", "jax 0.11:", "pip install"],
        ),
    ],
)
def test_versions(versions: dict[str, str], words: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = triton.availability()
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert "\n" not in found
        assert [word for word in words if word not in found] == []


def test_asking_imports_no_heavy_package() -> None:
    code = (
        "import sys, llmc_jax.kernels.triton; llmc_jax.kernels.triton.availability(); "
        "print([name for name in ('triton', 'jax_triton') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
