"""Fixtures of the data tests: a small byte-pair table, so that they need neither GPT-2's nor a network."""

import itertools
import struct
from collections import Counter
from pathlib import Path

import pytest

SMALL_TEXT = "the cat sat on the mat, the dog's on the log; they'll see 12 more in the 12th hour.\n\n  And then?\n" * 2
SMALL_MERGES = 37
SMALL_SPACES = (b"  ", b"\n\n", b"    ")  # as GPT-2's table, so that where a run of spaces is cut shows


def learn_pieces(text: str, merges: int) -> list[bytes]:
    """A table as GPT-2's: the single bytes in an order of its own, then the most frequent pair again and again."""
    pieces = [bytes([value * 77 % 256]) for value in range(256)]
    words = [[bytes([value]) for value in f" {word}".encode()] for word in text.split()]
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        pieces.append(best[0] + best[1])
        for word in words:
            merge(word, best)
    return pieces


def merge(word: list[bytes], pair: tuple[bytes, bytes]) -> None:
    """Join a pair wherever it stands in the word, from left to right."""
    at = 0
    while at + 1 < len(word):
        if (word[at], word[at + 1]) == pair:
            word[at : at + 2] = [word[at] + word[at + 1]]
        at += 1


@pytest.fixture(scope="session")
def small_pieces() -> tuple[bytes, ...]:
    """297 pieces; the last is the end-of-text token."""
    return (*learn_pieces(SMALL_TEXT, SMALL_MERGES), *SMALL_SPACES, b"<|end|>")


@pytest.fixture(scope="session")
def small_bin(tmp_path_factory: pytest.TempPathFactory, small_pieces: tuple[bytes, ...]) -> Path:
    """The table as a gpt2_tokenizer.bin of version 2, written by hand."""
    path = tmp_path_factory.mktemp("table") / "small.bin"
    header = struct.pack("<256I", 20240328, 2, len(small_pieces), len(small_pieces) - 1, *[0] * 252)
    path.write_bytes(header + b"".join(bytes([len(piece)]) + piece for piece in small_pieces))
    return path


@pytest.fixture(autouse=True)
def _no_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees or fills this machine's caches, and none finds a table in the folder it happens to run in."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "no-tiktoken-cache"))
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path / "cache"))
