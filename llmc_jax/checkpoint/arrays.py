"""The files of a checkpoint's arrays, as zarr 3 has them, not compressed: orbax can read them, and nothing else need.

An array is one chunk in one file: its bytes, and then (zarr's sharding) 20 more that say where they lie. So reading and
writing take no library, a part of an array is a part of its file, and every write is one that can be seen and tested.
Where several processes write a checkpoint, each block of a flat buffer is such a chunk in a file of its own, so that no
two processes write to one file.

Leaves out which arrays there are, and what a damaged one means (store.py).
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint.manifest import THREADS, Tensor, digest_of_block, dtype_of, in_threads, opened_regular

TENSORS = "tensors"  # the folder of the arrays
WORTH_A_THREAD = 1 << 20  # bytes that take longer to read than a thread to begin
INDEX_SIZE = 20  # bytes at the end of a zarr shard of one chunk: its offset, its bytes, a CRC-32C of both


def array_file(name: str, tensor: Tensor, part: int = 0) -> str:
    """Return the path of a part of an array, relative to the state folder. Only a 1-D array has several parts."""
    return "/".join((TENSORS, name.replace("/", "."), "c", *[str(part)] * len(tensor.shape)))


def file_of_block(name: str, tensor: Tensor, block: int) -> str:
    """Return the path of the file that a block lies in."""
    return array_file(name, tensor, block * tensor.parts // len(tensor.sha256))


def file_size(tensor: Tensor) -> int:
    """Return the bytes of each of an array's files."""
    return tensor.size // tensor.parts * dtype_of(tensor.dtype).itemsize + INDEX_SIZE


def _index(nbytes: int) -> bytes:
    """Return what follows an array of so many bytes in its file."""
    place, crc = struct.pack("<QQ", 0, nbytes), 0xFFFFFFFF
    for byte in place:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)  # Castagnoli's polynomial
    return place + struct.pack("<I", crc ^ 0xFFFFFFFF)


def _no_array(path: str, tensor: Tensor) -> FormatError:
    what = f"{file_size(tensor) - INDEX_SIZE:,} bytes of an array of shape {tensor.shape}"
    return FormatError(f"{path}: does not hold {what}")


def check_sizes(folder: Path, name: str, tensor: Tensor, start: int, stop: int) -> None:
    """Raise FormatError if a file that holds some of the elements [start, stop) is not of its size; or OSError."""
    length = tensor.size // tensor.parts
    for part in range(start // length, -(-stop // length)):
        path = array_file(name, tensor, part)
        if (folder / path).stat().st_size != file_size(tensor):
            raise _no_array(path, tensor)


@contextmanager
def _opened(folder: Path, name: str, tensor: Tensor, part: int) -> Iterator[Any]:
    """Open a part of an array. Raises FormatError if it is not of its size, or is not one chunk."""
    path, size = array_file(name, tensor, part), file_size(tensor)
    with opened_regular(folder / path) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise _no_array(path, tensor)
        file.seek(size - INDEX_SIZE)
        if file.read() != _index(size - INDEX_SIZE):
            raise FormatError(f"{path}: damaged: does not end as the file of one chunk does")
        yield file


def damaged_blocks(
    folder: Path, name: str, tensor: Tensor, start: int = 0, stop: int | None = None, out: np.ndarray | None = None
) -> list[int]:
    """Read the blocks of an array that hold its elements [start, stop); return which are not what was saved.

    out: takes these elements, (stop - start,). Beside it each thread needs the memory of a block.
    Raises FormatError if a file that holds some of them is not of its size, or does not end as it must; or OSError.
    """
    size, dtype, in_a_file = tensor.block, dtype_of(tensor.dtype), len(tensor.sha256) // tensor.parts
    stop = tensor.size if stop is None else stop

    def sound(k: int, file: Any, spare: np.ndarray) -> bool:
        """Read the next block of a file, the k-th of the array; return whether it is what was saved."""
        first, last = max(start, k * size), min(stop, (k + 1) * size)  # of what is wanted of it
        wanted = spare if out is None else out[first - start : last - start]
        block = wanted if wanted.size == size else spare
        count = file.readinto(block.view(np.uint8).data)
        if wanted is not block:
            wanted[...] = block[first - k * size : last - k * size]
        return count == block.nbytes and digest_of_block(block) == tensor.sha256[k]

    def damaged(share: range) -> list[int]:
        spare, found = np.empty(size, dtype), []  # one for all blocks: new memory takes longer than reading into it
        for part, blocks in groupby(share, lambda k: k // in_a_file):
            with _opened(folder, name, tensor, part) as file:
                for k in blocks:
                    file.seek(k % in_a_file * spare.nbytes)
                    found += [] if sound(k, file, spare) else [k]
        return found

    touched = range(start // size, -(-stop // size)) if start < stop else range(0)
    length = max(1, -(-len(touched) // THREADS), WORTH_A_THREAD // (size * dtype.itemsize))
    shares = [touched[k : k + length] for k in range(0, len(touched), length)]
    return [k for found in in_threads(damaged, shares) for k in found]


# ----- writing ------------------------------------------------------------------------------------------------------


def write_array(folder: Path, name: str, tensor: Tensor, array: np.ndarray) -> None:
    """Write an array into a state folder, where `describe_arrays` has been. Raises OSError."""
    for k, block in enumerate(np.ascontiguousarray(array).reshape(len(tensor.sha256), -1)):
        write_block(folder, name, tensor, k, block)


def write_block(folder: Path, name: str, tensor: Tensor, k: int, block: np.ndarray) -> None:
    """Write the k-th block of an array. block: its elements, contiguous. Each block once, in any order.

    Raises OSError.
    """
    in_a_file = len(tensor.sha256) // tensor.parts
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if in_a_file == 1 else 0)
    path = folder / array_file(name, tensor, k // in_a_file)
    with open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o666)) as file:
        file.seek(k % in_a_file * block.nbytes)
        file.write(block.reshape(-1).view(np.uint8).data)
        if (k + 1) % in_a_file == 0:
            file.write(_index(in_a_file * block.nbytes))


def sync_file(path: Path) -> None:
    """Bring a file to the disk and out of memory, so that reading it back reads the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):  # Linux; an advice: some file systems ignore it
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def describe_arrays(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None) -> None:
    """Make the folders of arrays, with what zarr and orbax say of them, by which orbax alone can read them.

    tensors: all arrays of a checkpoint. about: orbax's custom metadata. Raises OSError.
    """
    for name, tensor in tensors.items():
        (folder / array_file(name, tensor)).parent.mkdir(parents=True)
        (folder / TENSORS / name.replace("/", ".") / "zarr.json").write_bytes(_zarr_description(tensor))
    (folder / TENSORS).mkdir(exist_ok=True)
    (folder / TENSORS / "_METADATA").write_bytes(_orbax_description(tensors, about))


def _zarr_description(tensor: Tensor) -> bytes:
    """Return an array's zarr.json: a grid of chunks, each a file, which is a shard that holds one chunk."""
    chunk = tensor.shape if tensor.parts == 1 else (tensor.size // tensor.parts,)
    numbers = {"name": "bytes", "configuration": {"endian": "little"}}
    shard = {"chunk_shape": chunk, "codecs": [numbers], "index_codecs": [numbers, {"name": "crc32c"}]}
    description = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": tensor.shape,
        "data_type": tensor.dtype,
        "fill_value": 0 if "int" in tensor.dtype else 0.0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": shard}],
    }
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def _orbax_description(names: Iterable[str], about: Mapping[str, Any] | None) -> bytes:
    """Return what orbax says of a tree of arrays: its _METADATA."""
    tree = {
        str(path): {
            "key_metadata": [{"key": word, "key_type": 2} for word in path],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for path in sorted(tuple(name.split("/")) for name in names)
    }
    flags = {"use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    return json.dumps({"tree_metadata": tree, **flags, "custom_metadata": about}).encode()
