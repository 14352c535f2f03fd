"""Fixtures for the tests of runs."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.same_run import write_shards


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token files train_*.bin, val_*.bin and other_*.bin; read-only by agreement.

    Of batches of 2 x 16 tokens 20 are an epoch, in two shards: with one or two a step it ends at every 20 or 10.
    """
    folder = tmp_path_factory.mktemp("shards")
    epoch = (9 * 32 + 1, 11 * 32 + 5)
    write_shards(folder, {"train": epoch, "val": (200,), "other": epoch})
    return folder


@pytest.fixture(scope="session")
def data(shards: Path) -> list[Any]:
    """The flags that name them."""
    return ["-i", shards / "train_*.bin", "-j", shards / "val_*.bin"]


@pytest.fixture
def main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("Python lets only the main thread handle signals")
