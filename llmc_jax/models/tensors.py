"""What a model's tables of tensors and of activations consist of, and how its parameters lie in one flat buffer.

A checkpoint is then one write, AdamW one pass and the gradient norm one reduction. Leaves out which tensors a model has
(gpt2/tensors.py).
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# The most devices that a buffer can be split over, and the blocks of it that a checkpoint holds a digest of each.
BLOCKS = 64
# Buffers are padded at the end to a multiple of this, so that every kernel's tile (at most 1024) divides every block:
# 124,475,904 itself is not even a multiple of 1024. Of all files only our checkpoints hold the padding.
FLAT_MULTIPLE = BLOCKS * 1024


class Tensor(NamedTuple):
    """One of a model's parameters: a row of its table."""

    name: str  # llm.c's
    shape: str  # in letters, such as "L 3C C"; one that each layer has begins with L
    kind: str  # what it belongs to: "embedding", "layernorm" or "linear"
    start: str  # how it is initialised: "normal"; "residual": normal, and smaller; "one"; "zero"
    hugging_face: str  # transformers' name, within the layer where each layer has one

    @property
    def layered(self) -> bool:
        """Return whether each layer has one."""
        return self.shape.startswith("L ")

    @property
    def matrix(self) -> bool:
        """Return whether it is a matrix, which llm.c's weight decay applies to, or one for each layer."""
        return len(self.shape.split()) - self.layered == 2

    @property
    def transposed(self) -> bool:
        """Return whether transformers keeps it as (in, out), in its Conv1D, where llm.c has (out, in)."""
        return self.matrix and self.kind == "linear"

    @property
    def bias(self) -> bool:
        """Return whether it is added, rather than multiplied with."""
        return self.start == "zero"


class Activation(NamedTuple):
    """One of the values that a forward pass makes: a row of its table."""

    name: str  # llm.c's
    shape: str  # in letters, such as "L B T 3C"; one that each layer makes begins with L
    kept_below: int = 0  # the level of recomputation (-r) from which the backward makes it again; 0: it needs none
    wide: bool = False  # in at least float32 whatever the model computes in

    @property
    def layered(self) -> bool:
        """Return whether each layer makes one."""
        return self.shape.startswith("L ")


ALWAYS = 3  # kept_below of what is kept at every level


class TensorSpec(NamedTuple):
    """Where one tensor lies in the flat buffer; offset and size count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


def sizes(shape: str, letters: Mapping[str, int]) -> tuple[int, ...]:
    """Return a shape in numbers: "L 3C C" with L=2 and C=8 is (2, 24, 8)."""
    axes = (word.lstrip("0123456789") for word in shape.split())
    return tuple(
        int(word.removesuffix(axis) or 1) * letters[axis] for word, axis in zip(shape.split(), axes, strict=True)
    )


def layout(tensors: Iterable[Tensor], letters: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """Return where the tensors lie: one after the other in the order of the table, with nothing between them."""
    specs = []
    offset = 0
    for tensor in tensors:
        shape = sizes(tensor.shape, letters)
        size = math.prod(shape)
        specs.append(TensorSpec(tensor.name, shape, offset, size))
        offset += size
    return tuple(specs)
