"""Fixtures of the operations' tests."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest


@pytest.fixture
def double() -> Iterator[None]:
    """float64 inside the test alone, so that the order of the tests does not matter."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compilation: None) -> None:
    pass
