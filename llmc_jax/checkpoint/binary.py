"""What llm.c's files have in common: a header of 256 int32, arrays that are read when asked, writing that is checked.

Leaves out what the numbers mean.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from llmc_jax import magics
from llmc_jax.checkpoint.reading import CHUNK, Stamp, opened, read_exactly, stamp_of
from llmc_jax.errors import FormatError, InputError

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


def read_at(file: BinaryIO, path: Path, offset: int, count: int) -> bytes:
    """Return `count` bytes from a byte offset, both compared with the file's size by the caller. Raises FormatError."""
    file.seek(offset)
    return read_exactly(file, path, count)


def read_header_ints(file: BinaryIO, path: Path, magic: int, what: str) -> np.ndarray:
    """Return the header that llm.c's files begin with, (256,) int32. Raises FormatError if the first is not `magic`."""
    raw = read_at(file, path, 0, min(stamp_of(file).size, HEADER_BYTES))
    if not raw:
        raise FormatError(f"{path}: the file is empty; expected {what}, magic {magic}")
    found = int.from_bytes(raw[:4], "little", signed=True)
    if len(raw) >= 4 and found != magic:
        if int.from_bytes(raw[:4], "big") == magic:
            raise FormatError(f"{path}: {what}, but big-endian; write it again on a little-endian machine")
        if found in magics.MEANINGS:
            meaning = magics.MEANINGS[found]
            raise FormatError(f"{path}: this is {meaning}, magic {found}; expected {what}, magic {magic}")
        raise FormatError(f"{path}: not {what}: it starts with {found}, expected magic {magic}")
    if len(raw) < HEADER_BYTES:
        raise FormatError(f"{path}: {len(raw)} bytes; {what} begins with a header of {HEADER_BYTES}")
    return np.frombuffer(raw, "<i4").astype(np.int32)


class Values(NamedTuple):
    """`size` little-endian float32 at a byte offset of a file, which reaches beyond them."""

    path: Path
    stamp: Stamp
    offset: int
    size: int

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return values start to start + count, (count,), newly read. Raises FormatError if the file has changed."""
        count = self.size - start if count is None else count
        assert start >= 0 and count >= 0 and start + count <= self.size
        with opened(self.path, self.stamp) as file:
            return np.frombuffer(read_at(file, self.path, self.offset + 4 * start, 4 * count), "<f4")

    def parts(self) -> Iterator[np.ndarray]:
        """Yield all values in pieces of at most CHUNK elements."""
        for start in range(0, self.size, CHUNK):
            yield self.read(start, min(CHUNK, self.size - start))


class Summed:
    """An open file whose bytes are summed up as they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sum = file, 0

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.sum = zlib.crc32(data, self.sum)

    def check(self, shown: Path) -> None:
        """Read everything back. Raises InputError, which names `shown`, if it is not what was written."""
        self.file.flush()
        found = 0
        with open(self.file.name, "rb") as file:
            while part := file.read(4 * CHUNK):
                found = zlib.crc32(part, found)
        if found != self.sum:
            raise InputError(f"{shown}: reads back differently from what was written; is the disk sound?")
