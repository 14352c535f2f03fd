"""The Triton kernels, run by Triton's interpreter: no GPU, no PyTorch. Skipped where the packages are not there."""

import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from llmc_jax.kernels.triton import availability


@pytest.fixture(scope="session")
def kernels() -> Iterator[SimpleNamespace]:
    """The modules with the kernels, in a process whose Triton interprets: it decides when it is imported."""
    problem = availability()
    if problem:
        pytest.skip(f"the Triton kernels: {problem}, or make test-triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"))
        triton = importlib.import_module("triton")
        if isinstance(triton.language.sum, triton.JITFunction):
            pytest.skip("another test has imported Triton to compile: run `pytest tests/kernels/triton` by itself")
        names = ("call", "layernorm", "softmax", "classifier")
        yield SimpleNamespace(**{name: importlib.import_module(f"llmc_jax.kernels.triton.{name}") for name in names})
