"""Fixtures that every test may use."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large reference files beside the repository; tests that need it are skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("the reference files (../shared) are not beside this clone")
    return SHARED
