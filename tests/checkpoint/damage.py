"""Damage to files, how they are refused, and with how much memory."""

import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint import reading


@contextmanager
def refused(path: Path, words: str) -> Iterator[None]:
    """Check that what the block reads is refused in one line that begins with the file's name."""
    with pytest.raises(FormatError, match=words) as caught:
        yield
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def flip(path: Path, byte: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 16
    path.write_bytes(data)


def random_bits(count: int, seed: int) -> np.ndarray:
    """Return float32 bit patterns of every kind, uint32: NaN payloads, infinities, subnormals, -0."""
    return np.frombuffer(np.random.default_rng(seed).bytes(4 * count), np.uint32)


def mutated(draw: st.DrawFn, good: bytes, places: st.SearchStrategy[int]) -> bytes:
    """Return a file with some bytes changed, the first where `places` says, and its end cut or added to."""
    raw = bytearray(good)
    for at in draw(st.lists(places | st.integers(0, len(good) - 1), max_size=4)):
        raw[at] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        end = draw(st.integers(0, len(raw) + 100))
        raw = raw[:end] + bytes(max(0, end - len(raw)))
    return bytes(raw)


def spoil_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file change between writing and reading back."""
    real = reading.Summed.check

    def after_a_flip(self: Any, shown: Path) -> None:
        self.file.seek(-5, os.SEEK_CUR)
        self.file.write(b"\x01")
        real(self, shown)

    monkeypatch.setattr(reading.Summed, "check", after_a_flip)


@contextmanager
def memory_below(limit: float) -> Iterator[None]:
    """The block never holds as many bytes."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit
