"""The parameters: one flat buffer, viewed as llm.c's 16 tensors.

A checkpoint is then one write, AdamW one pass and the gradient norm one reduction. The order and the shapes are
llm.c's (`fill_in_parameter_sizes` in train_gpt2.c), so files agree byte for byte. Leaves out initialisation (init.py).

    B batch, T sequence length, C channels, L layers, NH heads, V vocabulary, Vp padded vocabulary, N parameters
"""

import math
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.config.train import ModelConfig

# Buffers are padded at the end to a multiple of this, so that every kernel's tile (at most 1024) and every shard
# (at most 64 devices) divides them: 124,475,904 itself is not even a multiple of 1024. Files hold N, never the padding.
FLAT_MULTIPLE = 65_536


class Params(NamedTuple):
    """The 16 tensors in the order of the file. Linear weights are (output channels, input channels), as in PyTorch."""

    wte: Any  # (Vp, C)     token embedding, and the output head (tied)
    wpe: Any  # (maxT, C)   position embedding
    ln1w: Any  # (L, C)
    ln1b: Any  # (L, C)
    qkvw: Any  # (L, 3C, C)  rows Q | K | V, each split into NH heads
    qkvb: Any  # (L, 3C)
    attprojw: Any  # (L, C, C)
    attprojb: Any  # (L, C)
    ln2w: Any  # (L, C)
    ln2b: Any  # (L, C)
    fcw: Any  # (L, 4C, C)
    fcb: Any  # (L, 4C)
    fcprojw: Any  # (L, C, 4C)
    fcprojb: Any  # (L, C)
    lnfw: Any  # (C,)
    lnfb: Any  # (C,)


MATRICES = frozenset({"wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw"})  # what llm.c's weight decay applies to


class TensorSpec(NamedTuple):
    """Where one tensor lies in the flat buffer; offset and size count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """The 16 tensors of a model, in order, with their offsets in the flat buffer."""
    L, C = config.num_layers, config.channels
    shapes = Params(
        wte=(config.padded_vocab_size, C), wpe=(config.max_seq_len, C),
        ln1w=(L, C), ln1b=(L, C), qkvw=(L, 3 * C, C), qkvb=(L, 3 * C), attprojw=(L, C, C), attprojb=(L, C),
        ln2w=(L, C), ln2b=(L, C), fcw=(L, 4 * C, C), fcb=(L, 4 * C), fcprojw=(L, C, 4 * C), fcprojb=(L, C),
        lnfw=(C,), lnfb=(C,),
    )  # fmt: skip
    specs = []
    offset = 0
    for name, shape in zip(Params._fields, shapes, strict=True):
        size = math.prod(shape)
        specs.append(TensorSpec(name, shape, offset, size))
        offset += size
    return tuple(specs)


def num_parameters(config: ModelConfig) -> int:
    """N: the parameters of a model as llm.c counts them, padded vocabulary rows included."""
    last = tensor_specs(config)[-1]
    return last.offset + last.size


def flat_size(config: ModelConfig) -> int:
    """Elements of the flat buffer: N padded to a multiple of FLAT_MULTIPLE."""
    return -(-num_parameters(config) // FLAT_MULTIPLE) * FLAT_MULTIPLE


def views(flat: Any, config: ModelConfig) -> Params:
    """The 16 tensors of a flat buffer (JAX or NumPy array of at least N elements), without its padding."""
    return Params(*(flat[s.offset : s.offset + s.size].reshape(s.shape) for s in tensor_specs(config)))


def padded(values: Any, config: ModelConfig) -> Any:
    """A flat buffer (flat_size,) on the host, from the N values of a file (NumPy, float32)."""
    buffer = np.zeros(flat_size(config), np.float32)
    buffer[: num_parameters(config)] = values
    return buffer
