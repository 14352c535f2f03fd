"""The files of a checkpoint's arrays: written by orbax (zarr 3, not compressed), read without it.

As orbax is told to write here, an array is one chunk in one file: its bytes, and then (zarr's sharding) 20 more that
say where they lie. So reading takes no library. Orbax's own reading brings the same bytes, but opens an event loop with
threads for each array, and that beside a training that goes on. It can read the files by itself all the same.

Leaves out whether what is read is right: the digests in the manifest tell.
"""

import functools
import importlib.util
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.checkpoint.manifest import Tensor, dtype_of, opened_regular
from llmc_jax.errors import FormatError, InputError

TENSORS = "tensors"  # the folder of the arrays
INDEX = struct.Struct("<QQI")  # at the end of a zarr shard of one chunk: its offset, its bytes, a CRC-32C of both


def read_array(folder: Path, name: str, tensor: Tensor) -> np.ndarray:
    """Return an array of a state folder as it is in its file.

    Nothing is allocated by a size that is not that of the file. Raises FormatError if that is another, or OSError.
    """
    path = folder / TENSORS / name.replace("/", ".") / "/".join("c" + "0" * len(tensor.shape))
    dtype = dtype_of(tensor.dtype)
    nbytes = math.prod(tensor.shape) * dtype.itemsize
    with opened_regular(path) as file:
        if os.fstat(file.fileno()).st_size != nbytes + INDEX.size:
            raise FormatError(f"{name}: its file does not hold an array of shape {tensor.shape} and {nbytes:,} bytes")
        array = np.empty(tensor.shape, dtype)
        read = file.readinto(array.reshape(-1).view(np.uint8).data)
        index = file.read(INDEX.size)
    if read != nbytes or len(index) != INDEX.size or INDEX.unpack(index)[:2] != (0, nbytes):
        raise FormatError(f"{name}: its file does not hold one chunk of {nbytes:,} bytes, which is damage")
    return array


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
