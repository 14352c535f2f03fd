"""Fixtures of the data tests: a small byte-pair table, so that they need neither GPT-2's nor a network."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmc_jax.data import download
from tests.data.server import Files, serving

# The most frequent pair of a small text, joined again and again, as GPT-2's table was learned.
LEARNED = (
    b"th| th| the|at| 1| m| o| s| 12| on|og| A| c| d| h| i| l| 12th| An| And| cat| dog| dog'| dog's| ho| hou| hour"
    b"| hour.| in| log| log;| mat| mo| mat,| mor| more| sat"
).split(b"|")
SPACES = (b"  ", b"\n\n", b"    ")  # as in GPT-2's table, so that where a run of spaces is cut shows


@pytest.fixture(scope="session")
def small_pieces() -> tuple[bytes, ...]:
    """297 pieces: the single bytes in an order of their own first; the last is the end-of-text token."""
    return (*(bytes([value * 77 % 256]) for value in range(256)), *LEARNED, *SPACES, b"<|end|>")


@pytest.fixture(scope="session")
def small_bin(tmp_path_factory: pytest.TempPathFactory, small_pieces: tuple[bytes, ...]) -> Path:
    """The table as a gpt2_tokenizer.bin of version 2, written by hand."""
    path = tmp_path_factory.mktemp("table") / "small.bin"
    header = struct.pack("<256I", 20240328, 2, len(small_pieces), len(small_pieces) - 1, *[0] * 252)
    path.write_bytes(header + b"".join(bytes([len(piece)]) + piece for piece in small_pieces))
    return path


@pytest.fixture(autouse=True)
def _own_folder_no_caches_and_no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test runs in its tmp_path, with no table in it; none sees or fills this machine's caches."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    places = {"TIKTOKEN_CACHE_DIR": "no-tiktoken-cache", "LLMC_JAX_CACHE": "cache", "HF_HOME": "no-login"}
    for name, folder in places.items():
        monkeypatch.setenv(name, str(tmp_path / folder))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """A file server in the place of Hugging Face's."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSES", (0.0, 0.0, 0.0))
    with serving() as files:
        monkeypatch.setenv("HF_ENDPOINT", files.address)
        yield files
