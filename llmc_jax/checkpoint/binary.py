"""What files of weights have in common: arrays read when asked, llm.c's header of 256 int32, writing that is checked.

Leaves out what the numbers mean.
"""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from llmc_jax import magics
from llmc_jax.checkpoint.reading import CHUNK, ITEMSIZE, not_finite, read_exactly, read_float32
from llmc_jax.errors import FormatError, InputError
from llmc_jax.files import Stamp, opened, stamp_of

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


def read_at(file: BinaryIO, path: Path, offset: int, count: int) -> bytes:
    """Return `count` bytes from a byte offset, both compared with the file's size by the caller. Raises FormatError."""
    file.seek(offset)
    return read_exactly(file, path, count)


def read_header_ints(file: BinaryIO, path: Path, magic: int, what: str) -> np.ndarray:
    """Return the header that llm.c's files begin with, (256,) int32. Raises FormatError if the first is not `magic`."""
    raw = read_at(file, path, 0, min(stamp_of(file).size, HEADER_BYTES))
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


class Stored(NamedTuple):
    """An array in a file, row-major, read when asked. name: what messages call it.

    dtype: "fp32", "bf16" or "fp16", little-endian; one with another dtype's name cannot be read.
    """

    path: Path
    stamp: Stamp
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Return the offset of the first byte behind it."""
        return self.offset + self.size * ITEMSIZE[self.dtype]

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return elements start to start + count, or to the end: (count,) float32, widened exactly, newly read.

        Raises FormatError if the file has changed since it was opened.
        """
        count = self.size - start if count is None else count
        assert 0 <= start <= start + count <= self.size, (self, start, count)
        out = np.empty(count, np.float32)
        with opened(self.path, self.stamp) as file:
            read_float32(file, self.path, self.offset + start * ITEMSIZE[self.dtype], self.dtype, out)
        return out

    def whole(self) -> np.ndarray:
        """Return all of it in its shape; see `read`."""
        return self.read().reshape(self.shape)

    def layer(self, index: int) -> np.ndarray:
        """Return the part at an index of the first axis; see `read`."""
        size = math.prod(self.shape[1:])
        return self.read(index * size, size).reshape(self.shape[1:])

    def parts(self) -> Iterator[np.ndarray]:
        """Yield all values in pieces of at most CHUNK elements."""
        for start in range(0, self.size, CHUNK):
            yield self.read(start, min(CHUNK, self.size - start))

    def same_bits(self, other: "Stored") -> bool:
        """Return whether another array has this shape and these values, bit for bit."""
        pairs = zip(self.parts(), other.parts(), strict=True)
        return self.shape == other.shape and all(one.tobytes() == theirs.tobytes() for one, theirs in pairs)

    def warnings(self) -> Iterator[str]:
        """Yield a warning if there are NaN or infinities. Reads all of it."""
        if bad := sum(map(not_finite, self.parts())):
            yield f"{self.name}: {bad:,} of {self.size:,} values are NaN or infinite"


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
