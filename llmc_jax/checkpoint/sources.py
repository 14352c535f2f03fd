"""Any checkpoint, opened for reading one layer of one tensor at a time, whatever its format.

Leaves out writing, and what beyond weights, m and v a training state holds.
"""

import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import opened, refusing
from llmc_jax.checkpoint import exchange, store
from llmc_jax.checkpoint.llmc import open_model
from llmc_jax.checkpoint.llmc_state import open_llmc_state
from llmc_jax.checkpoint.source import Source, read_by_tensor, slices, stored_special
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import TrainConfig
from llmc_jax.models.family import Family, chosen, described, of_family
from llmc_jax.models.layout import flat_size, initial, tensor_specs, views

OUR_STATE = re.compile(r"state_[0-9]{8,10}")  # a folder
LLMC_STATE = re.compile(r"state_[0-9]{8,10}_[0-9]{5}\.bin")
LLMC_MODEL = re.compile(r"model_[0-9]{8,10}\.bin")
NANOGPT = "ckpt.pt"  # in its out_dir


def open_source(path: str | Path, *, step: int | None = None, model_file: str = "") -> Source:
    """Open a checkpoint of any format that is known here; what it is, is seen from what it holds.

    A file of llm.c, a .safetensors file beside its config.json, a nanoGPT ckpt.pt or the folder that it is in; a folder
    of Hugging Face's or orbax's, a training state of ours (its own folder, or a run's, whose newest good one is taken),
    a folder with training states of llm.c (the newest complete one); a model on Hugging Face by name (gpt2,
    hf:OWNER/NAME), downloaded if need be; a descriptor (d12): random weights. step: takes this step out of a folder
    that may hold several. model_file: that of --model, whose family a descriptor and GPT-2's weights are taken as.

    Raises InputError (FormatError for bad bytes) if it is none of them, with what was found.
    """
    path, family = Path(path), chosen(model_file)
    if not os.path.lexists(path):
        from llmc_jax.checkpoint import published  # here, because files do without

        if model := published.model_named(str(path)):
            path = published.folder_of(model)
    if os.path.isdir(path):
        source = _open_folder(path, step)
    elif not os.path.lexists(path) and (shape := described(str(path), family)):
        source = _random_source(path, shape)
    else:
        source = _open_file(path)
    if step is not None and source.step != step:
        raise InputError(
            f"{path}: step {step} was asked for, but this holds one checkpoint; leave --step out, or name the run's "
            "folder"
        )
    return as_family(source, family) if model_file else source


def as_family(source: Source, family: Family) -> Source:
    """Return a checkpoint as one of a family: GPT-2's weights are taken where the tensors are the same.

    Raises InputError for weights of another family, or where the tensors differ.
    """
    theirs = source.config
    if (theirs.family, theirs.source) == (family.name, family.source):
        return source
    if theirs.family != "gpt2" or not isinstance(theirs, family.shape):
        raise InputError(
            f"{source.path}: is a model of the family {theirs.family}, not of {family.name}; give its --model"
        )
    ours = of_family(theirs, family)
    before, now = ({spec.name: spec.shape for spec in tensor_specs(shape)} for shape in (theirs, ours))
    if before != now:
        name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        raise InputError(
            f"{source.path}: its tensors are not those of {family.path}: {name} is {before.get(name, 'not')} there, "
            f"{now.get(name, 'not')} here; begin with a shape, such as -e d12"
        )
    return source._replace(config=ours)


def _open_file(path: Path) -> Source:
    with opened(path) as file:
        start = file.read(1024)
    # PyTorch's zip, whose first member's name ends so, or its old format: a pickle, then a magic number
    if (start.startswith(b"PK\x03\x04") and b"/data.pkl" in start) or start.startswith(b"\x80\x02\x8a\nl\xfc"):
        from llmc_jax.checkpoint import nanogpt

        return nanogpt.open_checkpoint(path)
    # a uint64 below 2^32 and JSON; llm.c's files have a version where that number has zeros
    if start[4:9] == b"\0\0\0\0{" or path.suffix == ".safetensors":
        from llmc_jax.checkpoint import hugging_face

        return hugging_face.open_file(path)
    magic = int.from_bytes(start[:4], "little")
    if magic != magics.MODEL and int.from_bytes(start[:4], "big") != magics.MODEL and magic not in magics.MEANINGS:
        found = f"it begins with {start[:8]!r}" if start else "it is empty"
        raise FormatError(f"{path}: not a checkpoint that is known here: {found}; known are {FILES}")
    model = open_model(path)

    def read(_group: str, tensor: str, layer: int) -> np.ndarray:
        return model.read(tensor, layer)

    return Source(path, "llmc-model", model.config, model.dtype, None, ("params",), read, (), opened=model)


def _random_source(path: Path, config: ModelShape) -> Source:
    """Return the random weights that `train.py -e d12` begins with. All N of them are drawn at the first read."""
    seed, layered = TrainConfig().seed, {spec.name for spec in tensor_specs(config) if spec.tensor.layered}

    @cache
    def tensors() -> Any:
        return views(initial(config, seed), config)

    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        assert group == "params", group
        values = getattr(tensors(), tensor)
        return np.array(values[layer] if tensor in layered else values)

    warning = f"no file has this name, so it is a model's shape: the weights are random, of seed {seed}"
    return Source(path, "random", config, "fp32", None, ("params",), read, (warning,))


FILES = "llm.c's model_*.bin, .safetensors files beside their config.json, nanoGPT's ckpt.pt"
FOLDERS = "those of training states of llm.c or llmc-jax, of Hugging Face's GPT-2, of orbax, and nanoGPT's out_dir"


def flat_parameters(source: Source, group: str = "params") -> np.ndarray:
    """Return all weights of a checkpoint as one flat buffer, (flat_size,) float32, as the model takes it; or m, v, …"""
    flat = np.zeros(flat_size(source.config), np.float32)
    start = 0
    for piece in slices(source.config):
        size = math.prod(piece.shape)
        flat[start : start + size] = source.read(group, piece.tensor, piece.layer).reshape(-1)
        start += size
    return flat


HUGGING_FACE_WEIGHTS = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"}


def _open_folder(folder: Path, step: int | None) -> Source:
    with refusing(f"{folder}: cannot be read", kind=FormatError):
        names = set(os.listdir(folder))
    if "config.json" in names and names & HUGGING_FACE_WEIGHTS:
        from llmc_jax.checkpoint import hugging_face

        return hugging_face.open_folder(folder)
    if {"MANIFEST.json", "run.json"} <= names or OUR_STATE.fullmatch(folder.resolve().name):
        return _state_source(folder)
    if any(OUR_STATE.fullmatch(name) for name in names):
        return _state_source(*_state_of_run(folder, step))
    if any(LLMC_STATE.fullmatch(name) for name in names):
        return open_llmc_state(folder, step)
    if NANOGPT in names:
        return open_source(folder / NANOGPT)
    if exchange.METADATA in names:
        return exchange.open_folder(folder)
    models = sorted(name for name in names if LLMC_MODEL.fullmatch(name))
    if models:
        raise InputError(f"{folder}: holds models, but no training state; name one of them: {folder / models[-1]}")
    if {"main.log", "config.json"} <= names:
        raise InputError(f"{folder}: the run has no checkpoint yet; -n N saves one every N steps")
    found = ", ".join(sorted(names)[:5]) or "nothing"
    raise InputError(f"{folder}: a folder without a checkpoint, but with {found}; known are {FOLDERS}")


def _state_of_run(run: Path, step: int | None) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of a run's newest good state, or that of a step, and a line about each newer bad one."""
    if step is None:
        problems: list[str] = []
        newest = store.newest_good(run, problems.append)
        if newest is None:
            raise FormatError(f"{run}: no training state in it is complete and sound; {'; '.join(problems)}")
        return newest.folder, tuple(problems)
    if step not in store.steps(run):
        raise InputError(f"{run}: no training state of step {step}")
    entry = store.entry(run, step)
    if entry.problem:
        raise FormatError(f"{entry.folder}: {entry.problem}")
    return entry.folder, ()


def _state_source(folder: Path, warnings: tuple[str, ...] = ()) -> Source:
    """Open a training state of ours. An array is read whole when its first layer is asked for, and one is kept."""
    checkpoint = store.open_checkpoint(folder)
    metadata = checkpoint.metadata
    config, dtype = metadata.identity.model, metadata.identity.dtype
    buffers = [name for name in checkpoint.manifest.tensors if "/" not in name and name not in ("step", "updates")]
    groups = tuple(sorted(buffers, key=lambda name: ((name != "params") + (name == "copy"), name)))
    for name in groups or ("params",):
        checkpoint.check_buffer(name)
        if (found := checkpoint.manifest.tensors[name].dtype) not in ("float32", "bfloat16", "float16"):
            raise FormatError(f"{folder}: {name} is of {found}; expected float32, bfloat16 or float16")
    read = read_by_tensor(config, lambda group, tensor: checkpoint.read(f"{group}/{tensor}"))
    special = stored_special(metadata.origin)
    return Source(folder, "state", config, dtype, metadata.step, groups, read, warnings, special, checkpoint)
