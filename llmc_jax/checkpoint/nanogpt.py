"""nanoGPT's checkpoints (ckpt.pt), weights only. PyTorch opens them, and only in the way that runs no pickle's code.

Leaves out nanoGPT's optimizer state, which is kept by parameter numbers, and everything where PyTorch is not installed.
"""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import opened
from llmc_jax.checkpoint import hugging_face
from llmc_jax.checkpoint.source import Source

SIZES = hugging_face.SIZES | {"max_seq_len": "block_size"}
DTYPES = {theirs: ours for ours, theirs in hugging_face.TORCH_NAMES.items()}
GELU = (
    "nanoGPT used GELU's tanh form, as this model does, until June 2023, and the exact form since; the file does not "
    "say which, so expect slightly different logits from a newer one"
)


def open_checkpoint(path: Path) -> Source:
    """Open a ckpt.pt, read with torch.load(weights_only=True), which builds tensors and plain data and no more.

    Raises InputError if PyTorch is not installed, FormatError if it refuses the file or this is no GPT-2 of nanoGPT.
    """
    try:
        import torch
    except ImportError:
        raise InputError(f"{path}: a file of PyTorch, which is not installed: pip install torch") from None
    with opened(path):  # a folder, a pipe, no file: said as for any other
        pass
    try:
        # Not mapped into memory: a file that is shortened meanwhile would end this process.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # PyTorch's own words advise to switch the safety off
        words = "damaged, or it holds more than tensors and plain data, which could run a program"
        raise FormatError(f"{path}: {words}; it is not opened") from None
    except Exception as error:  # PyTorch raises what it likes: RuntimeError, UnpicklingError, EOFError, ValueError ...
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"{path}: PyTorch cannot open it with weights_only=True: {first}") from None

    def convert(tensor: Any) -> np.ndarray:
        return tensor.detach().to(torch.float32).contiguous().numpy()

    return source_of(path, checkpoint, convert)


class Loaded(NamedTuple):
    """A tensor of PyTorch's, to be read as one in a file is (reading.Stored)."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]  # float32, which may be views of the tensor's memory

    def whole(self) -> np.ndarray:
        """Return all of it, newly made."""
        return np.array(self.values())


def source_of(path: Path, checkpoint: Any, convert: Callable[[Any], np.ndarray]) -> Source:
    """Return the Source of a loaded checkpoint: {"model": names to tensors, "model_args": sizes, ...}.

    convert: turns a tensor, which need only have a shape and a dtype, into float32.
    """
    try:
        arguments, tensors = {**checkpoint["model_args"]}, {}
        for name, tensor in checkpoint["model"].items():
            if not isinstance(name, str):
                raise TypeError
            dtype = str(tensor.dtype).removeprefix("torch.")
            values = partial(convert, tensor)
            tensors[name] = Loaded(path, name, DTYPES.get(dtype, dtype), tuple(tensor.shape), values)
    except (TypeError, KeyError, AttributeError, IndexError):
        raise FormatError(f"{path}: its model and model_args are not what nanoGPT writes") from None
    biases = arguments.get("bias", True)
    if type(biases) is not bool:
        raise FormatError(f"{path}: model_args has bias {biases!r}; expected True or False")
    config = hugging_face.config_of(path, arguments, SIZES)
    source = hugging_face.source_of(path, "nanogpt", config, tensors, "model_args", biases=biases)
    step = checkpoint.get("iter_num")
    return source._replace(step=step if type(step) is int and step >= 0 else None, warnings=(GELU,))
