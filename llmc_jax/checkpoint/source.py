"""A checkpoint that can be read one layer of one tensor at a time: what every format's reader gives.

Leaves out the formats, and which of them a path is (sources.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.llmc import widened
from llmc_jax.config.model import CAUSAL, ModelConfig, ModelShape, attention_of
from llmc_jax.models.layout import tensor_specs
from llmc_jax.models.tensors import TensorSpec


class SpecialTokens(NamedTuple):
    """The ids that begin and end a text, as a config.json of Hugging Face's has them; None: there is none."""

    bos: int | None
    eos: int | list[int] | None


def stored_special(origin: Mapping[str, Any]) -> SpecialTokens | None:
    """Return the ids that the model had in Hugging Face's folder, if it came from one."""
    found = origin.get("special")
    return SpecialTokens(found.get("bos"), found.get("eos")) if isinstance(found, Mapping) else None


class Source(NamedTuple):
    """A checkpoint that can be read.

    kind: "llmc-model", "llmc-state", "state", "hugging-face", "nanogpt", "orbax" or "random". dtype: of the stored
    weights, "fp32", "bf16" or "fp16". step: where the format says it. groups: "params", and where there are any "m",
    "v" and "copy" (the 16-bit weights beside float32 master weights). warnings: one line each, of what is seen without
    reading weights. special: which ids begin and end a text, where the format says it. opened: what llm.c's formats and
    ours have beyond that: an llmc.ModelFile, an llmc_state.LlmcState or a store.Checkpoint.

    read(group, tensor, layer) gives float32: one layer of a tensor, in the tensor's shape without its first axis, or
    the whole of one without layers (wte with Vp rows, wpe, lnfw, lnfb; layer 0). 16-bit values are widened exactly. It
    raises FormatError if the file changed since it was opened.
    """

    path: Path
    kind: str
    config: ModelShape
    dtype: str
    step: int | None
    groups: tuple[str, ...]
    read: Callable[[str, str, int], np.ndarray]
    warnings: tuple[str, ...]
    special: SpecialTokens | None = None
    opened: Any = None

    def stored_dtype(self, group: str) -> str:
        """Return the dtype in which a group stands there."""
        in_16_bits = group == "copy" or (group == "params" and "copy" not in self.groups)
        return self.dtype if in_16_bits else "fp32"


def read_by_tensor(
    config: ModelShape, whole: Callable[[str, str], np.ndarray]
) -> Callable[[str, str, int], np.ndarray]:
    """Return the `read` of a Source of what gives a whole tensor of a group, in 16 bits or 32. The last one is kept."""
    layered = {spec.name for spec in tensor_specs(config) if spec.tensor.layered}
    kept: dict[tuple[str, str], np.ndarray] = {}

    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        if (group, tensor) not in kept:
            kept.clear()  # first, for a tensor may take gigabytes
            kept[group, tensor] = whole(group, tensor)
        values = kept[group, tensor]
        return widened(values[layer] if tensor in layered else values)

    return read


def gpt2_shape(config: ModelShape, what: str) -> ModelConfig:
    """Return the shape of a GPT-2, for a format that can hold nothing else. Raises InputError for another model."""
    if not isinstance(config, ModelConfig) or config != ModelConfig(*astuple(config)[:6]):
        spec = attention_of(config)
        words = f"has {spec.words}" if spec != CAUSAL else "has an MLP of another width than 4 C"
        words = words if config.family == "gpt2" else f"is of the family {config.family}"
        raise InputError(f"{what} hold GPT-2 alone, and this model {words}; `convert --to orbax` holds any")
    return config


class Slice(NamedTuple):
    """What one call of `read` gives: a tensor, a layer of it, and its shape."""

    tensor: str
    layer: int
    shape: tuple[int, ...]


def slices_of(spec: TensorSpec) -> Iterator[Slice]:
    """Yield the slices of one tensor: its layers, or the whole of one that has none."""
    if not spec.tensor.layered:
        yield Slice(spec.name, 0, spec.shape)
        return
    for layer in range(spec.shape[0]):
        yield Slice(spec.name, layer, spec.shape[1:])


def slices(config: ModelShape) -> Iterator[Slice]:
    """Yield every slice of a model, in the order of Params: joined they are its N parameters."""
    for spec in tensor_specs(config):
        yield from slices_of(spec)
