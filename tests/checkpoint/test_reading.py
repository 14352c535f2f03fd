"""Values widened, files that are not what they were, and the header that llm.c's files share."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError
from llmc_jax.base.files import opened, stamp_of
from llmc_jax.checkpoint.reading import read_float32, read_header_ints
from tests.checkpoint.damage import random_bits, refused


def test_read_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc_jax.checkpoint.reading.CHUNK", 7)
    words = random_bits(50, 0)
    halves = words.view(np.uint16)
    path = tmp_path / "values"
    path.write_bytes(b"abc" + words.tobytes())
    expected = {
        "fp32": words,
        "bf16": halves.astype(np.uint32) << 16,
        "fp16": halves.view(np.float16).astype(np.float32).view(np.uint32),
    }
    for dtype, bits in expected.items():
        out = np.zeros(bits.size, np.float32)
        with opened(path) as file:
            read_float32(file, path, 3, dtype, out)
        assert out.view(np.uint32).tolist() == bits.tolist(), dtype


def test_a_stamp_is_of_one_file_at_one_time(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(b"12345678")
    with opened(path) as file:
        stamp = stamp_of(file)
    with opened(path, stamp) as file:
        assert file.read() == b"12345678"
    (tmp_path / "other").write_bytes(b"12345678")
    (tmp_path / "other").replace(path)
    with pytest.raises(FormatError, match="changed while it was being read"), opened(path, stamp):
        pass


HEADER = struct.pack("<256i", magics.DEBUG_STATE, *range(255))
BAD = {
    "three bytes": (HEADER[:3], "3 bytes"),
    "cut": (HEADER[:1023], "1023 bytes; a thing begins with a header of 1024"),
    "unknown": (struct.pack("<256i", 17, *range(255)), f"17, expected magic {magics.DEBUG_STATE}"),
    "another file of llm.c's": (struct.pack("<256i", magics.MODEL, *range(255)), magics.MEANINGS[magics.MODEL]),
    "big-endian": (struct.pack(">256i", magics.DEBUG_STATE, *range(255)), "big-endian"),
}


@pytest.mark.parametrize("name", BAD)
def test_headers_that_are_refused(tmp_path: Path, name: str) -> None:
    data, words = BAD[name]
    path = tmp_path / "file"
    path.write_bytes(data)
    with opened(path) as file, refused(path, re.escape(words)):
        read_header_ints(file, path, magics.DEBUG_STATE, "a thing")
