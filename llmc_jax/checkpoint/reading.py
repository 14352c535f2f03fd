"""Stretches of large files as float32: never past a file's end, never from a file that changed meanwhile.

Files are read, not mapped: a mapped file that shrinks kills the process. Leaves out what the bytes mean.
"""

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from llmc_jax.errors import FormatError, InputError

CHUNK = 1 << 22  # elements handled at a time: 16 MiB as fp32, so that the working copies stay small beside the model
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


class Stamp(NamedTuple):
    """What tells whether a file is still the one that was looked at."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds


def stamp_of(file: BinaryIO) -> Stamp:
    """Return the stamp of an open file."""
    found = os.fstat(file.fileno())
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@contextmanager
def opened(path: Path, stamp: Stamp | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading; with a stamp, the same file as then.

    Raises FormatError if there is none, it cannot be read, it is a folder or a pipe, or it changed since `stamp`.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a folder, or something like a pipe that could block or never end
            raise FormatError(f"{path}: {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}; expected a file")
        file = path.open("rb")
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, InputError):
            raise
        raise FormatError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    with file:
        if stamp is not None and stamp_of(file) != stamp:
            raise FormatError(f"{path}: changed while it was being read; is something writing to it?")
        yield file


def read_exactly(file: Any, path: Path, count: int) -> bytes:
    """Return the next `count` bytes, a number that the caller has compared with the file's size; see `fill`."""
    raw = np.empty(count, np.uint8)
    fill(file, path, raw)
    return raw.tobytes()


def fill(file: Any, path: Path, array: np.ndarray) -> None:
    """Fill a contiguous array with the file's next bytes.

    Raises FormatError where the file ends before them, or the disk cannot give them.
    """
    try:
        count = file.readinto(array.reshape(-1).view(np.uint8).data)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    if count != array.nbytes:
        end = os.fstat(file.fileno()).st_size
        raise FormatError(f"{path}: ended at byte {end:,} while being read; is something writing to it?")


def read_json_object(path: Path, largest: int) -> dict[str, Any]:
    """Return the object in a JSON file of at most `largest` bytes. Raises FormatError if there is none."""
    with opened(path) as file:
        size = stamp_of(file).size
        if size > largest:
            raise FormatError(f"{path}: {size:,} bytes; expected a file of JSON with at most {largest:,}")
        raw = read_exactly(file, path, size)
    try:
        found = json.loads(raw.decode())
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{path}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: holds no JSON object, but {type(found).__name__}")
    return found


def read_float32(file: BinaryIO, path: Path, offset: int, dtype: str, out: np.ndarray) -> None:
    """Fill out (float32, 1-D) from the values of a dtype ("fp32", "bf16", "fp16") stored at a byte offset.

    Exact, NaN payloads included. Raises FormatError if the file ends before them.
    """
    file.seek(offset)
    bits = out.view(np.uint32)  # integers: a move through floats may quieten a signalling NaN
    for start in range(0, out.size, CHUNK):
        part = bits[start : start + CHUNK]
        stored = part.view("<u4") if dtype == "fp32" else np.empty(part.size, "<u2")
        fill(file, path, stored)
        if dtype == "fp16":
            part[...] = fp16_to_fp32(stored).view(np.uint32)
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


def fp16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Return float32 values of IEEE half precision bit patterns (uint16, any shape). Exact, NaN payloads included."""
    bits = np.asarray(bits, np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = bits.view(np.float16).astype(np.float32).view(np.uint32)
    is_nan = (bits & np.uint16(0x7FFF)) > np.uint16(0x7C00)
    if is_nan.any():  # the conversion sets the quiet bit on some machines
        b = bits[is_nan].astype(np.uint32)
        sign, payload = (b & np.uint32(0x8000)) << np.uint32(16), (b & np.uint32(0x03FF)) << np.uint32(13)
        wide[is_nan] = sign | np.uint32(0x7F800000) | payload
    return wide.view(np.float32)
