"""nanoGPT's checkpoints (ckpt.pt), weights only. PyTorch opens them, and only in the way that runs no pickle's code.

Leaves out nanoGPT's optimizer state, which is kept by parameter numbers, and everything where PyTorch is not installed.
"""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.checkpoint import hugging_face
from llmc_jax.checkpoint.hugging_face import HEAD, check_count, check_names, config_of, name_in_block
from llmc_jax.checkpoint.llmc import with_padding
from llmc_jax.checkpoint.reading import opened
from llmc_jax.checkpoint.source import Source, slices
from llmc_jax.config.model import ModelConfig
from llmc_jax.errors import FormatError, InputError
from llmc_jax.models.gpt2.tensors import BY_NAME

PREFIXES = ("_orig_mod.", "module.", "transformer.")  # of torch.compile, of DistributedDataParallel, of the model
SIZES = hugging_face.SIZES | {"max_seq_len": "block_size"}
GELU = (
    "nanoGPT used GELU's tanh form, as this model does, until June 2023, and the exact form since; the file does not "
    "say which, so expect slightly different logits from a newer one"
)

Convert = Callable[[Any], np.ndarray]


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
        raise FormatError(
            f"{path}: damaged, or it holds more than tensors and plain data: opening it could run a program, so it is "
            "not opened"
        ) from None
    except Exception as error:  # PyTorch raises what it likes: RuntimeError, UnpicklingError, EOFError, ValueError ...
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FormatError(f"{path}: PyTorch cannot open it with weights_only=True: {first}") from None

    def convert(tensor: Any) -> np.ndarray:
        return tensor.detach().to(torch.float32).contiguous().numpy()

    return source_of(path, checkpoint, convert)


def source_of(path: Path, checkpoint: Any, convert: Convert) -> Source:
    """Return the Source of a loaded checkpoint: {"model": names to tensors, "model_args": sizes, ...}.

    convert: turns a tensor, which need only have a shape and a dtype, into float32.
    """
    if not isinstance(checkpoint, Mapping) or not {"model", "model_args"} <= set(checkpoint):
        raise FormatError(f"{path}: holds no model and model_args, so it is not a checkpoint of nanoGPT")
    arguments, model = checkpoint["model_args"], checkpoint["model"]
    if not isinstance(arguments, Mapping) or not isinstance(model, Mapping):
        raise FormatError(f"{path}: its model and model_args are not what nanoGPT writes")
    config = config_of(path, arguments, SIZES)
    tensors = _tensors(path, model)
    check_count(path, config, len(tensors))
    with_biases = arguments.get("bias", True)
    if type(with_biases) is not bool:
        raise FormatError(f"{path}: model_args has bias {with_biases!r}; expected True or False")
    _check(path, config, tensors, with_biases, convert)

    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        assert group == "params", group
        if BY_NAME[tensor].bias and not with_biases:
            return np.zeros(next(piece.shape for piece in slices(config) if piece.tensor == tensor), np.float32)
        values = convert(tensors[name_in_block(tensor, layer)])
        return with_padding(values, config) if tensor == "wte" else np.array(values)  # its own, not a view of the file

    dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(_dtype(tensors["wte.weight"]), "fp32")
    step = checkpoint.get("iter_num")
    step = step if type(step) is int and step >= 0 else None
    return Source(path, "nanogpt", config, dtype, step, ("params",), read, (GELU,))


def _tensors(path: Path, model: Mapping[Any, Any]) -> dict[str, Any]:
    found = {}
    for name, tensor in model.items():
        if not isinstance(name, str) or not hasattr(tensor, "shape"):
            raise FormatError(f"{path}: its model holds {name!r}, which is not a named tensor")
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        if name in found:
            raise FormatError(f"{path}: its model holds {name} twice, under different prefixes")
        found[name] = tensor
    return found


def _check(path: Path, config: ModelConfig, tensors: dict[str, Any], with_biases: bool, convert: Convert) -> None:
    wanted = {}
    for piece in slices(config):
        if with_biases or not BY_NAME[piece.tensor].bias:
            shape = (config.vocab_size, config.channels) if piece.tensor == "wte" else piece.shape
            wanted[name_in_block(piece.tensor, piece.layer)] = shape
    check_names(path, wanted, tensors.keys() - {HEAD}, "model_args")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise FormatError(f"{path}: tensor {name} has shape {tuple(tensors[name].shape)}; expected {shape}")
        if _dtype(tensors[name]) not in ("float32", "bfloat16", "float16"):
            raise FormatError(f"{path}: tensor {name} is {tensors[name].dtype}; expected float32, bfloat16 or float16")
    wte = tensors["wte.weight"]
    head = tensors.get(HEAD, wte)
    same = tuple(head.shape) == tuple(wte.shape)
    if head is not wte and not (same and np.array_equal(convert(head).view(np.uint32), convert(wte).view(np.uint32))):
        raise FormatError(f"{path}: {HEAD} differs from wte.weight; this model's output head is its token embedding")


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
