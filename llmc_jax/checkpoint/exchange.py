"""Checkpoints that orbax writes and reads: a model's named tensors, for exchange with other JAX programs.

The tree is {"wte": (Vp, C), "wpe": (T, C), "ln1w": (L, C), …}, the names and shapes of llm.c's tensors. Orbax's custom
metadata hold the model's shape, which the tensors alone do not say: how many heads there are. Imports orbax, and so
JAX, when it is called. Leaves out our own training states (store.py), which orbax can read too.
"""

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.checkpoint.llmc import widened
from llmc_jax.checkpoint.source import Slice, Source, slices_of
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.tensors import BY_NAME, tensor_specs

FILES = {"_METADATA", "manifest.ocdbt"}  # either is in each folder of orbax's
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def write_folder(folder: Path, config: ModelConfig, dtype: np.dtype, take: Callable[[Slice], np.ndarray]) -> None:
    """Write a model's tensors into an empty folder. take: returns a slice, float32. Needs the memory of all weights.

    Raises InputError where orbax is not installed.
    """
    ocp = _orbax()
    tree = {}
    for spec in tensor_specs(config):
        tensor = tree[spec.name] = np.empty(spec.shape, dtype)
        layers = tensor if BY_NAME[spec.name].layered else tensor[None]
        for values, piece in zip(layers, slices_of(spec), strict=True):
            values[...] = take(piece)
    about = {"model": asdict(config)}
    saved = ocp.args.PyTreeSave(tree, custom_metadata=about)
    ocp.PyTreeCheckpointer().save(os.path.abspath(folder), args=saved, force=True)


def open_folder(folder: Path) -> Source:
    """Open a folder of orbax's that holds a model's tensors, all of which are read now.

    Raises InputError, which names the folder, for any other.
    """
    ocp = _orbax()
    try:
        checkpointer = ocp.PyTreeCheckpointer()
        about = checkpointer.metadata(os.path.abspath(folder)).item_metadata.custom_metadata
        tensors = checkpointer.restore(os.path.abspath(folder))
    except Exception as error:  # what orbax raises is not documented
        raise FormatError(f"{folder}: orbax cannot read it: {type(error).__name__}: {error!s:.200}") from error
    config = _shape_in(about, folder)
    dtypes = {_checked(folder, tensors, spec.name, spec.shape) for spec in tensor_specs(config)}
    if len(dtypes) > 1:
        raise FormatError(f"{folder}: its tensors are of {' and '.join(sorted(dtypes))}; expected one dtype")

    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        assert group == "params", group
        return widened(tensors[tensor][layer] if BY_NAME[tensor].layered else tensors[tensor])

    return Source(folder, "orbax", config, DTYPES[dtypes.pop()], None, ("params",), read, ())


def _shape_in(about: Any, folder: Path) -> ModelConfig:
    shape = about.get("model") if isinstance(about, Mapping) else None
    names = ModelConfig.__dataclass_fields__.keys()
    if not isinstance(shape, Mapping) or shape.keys() != names or not all(type(n) is int for n in shape.values()):
        raise FormatError(
            f"{folder}: a checkpoint of orbax's that does not say the model's shape; write it with custom_metadata "
            f'{{"model": {{{", ".join(names)}}}}}'
        )
    return ModelConfig(**shape)


def _checked(folder: Path, tensors: Any, name: str, shape: tuple[int, ...]) -> str:
    """Return the dtype of a tensor, which must be there, of this shape."""
    found = tensors.get(name) if isinstance(tensors, Mapping) else None
    if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype.name not in DTYPES:
        what = "is not there" if found is None else f"is {found.dtype}{found.shape}"
        raise FormatError(f"{folder}: {name} {what}; expected {shape} of {', '.join(DTYPES)}")
    return found.dtype.name


def _orbax() -> Any:
    """Import orbax, whose log lines are dropped. Raises InputError where it is not installed."""
    if importlib.util.find_spec("orbax") is None or importlib.util.find_spec("orbax.checkpoint") is None:
        raise InputError("this needs the package orbax-checkpoint: pip install 'orbax-checkpoint>=0.12.3'")
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
    return ocp
