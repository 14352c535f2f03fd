"""Any checkpoint, opened for reading one layer of one tensor at a time, whatever its format.

Leaves out writing, and what beyond weights, m and v a training state holds.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.checkpoint.llmc import UNLAYERED, OpenModel, open_model, read_slice
from llmc_jax.config import ModelConfig
from llmc_jax.errors import InputError
from llmc_jax.params import tensor_specs


class Source(NamedTuple):
    """A checkpoint that can be read.

    kind: "llmc-model", "llmc-state", "state", "hugging-face" or "nanogpt". dtype: of the stored weights, "fp32",
    "bf16" or "fp16". step: where the format says it. groups: "params", and where there are any "m", "v" and "copy" (the
    16-bit weights beside float32 master weights). warnings: one line each, of what is seen without reading weights.

    read(group, tensor, layer) gives float32: one layer of a tensor, in the tensor's shape without its first axis, or
    the whole of one without layers (wte with Vp rows, wpe, lnfw, lnfb; layer 0). 16-bit values are widened exactly, on
    the bits. It raises FormatError if the file changed since it was opened.
    """

    path: Path
    kind: str
    config: ModelConfig
    dtype: str
    step: int | None
    groups: tuple[str, ...]
    read: Callable[[str, str, int], np.ndarray]
    warnings: tuple[str, ...]


class Slice(NamedTuple):
    """What one call of `read` gives: a tensor, a layer of it, and its shape."""

    tensor: str
    layer: int
    shape: tuple[int, ...]


def slices(config: ModelConfig) -> Iterator[Slice]:
    """Every slice of a model, in the order of params.Params: joined they are its N parameters."""
    for spec in tensor_specs(config):
        if spec.name in UNLAYERED:
            yield Slice(spec.name, 0, spec.shape)
        else:
            for layer in range(config.num_layers):
                yield Slice(spec.name, layer, spec.shape[1:])


def open_source(path: str | Path, *, v2_order: str = "auto") -> Source:
    """Open a checkpoint of any format that is known here; what it is, is seen from what it holds, not from its name.

    v2_order: for version 2 of llm.c's model files, see llmc.read_model.

    Raises InputError (FormatError for bad bytes) if it is none of them, with what was found.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise InputError(f"{path}: a folder that holds no checkpoint")
    return _model_source(open_model(path, v2_order=v2_order))


def _model_source(model: OpenModel) -> Source:
    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        assert group == "params", group
        return read_slice(model, tensor, layer)

    dtype = "fp32" if model.header.version in (1, 3) else "bf16"
    return Source(model.path, "llmc-model", model.header.config, dtype, None, ("params",), read, ())
