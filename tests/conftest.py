"""Fixtures that every test may use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of large reference files beside the repository; tests that need it are skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip("the reference files (../shared) are not beside this clone")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills this machine's caches (compiled programs, the built-in corpus); they share a new one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMC_JAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
