"""Checkpoints that orbax writes and reads: a model's named tensors, for exchange with other JAX programs.

The tree is {"wte": (Vp, C), "wpe": (T, C), "ln1w": (L, C), …}, the names and shapes of llm.c's tensors. Orbax's custom
metadata hold the model's shape, which the tensors alone do not say: how many heads there are. They are written as the
arrays of our own training states are, and read by tensorstore, on which orbax rests: one tensor at a time, and without
a device, which a run must not have yet when it opens its model. Leaves out our own training states (store.py).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.errors import FormatError
from llmc_jax.base.files import read_json_object
from llmc_jax.checkpoint.arrays import TENSORS, describe_arrays, write_array
from llmc_jax.checkpoint.contents import shape_of
from llmc_jax.checkpoint.llmc import fp32_to_bf16
from llmc_jax.checkpoint.manifest import Tensor, dtype_of
from llmc_jax.checkpoint.source import Slice, Source, read_by_tensor, slices_of, stored_special
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.family import shape_to_json
from llmc_jax.models.layout import tensor_specs

METADATA = "_METADATA"
LARGEST = 1 << 24  # bytes of its metadata
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def write_folder(folder: Path, source: Source, dtype: str, take: Callable[[Slice], np.ndarray]) -> None:
    """Write a model's tensors into an empty folder, one in memory at a time. Raises OSError.

    dtype: as DTYPES has it. take: returns a slice, float32.
    """
    specs = tensor_specs(source.config)
    about = {"model": shape_to_json(source.config)} | ({"special": source.special._asdict()} if source.special else {})
    described = {spec.name: Tensor(spec.shape, dtype, ("",)) for spec in specs}
    describe_arrays(folder, described, about)
    for spec in specs:
        tensor = np.empty(spec.shape, dtype_of(dtype))
        layers = tensor if spec.tensor.layered else tensor[None]
        for values, piece in zip(layers, slices_of(spec), strict=True):
            if dtype == "bfloat16":  # on the bits: no payload of a NaN is lost
                values.view(np.uint16)[...] = fp32_to_bf16(take(piece))
            else:
                values[...] = take(piece)
        write_array(folder, spec.name, described[spec.name], tensor)
    for path in (folder / TENSORS).iterdir():
        path.rename(folder / path.name)
    (folder / TENSORS).rmdir()


def open_folder(folder: Path) -> Source:
    """Open a folder of orbax's that holds a model's tensors. A tensor is read when it is asked for, and one is kept.

    Raises FormatError, which names the folder, for any other.
    """
    said = read_json_object(folder / METADATA, LARGEST)
    about = said.get("custom_metadata")
    about = about if isinstance(about, Mapping) else {}
    config = shape_of(about.get("model"), folder)
    if config is None:
        names = ", ".join(each.name for each in fields(ModelConfig)[:6])
        raise FormatError(f"{folder}: does not say the model's shape; its custom_metadata must have model: {names}")
    dtypes = {str(_opened(folder, said, spec.name, spec.shape).dtype.name) for spec in tensor_specs(config)}
    if len(dtypes) > 1:
        raise FormatError(f"{folder}: its tensors are of {' and '.join(sorted(dtypes))}; expected one dtype")
    shapes = {spec.name: spec.shape for spec in tensor_specs(config)}

    def whole(_group: str, tensor: str) -> np.ndarray:
        opened = _opened(folder, said, tensor, shapes[tensor])
        with _naming(folder, tensor):
            return np.asarray(opened.read().result())

    dtype, read = DTYPES[dtypes.pop()], read_by_tensor(config, whole)
    return Source(folder, "orbax", config, dtype, None, ("params",), read, (), stored_special(about))


def _opened(folder: Path, said: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor as tensorstore opens it, which must be there, of this shape. Reads none of its values."""
    import tensorstore  # here, because nothing but a folder of orbax's needs it

    root, own = f"{folder.absolute()}/", f"{name}/"
    place: dict[str, Any] = {"driver": "file", "path": root + own}
    if said.get("use_ocdbt"):
        place = {"driver": "ocdbt", "base": {"driver": "file", "path": root}, "path": own}
    with _naming(folder, name):
        found = tensorstore.open({"driver": "zarr3" if said.get("use_zarr3") else "zarr", "kvstore": place}).result()
    if found.shape != shape or found.dtype.name not in DTYPES:
        what = f"{found.dtype.name}{found.shape}"
        raise FormatError(f"{folder}: {name} is {what}; expected {shape} of {', '.join(DTYPES)}")
    return found


@contextmanager
def _naming(folder: Path, name: str) -> Iterator[None]:
    """Turn what tensorstore raises within the block, also where nothing is there, into a FormatError."""
    try:
        yield
    except ValueError as error:
        words = f"{error!s:.200}".partition(" [")[0]
        raise FormatError(f"{folder}: {name} cannot be read: {words}") from error
