"""The files of a checkpoint's arrays: written by orbax (zarr 3, not compressed), read without it.

As orbax is told to write here, an array is one chunk in one file: its bytes, and then (zarr's sharding) 20 more that
say where they lie. So reading takes no library, and a part of an array is a part of its file. Orbax's own reading
brings the same bytes, but opens an event loop with threads for each array, and that beside a training that goes on. It
can read the files by itself all the same.

Leaves out which arrays there are, and what a damaged one means (store.py).
"""

import functools
import importlib.util
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.checkpoint.manifest import THREADS, Tensor, digest_of_block, dtype_of, in_threads, opened_regular
from llmc_jax.errors import FormatError, InputError

TENSORS = "tensors"  # the folder of the arrays
WORTH_A_THREAD = 1 << 20  # bytes that take longer to read than a thread to begin
INDEX_SIZE = 20  # bytes at the end of a zarr shard of one chunk: its offset, its bytes, a CRC-32C of both


def array_file(name: str, tensor: Tensor) -> str:
    """Return the path of an array's file, relative to the state folder."""
    return "/".join((TENSORS, name.replace("/", "."), *("c" + "0" * len(tensor.shape))))


def file_size(tensor: Tensor) -> int:
    """Return the bytes of an array's file."""
    return tensor.size * dtype_of(tensor.dtype).itemsize + INDEX_SIZE


def _index(nbytes: int) -> bytes:
    """Return what follows an array of so many bytes in its file."""
    place, crc = struct.pack("<QQ", 0, nbytes), 0xFFFFFFFF
    for byte in place:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)  # Castagnoli's polynomial
    return place + struct.pack("<I", crc ^ 0xFFFFFFFF)


def check_file(folder: Path, name: str, tensor: Tensor) -> None:
    """Raise FormatError if an array's file is not of its size, or is not one chunk; or OSError."""
    path, size = array_file(name, tensor), file_size(tensor)
    with opened_regular(folder / path) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise FormatError(f"{path}: does not hold an array of shape {tensor.shape} and {size - INDEX_SIZE:,} bytes")
        file.seek(size - INDEX_SIZE)
        if file.read() != _index(size - INDEX_SIZE):
            raise FormatError(f"{path}: damaged: does not end as the file of one chunk does")


def damaged_blocks(
    folder: Path, name: str, tensor: Tensor, start: int = 0, stop: int | None = None, out: np.ndarray | None = None
) -> list[int]:
    """Read the blocks of an array that hold its elements [start, stop); return which are not what was saved.

    out: takes these elements, (stop - start,). Beside it each thread needs the memory of a block.
    Raises FormatError as `check_file` does, or OSError.
    """
    check_file(folder, name, tensor)
    path, size, dtype = folder / array_file(name, tensor), tensor.block, dtype_of(tensor.dtype)
    stop = tensor.size if stop is None else stop

    def damaged(share: range) -> list[int]:
        spare, found = np.empty(size, dtype), []
        with opened_regular(path) as file:
            file.seek(share.start * size * dtype.itemsize)
            for k in share:
                first, last = k * size, (k + 1) * size
                whole = out is not None and start <= first and last <= stop
                block = out[first - start : last - start] if out is not None and whole else spare
                read = file.readinto(block.view(np.uint8).data)
                if out is not None and not whole:
                    begin, end = max(start, first), min(stop, last)
                    out[begin - start : end - start] = block[begin - first : end - first]
                if read != block.nbytes or digest_of_block(block) != tensor.sha256[k]:
                    found.append(k)
        return found

    touched = range(start // size, -(-stop // size))
    threads = min(THREADS, 1 + len(touched) * size * dtype.itemsize // WORTH_A_THREAD)
    length = -(-len(touched) // threads)
    shares = [touched[k : k + length] for k in range(0, len(touched), length)]
    return [k for found in in_threads(damaged, shares) for k in found]


def require_orbax() -> None:
    """Raise InputError where orbax is not installed. Takes no time: orbax itself is imported at the first save."""
    if importlib.util.find_spec("orbax") is None or importlib.util.find_spec("orbax.checkpoint") is None:
        raise InputError("checkpoints need the package orbax-checkpoint: pip install 'orbax-checkpoint>=0.12.3'")


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays into a state folder. Raises what orbax raises, which is not documented."""
    target = folder / TENSORS
    target.mkdir()
    if arrays:
        from etils import epath

        handler, arguments = _orbax()
        tree = _tree({name: array.view(_Shared) for name, array in arrays.items()})
        handler.save(epath.Path(os.path.abspath(target)), args=arguments(tree))  # it refuses paths that begin with ..


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"params/wte": x} as {"params": {"wte": x}}, which orbax files under params.wte."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split("/")
        branch = tree
        for word in path:
            branch = branch.setdefault(word, {})
        branch[last] = value
    return tree


class _Shared(np.ndarray):
    """An array that a copy does not copy: orbax takes deep copies, a second state in memory, of what it writes."""

    def __deepcopy__(self, memo: dict[int, Any] | None) -> "_Shared":
        return self


@functools.cache
def _orbax() -> tuple[Any, Any]:
    """Import orbax; return a handler, and what makes its arguments. Its log lines, some at every save, are dropped."""
    import logging

    require_orbax()
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)

    class OneByOne(ocp.type_handlers.NumpyHandler):
        """Writes one array after the other. All at once, as orbax does, a failure would leave the others being written
        while we go on.
        """

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
            for i in range(len(values)):
                one = await super().serialize(values[i : i + 1], infos[i : i + 1], args[i : i + 1] if args else None)
                for future in one:
                    future.result()
            return []

    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,  # plain files, a folder for each array
        use_zarr3=True,
        use_compression=False,  # weights do not compress
        enable_pinned_host_transfer=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((np.ndarray, OneByOne())),
    )
    return handler, ocp.args.PyTreeSave
