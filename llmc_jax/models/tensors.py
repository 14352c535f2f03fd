"""The rows of a model's tables: tensors, activations and operations.

Leaves out which tensors a model has (gpt2/tensors.py), and where they lie (layout.py).
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# The most devices that a buffer can be split over, and the blocks of it that a checkpoint holds a digest of each.
BLOCKS = 64
# Buffers are padded at the end to a multiple of this, so that every kernel's tile (at most 1024) divides every block:
# 124,475,904 itself is not even a multiple of 1024. Of all files only our checkpoints hold the padding.
FLAT_MULTIPLE = BLOCKS * 1024


KINDS = ("embedding", "layernorm", "linear")
STARTS = ("normal", "residual", "one", "zero")


class Tensor(NamedTuple):
    """One of a model's parameters: a row of its table."""

    name: str  # llm.c's
    shape: str  # in letters, such as "L 3C C"; one that each layer has begins with L
    kind: str  # what it belongs to: one of KINDS
    start: str  # how it is initialised, one of STARTS; "residual": normal, and smaller
    hugging_face: str = ""  # transformers' name, within the layer where each layer has one; empty: it has none
    bias: bool = False  # it is added, rather than multiplied with
    own: bool = False  # its gradient is reduced by itself: it is large, or complete before or after the others
    parts: str = ""  # rows of the matrices that stand in it one below the other, in letters; empty: it is one

    @property
    def layered(self) -> bool:
        """Return whether each layer has one."""
        return self.shape.startswith("L ")

    @property
    def matrix(self) -> bool:
        """Return whether it is a matrix, which llm.c's weight decay applies to, or one for each layer."""
        return len(self.shape.split()) - self.layered == 2

    @property
    def layer_matrix(self) -> bool:
        """Return whether each layer has one to multiply with, which is what Muon is for."""
        return self.layered and self.matrix and self.kind == "linear"

    @property
    def transposed(self) -> bool:
        """Return whether transformers keeps it as (in, out), in its Conv1D, where llm.c has (out, in)."""
        return self.matrix and self.kind == "linear"


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


class Operation(NamedTuple):
    """One operation: function(*inputs, *weights) gives the outputs. A gradient has a d before its name."""

    name: str  # the named scope that it runs in, by which profiles know it
    function: str  # what it is, as in ops/
    inputs: tuple[str, ...]  # "below.": of the layer before this one
    weights: tuple[str, ...]
    outputs: tuple[str, ...]


class Tables(NamedTuple):
    """A model's operations and activations, for who counts memory, products and bytes. The same form as GPT-2's."""

    activations: tuple[Activation, ...]  # in the order of the forward pass
    embedding: Operation
    block: tuple[Operation, ...]  # the first adds what the block below left to be added to the stream
    end: tuple[Operation, ...]
    end_backward: tuple[Operation, ...]
    block_backward: tuple[Operation, ...]


class TensorSpec(NamedTuple):
    """Where one tensor lies in the flat buffer; offset and size count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    tensor: Tensor  # its row of the table


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
        specs.append(TensorSpec(tensor.name, shape, offset, size, tensor))
        offset += size
    return tuple(specs)
