"""Stretches of large files as float32: never past a file's end.

Files are read, not mapped: a mapped file that shrinks kills the process. Leaves out what the bytes mean.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmc_jax.errors import FormatError

CHUNK = 1 << 22  # elements handled at a time: 16 MiB as fp32, so that the working copies stay small beside the model
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


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
