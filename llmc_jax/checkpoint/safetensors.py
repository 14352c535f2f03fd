"""safetensors files by hand: which tensors one holds, reading parts of them, writing one as a stream.

A file is a uint64 (little-endian, the length of the header), the header (a JSON object: per tensor dtype, shape and
the two ends of its bytes, and under "__metadata__" texts), and the tensors' bytes, which fill the rest without a hole.
Leaves out what the tensors are. Source: the format's description in the safetensors project's README.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from llmc_jax.checkpoint.reading import Stamp, opened, read_exactly, read_float32, stamp_of
from llmc_jax.errors import FormatError

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
FLOATS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # what can be read here as float32
LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
MOST_AXES = 32
METADATA = "__metadata__"


class StoredTensor(NamedTuple):
    """One tensor of a file. offset: of its first byte in the file."""

    path: Path
    stamp: Stamp
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Archive(NamedTuple):
    """What a file's header says."""

    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]  # in the order of their bytes


def read_archive(path: str | Path) -> Archive:
    """The header of a safetensors file, checked against the format and the file's size; no tensor is read.

    Raises FormatError if it is missing, cut off, too long, no JSON object, or names tensors that overlap, leave holes,
    have sizes that do not fit their shapes, or a dtype that is not in the format.
    """
    path = Path(path)
    with opened(path) as file:
        stamp = stamp_of(file)
        header, start = _read_header(file, path, stamp.size)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise FormatError(f"{path}: its {METADATA} is not an object of texts")
    found = [_parse_tensor(path, stamp, start, name, entry) for name, entry in header.items()]
    found.sort(key=lambda tensor: (tensor.offset, tensor.size))  # one without bytes before the one that begins there
    _check_filled(path, found, start, stamp.size)
    return Archive(metadata, {tensor.name: tensor for tensor in found})


def _read_header(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Any], int]:
    """The JSON object, and the byte where the tensors begin."""
    if size < 8:
        raise FormatError(f"{path}: {size} bytes; a safetensors file begins with 8 that hold its header's length")
    length = int.from_bytes(read_exactly(file, path, 8), "little")
    if length > LONGEST_HEADER:
        swapped = int.from_bytes(length.to_bytes(8, "little"), "big")
        cause = "it is big-endian, or" if swapped <= size - 8 else "it is"
        raise FormatError(
            f"{path}: a header of {length:,} bytes, more than {LONGEST_HEADER:,}: {cause} no safetensors file"
        )
    if length > size - 8:
        raise FormatError(f"{path}: {size:,} bytes, but its header alone has {length:,}: the file is cut off")
    raw = read_exactly(file, path, length)
    if not raw.startswith(b"{"):
        raise FormatError(f"{path}: the header begins with {raw[:1]!r}, not with '{{': this is no safetensors file")
    return _parse_json(path, raw), 8 + length


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands there twice")
        return found

    try:
        header = json.loads(raw.decode(), object_pairs_hook=unique)
    except RecursionError:
        raise FormatError(f"{path}: the header is nested too deeply for a safetensors file") from None
    except ValueError as error:  # no UTF-8, no JSON, a name twice, a number of thousands of digits
        raise FormatError(f"{path}: the header is no JSON object of tensors: {error}") from None
    assert isinstance(header, dict)  # it begins with {
    return header


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _parse_tensor(path: Path, stamp: Stamp, start: int, name: str, entry: Any) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{path}: tensor {name!r} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, ends = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise FormatError(f"{path}: tensor {name!r} has dtype {dtype!r}; known are {', '.join(ITEMSIZE)}")
    if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(map(_is_size, shape)):
        raise FormatError(f"{path}: the shape of tensor {name!r} is no list of at most {MOST_AXES} sizes")
    if not isinstance(ends, list) or len(ends) != 2 or not all(map(_is_size, ends)):
        raise FormatError(f"{path}: the data_offsets of tensor {name!r} are not two byte numbers")
    nbytes = math.prod(shape) * ITEMSIZE[dtype]
    if ends[1] - ends[0] != nbytes:
        raise FormatError(
            f"{path}: tensor {name!r}, {dtype} of shape {tuple(shape)}, takes {nbytes:,} bytes, but its data_offsets "
            f"{ends} span {ends[1] - ends[0]:,}"
        )
    return StoredTensor(path, stamp, name, dtype, tuple(shape), start + ends[0])


def _check_filled(path: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            what = f"{tensor.offset - end:,} bytes before it belong to none" if tensor.offset > end else "it overlaps"
            raise FormatError(f"{path}: tensor {tensor.name!r} begins at byte {tensor.offset:,}, not {end:,}: {what}")
        end += tensor.size * ITEMSIZE[tensor.dtype]
    if end != size:
        cause = "the file is cut off" if size < end else f"{size - end:,} bytes follow the last tensor"
        raise FormatError(f"{path}: {size:,} bytes, but its tensors end at {end:,}: {cause}")


def read_part(tensor: StoredTensor, start: int = 0, count: int | None = None) -> np.ndarray:
    """Elements start to start + count of a tensor, row-major: float32 (count,), widened exactly from F32, BF16 or F16.

    Raises FormatError for another dtype, or if the file changed since its header was read.
    """
    if tensor.dtype not in FLOATS:
        raise FormatError(
            f"{tensor.path}: tensor {tensor.name!r} is of dtype {tensor.dtype}; {', '.join(FLOATS)} can be read"
        )
    count = tensor.size - start if count is None else count
    assert 0 <= start <= start + count <= tensor.size, (tensor, start, count)
    out = np.empty(count, np.float32)
    with opened(tensor.path, tensor.stamp) as file:
        offset = tensor.offset + start * ITEMSIZE[tensor.dtype]
        read_float32(file, tensor.path, offset, FLOATS[tensor.dtype], out)
    return out


def read_tensor(tensor: StoredTensor) -> np.ndarray:
    """A whole tensor as float32, in its shape; see `read_part`."""
    return read_part(tensor).reshape(tensor.shape)


def read_index(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a model in several files, by its model.safetensors.index.json; the files lie beside it.

    Raises FormatError if the index is no such thing, names a file elsewhere, or does not agree with the files.
    """
    path = Path(path)
    with opened(path) as file:
        size = stamp_of(file).size
        if size > LONGEST_HEADER:
            raise FormatError(f"{path}: {size:,} bytes; an index has at most {LONGEST_HEADER:,}")
        index = parse_object(path, read_exactly(file, path, size))
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise FormatError(f"{path}: has no weight_map from tensors to files; save the model again")
    for name in set(places.values()):
        if Path(name).name != name or "\0" in name:
            raise FormatError(f"{path}: names the file {name!r}; expected one beside it")
    archives = {name: read_archive(path.parent / name) for name in sorted(set(places.values()))}
    tensors = {}
    for tensor, name in places.items():
        if tensor not in archives[name].tensors:
            raise FormatError(f"{path}: says that {name} holds {tensor!r}, which it does not")
        tensors[tensor] = archives[name].tensors[tensor]
    return tensors


def parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON file's object. Raises FormatError if it is none."""
    try:
        found = json.loads(raw.decode())
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{path}: is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: holds no JSON object, but {type(found).__name__}")
    return found


class NewTensor(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write_archive(
    file: BinaryIO, tensors: Iterable[NewTensor], values: Iterable[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a file from its tensors and, in the same order, their values: arrays whose bytes are what is stored.

    Nothing but one array at a time is needed in memory. The header is padded with spaces to a multiple of 8 bytes, as
    the safetensors package does it; that package also sorts tensors of one dtype by name.
    """
    tensors = list(tensors)
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        nbytes = math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    assert len(raw) <= LONGEST_HEADER, len(raw)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for tensor, array in zip(tensors, values, strict=True):
        assert array.nbytes == math.prod(tensor.shape) * ITEMSIZE[tensor.dtype], (tensor, array.nbytes)
        file.write(np.ascontiguousarray(array).data)
