"""What files of weights have in common: stretches and arrays as float32, llm.c's header of 256 int32, checked writing.

Files are read, not mapped: a mapped file that shrinks kills the process. Leaves out what the numbers mean.
"""

import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import Stamp, opened, refusing, stamp_of
from llmc_jax.base.magics import HEADER_BYTES

HEADER_INTS = 256
CHUNK = 1 << 22  # elements handled at a time: 16 MiB as fp32, so that the working copies stay small beside the model
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def fill(file: Any, path: Path, array: np.ndarray) -> None:
    """Fill a contiguous array with the file's next bytes.

    Raises FormatError where the file ends before them, or the disk cannot give them.
    """
    with refusing(f"{path}: cannot be read", kind=FormatError):
        count = file.readinto(array.reshape(-1).view(np.uint8).data)
    if count != array.nbytes:
        end = os.fstat(file.fileno()).st_size
        raise FormatError(f"{path}: ended at byte {end:,} while being read; is something writing to it?")


def read_float32(file: BinaryIO, path: Path, offset: int, dtype: str, out: np.ndarray) -> None:
    """Fill out (float32, 1-D) from the values of a dtype ("fp32", "bf16", "fp16") stored at a byte offset.

    Exact; of fp32 and bf16 NaN payloads too. Raises FormatError if the file ends before them.
    """
    file.seek(offset)
    bits = out.view(np.uint32)  # integers: a move through floats may quieten a signalling NaN
    for start in range(0, out.size, CHUNK):
        part = bits[start : start + CHUNK]
        stored = part.view("<u4") if dtype == "fp32" else np.empty(part.size, "<u2")
        fill(file, path, stored)
        if dtype == "fp16":
            out[start : start + CHUNK] = stored.view("<f2")
        elif stored.dtype != part.dtype:  # or its bytes stand in another order than this machine's
            part[...] = stored
        if dtype == "bf16":
            part <<= np.uint32(16)


def chunks(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a 1-D array in pieces of at most CHUNK elements."""
    for start in range(0, values.size, CHUNK):
        yield values[start : start + CHUNK]


def not_finite(values: np.ndarray) -> int:
    """Return how many values are NaN or infinite."""
    return int(values.size - np.count_nonzero(np.isfinite(values)))


def read_at(file: BinaryIO, path: Path, offset: int, count: int) -> bytes:
    """Return `count` bytes from a byte offset, both compared with the file's size by the caller; see `fill`."""
    raw = np.empty(count, np.uint8)
    file.seek(offset)
    fill(file, path, raw)
    return raw.tobytes()


def read_header_ints(file: BinaryIO, path: Path, magic: int, what: str) -> np.ndarray:
    """Return the header that llm.c's files begin with, (256,) int32. Raises FormatError if the first is not `magic`."""
    raw = read_at(file, path, 0, min(stamp_of(file).size, HEADER_BYTES))
    return np.array(magics.read_header(path, raw, magic, what), np.int32)


def check_size(path: Path, found: int, expected: int, what: str, else_wrong: str) -> None:
    """Compare a file's bytes with those that it must have. what: it is. else_wrong: if not its length. FormatError."""
    if found != expected:
        cause = f"the file is {'cut off' if found < expected else 'too long'}, or {else_wrong}"
        raise FormatError(f"{path}: {found:,} bytes, but {what} takes {expected:,}: {cause}")


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
