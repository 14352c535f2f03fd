"""safetensors files: which tensors one holds, writing one as a stream.

A file is a uint64 (little-endian, the length of the header), the header (a JSON object: per tensor dtype, shape and
the two ends of its bytes, and under "__metadata__" texts), and the tensors' bytes, which fill the rest without a hole.

The safetensors package decides whether a file is sound. Values are read and files written here all the same, for two
reasons. The package maps a file into memory, so that one which somebody shortens meanwhile ends the process (SIGBUS);
and it writes a file from all of its tensors at once, 6 GB for a model of 1558M, where a slice at a time is enough.
Leaves out what the tensors are.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from llmc_jax.base.errors import FormatError
from llmc_jax.base.files import opened, read_json_object, stamp_of
from llmc_jax.checkpoint.reading import ITEMSIZE, Stored, read_at

FLOATS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # what can be read here as float32
LARGEST_INDEX = 100_000_000  # bytes
METADATA = "__metadata__"


def read_archive(path: str | Path) -> dict[str, Stored]:
    """Return the tensors that a file's header names; none of them is read, and those not in FLOATS cannot be.

    Raises FormatError if the file is missing, cut off, too long or otherwise none that the package reads.
    """
    path = Path(path)
    with opened(path) as file:
        stamp = stamp_of(file)
        try:
            with safe_open(path, "numpy"):
                pass
        except (SafetensorError, OSError) as error:
            problem = " ".join(str(error).split())
            words = f"{stamp.size:,} bytes that are no whole safetensors file: {problem}"
            raise FormatError(f"{path}: {words}; if it was cut off, copy it again") from None
        length = int.from_bytes(read_at(file, path, 0, 8), "little")
        header: dict[str, Any] = json.loads(read_at(file, path, 8, length))
    header.pop(METADATA, None)
    tensors = {}
    for name, at in header.items():
        try:
            dtype, offset = FLOATS.get(at["dtype"], at["dtype"]), 8 + length + at["data_offsets"][0]
        except TypeError:  # an array in the place of an object, which the package takes too
            raise FormatError(f"{path}: {name!r} must have dtype, shape and data_offsets; save it again") from None
        tensors[name] = Stored(path, stamp, name, dtype, tuple(at["shape"]), offset)
    return tensors


def read_index(path: str | Path) -> dict[str, Stored]:
    """Return the tensors of a model in several files, by its model.safetensors.index.json; the files lie beside it.

    Raises FormatError if the index is no such thing, names a file elsewhere, or does not agree with the files.
    """
    path = Path(path)
    places = _places(path)
    archives = {name: read_archive(path.parent / name) for name in sorted(set(places.values()))}
    tensors = {}
    for tensor, name in places.items():
        if tensor not in archives[name]:
            raise FormatError(f"{path}: says that {name} holds {tensor!r}, which it does not")
        tensors[tensor] = archives[name][tensor]
    return tensors


def files_of_index(path: Path) -> set[str]:
    """Return the names of the files that an index names. Raises FormatError if it is none."""
    return set(_places(path).values())


def _places(path: Path) -> dict[str, str]:
    places = read_json_object(path, LARGEST_INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise FormatError(f"{path}: has no weight_map from tensors to files; save the model again")
    for name in set(places.values()):
        if Path(name).name != name or "\0" in name:
            raise FormatError(f"{path}: names the file {name!r}; expected one beside it")
    return places


def write_archive(
    file: BinaryIO, dtype: str, shapes: Mapping[str, tuple[int, ...]], values: Iterable[np.ndarray]
) -> None:
    """Write a file from its tensors' shapes, by name, and in the same order their values as they are to be stored.

    Nothing but one array at a time is needed in memory. The header is padded with spaces to a multiple of 8 bytes, as
    the safetensors package does it; that package also sorts tensors of one dtype by name.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * ITEMSIZE[FLOATS[dtype]]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for (name, shape), array in zip(shapes.items(), values, strict=True):
        assert array.nbytes == math.prod(shape) * ITEMSIZE[FLOATS[dtype]], (name, array.nbytes)
        file.write(np.ascontiguousarray(array).data)
