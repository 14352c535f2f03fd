"""The places of a model's tensors: one after the other in one flat buffer.

A checkpoint is then one write, AdamW one pass and the gradient norm one reduction. Leaves out which tensors a model has
(its family), and the order in which a buffer is split over devices (units.py). Knows no JAX.

    N parameters, L layers
"""

from collections import namedtuple
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import ModelShape
from llmc_jax.models.family import Family, family_of
from llmc_jax.models.tensors import FLAT_MULTIPLE, KINDS, STARTS, TensorSpec, layout, sizes


@cache
def tensor_specs(shape: ModelShape) -> tuple[TensorSpec, ...]:
    """Return where the tensors of a model lie in the flat buffer, in order.

    Raises InputError where the table of a family in a user's file cannot be.
    """
    family = family_of(shape)
    if family.path and (problem := table_problem(family, shape)):
        raise InputError(f"{family.path}: {': '.join(problem)}")
    return layout(family.tensors(shape), family.letters(shape))


def table_problem(family: Family, shape: ModelShape) -> tuple[str, str] | None:
    """Return a tensor of a family's table that cannot be, and why; None where all can."""
    letters, tensors = {"L": 0, **family.letters(shape)}, family.tensors(shape)
    names = [tensor.name for tensor in tensors]
    for name, axes, kind, start, *_ in tensors:
        used = [word.lstrip("0123456789") for word in axes.split()]
        if names.count(name) > 1 or not name.isidentifier():
            return name, "a tensor needs a name of its own"
        if used.count("L") != axes.startswith("L "):
            return name, f"its shape is {axes!r}; L must be the first letter, others behind it"
        if wrong := [axis for axis in used if letters.get(axis, 0) < 1]:
            value = f"0 at {shape}" if wrong[0] in letters else f"none of {', '.join(letters)}"
            return name, f"its shape is {axes!r}, and {wrong[0]} is {value}"
        for word, value, known in (("kind", kind, KINDS), ("start", start, STARTS)):
            if value not in known:
                return name, f"its {word} is {value!r}; it must be one of {', '.join(known)}"
    head = next((sizes(tensor.shape, letters) for tensor in tensors if tensor.name == family.head), ())
    if len(head) != 2 or head[0] < shape.vocab_size:
        return family.head, f"the head must be a tensor (Vp, C), where Vp is at least V={shape.vocab_size}"
    return None


@cache
def letters(shape: ModelShape) -> Mapping[str, int]:
    """Return what the letters of the tensors' shapes stand for: L is 0 of a model without layers."""
    return {"L": 0, **family_of(shape).letters(shape)}


def shape_words(shape: ModelShape) -> str:
    """Return the depth, heads and width of a model in words."""
    numbers = letters(shape)
    return " ".join(f"{name}={numbers[name]}" for name in ("L", "NH", "C") if numbers.get(name))


def num_layers(shape: ModelShape) -> int:
    """Return L."""
    return letters(shape)["L"]


def head_spec(shape: ModelShape) -> TensorSpec:
    """Return where the weights (Vp, C) of the output head lie."""
    return next(spec for spec in tensor_specs(shape) if spec.name == family_of(shape).head)


def head_size(shape: ModelShape) -> int:
    """Return HS, the channels of a head of attention; C of a model without heads."""
    return head_spec(shape).shape[1] // letters(shape).get("NH", 1)


def widths(shape: ModelShape) -> tuple[int, int, int]:
    """Return C, F and Vp: of what the head reads, of the MLP's hidden layer (0: there is none), of the logits."""
    Vp, C = head_spec(shape).shape
    return C, letters(shape).get("F", 0), Vp


def matrix_elements(shape: ModelShape) -> int:
    """Return the elements of the matrices of all layers: 12 L C C of a GPT-2."""
    return sum(spec.size for spec in tensor_specs(shape) if spec.tensor.layered and spec.tensor.matrix)


def matrix_shapes(spec: TensorSpec, shape: ModelShape) -> list[tuple[int, int, int]]:
    """Return the matrices of a layer that stand in a tensor: how many of one shape in a row, their rows and columns."""
    rows = sizes(spec.tensor.parts, letters(shape)) or spec.shape[1:2]
    return [(len([*alike]), size, spec.shape[2]) for size, alike in groupby(rows)]


class Piece(NamedTuple):
    """A tensor without layers, or one layer of one, in the flat buffer."""

    spec: TensorSpec
    layer: int  # 0 of a tensor without layers
    start: int
    stop: int
    frozen: bool  # it is not updated


def pieces(shape: ModelShape) -> Iterator[Piece]:
    """Yield every piece of a model in the order of the flat buffer. Raises InputError for a frozen one it has not."""
    frozen, found = set(family_of(shape).frozen(shape)), set[str]()
    for spec in tensor_specs(shape):
        layers = num_layers(shape) if spec.tensor.layered else 1
        for layer in range(layers):
            names = {spec.name, f"{spec.name} {layer}"} if spec.tensor.layered else {spec.name}
            start = spec.offset + layer * (spec.size // layers)
            found |= names
            yield Piece(spec, layer, start, start + spec.size // layers, bool(names & frozen))
    if unknown := frozen - found:
        raise InputError(f"the family {shape.family} freezes {min(unknown)!r}, which is no tensor of it")


def num_parameters(shape: ModelShape) -> int:
    """Return N, the parameters of a model as llm.c counts them, padded vocabulary rows included."""
    last = tensor_specs(shape)[-1]
    return last.offset + last.size


def flat_size(shape: ModelShape) -> int:
    """Return the elements of the flat buffer: N padded to a multiple of FLAT_MULTIPLE."""
    return -(-num_parameters(shape) // FLAT_MULTIPLE) * FLAT_MULTIPLE


@cache
def params_type(shape: ModelShape) -> Any:
    """Return the NamedTuple of a model's tensors: its family's, or one that is made of their names."""
    names, kind = tuple(spec.name for spec in tensor_specs(shape)), family_of(shape).params
    return kind if getattr(kind, "_fields", None) == names else namedtuple("Params", names)


def views(flat: Any, shape: ModelShape) -> Any:
    """Return the tensors of a flat buffer (JAX or NumPy array of at least N elements), without its padding."""
    return params_type(shape)(*(flat[s.offset : s.offset + s.size].reshape(s.shape) for s in tensor_specs(shape)))


def tensors_of(flat: Any, shape: ModelShape) -> Any:
    """Return the tensors of a flat buffer (flat_size,), or what are its tensors. Raises ValueError for another size."""
    if isinstance(flat, params_type(shape)):
        return flat
    size = flat_size(shape)
    if flat.shape != (size,):
        raise ValueError(f"parameters of shape {flat.shape}: this model takes ({size},); layout.padded makes it of N")
    return views(flat, shape)


def separate(flat: Any, config: ModelShape) -> Any:
    """Return the tensors of a flat buffer, of those with a layer axis a tuple of L.

    Outside of a compiled program they are arrays of their own. A program that is called for every token takes these,
    because it would copy each part of a larger array first.
    """
    tensors = views(flat, config)
    layered = {s.name: tuple(getattr(tensors, s.name)) for s in tensor_specs(config) if s.tensor.layered}
    return tensors._replace(**layered)


def initial(shape: ModelShape, seed: int) -> np.ndarray:
    """Return the weights (flat_size,) float32 that a model begins with. Raises InputError where they are no such."""
    found, expected = family_of(shape).initial(shape, seed), ((flat_size(shape),), np.dtype(np.float32))
    if (found.shape, found.dtype) != expected:
        raise InputError(
            f"the family {shape.family}: its initial weights are {found.dtype}{list(found.shape)}; expected "
            f"float32[{flat_size(shape)}], as layout.padded makes it of all {num_parameters(shape)}"
        )
    return found


def padded(values: Any, shape: ModelShape) -> Any:
    """Return a flat buffer (flat_size,) on the host, from the N values of a file (NumPy, float32)."""
    buffer = np.zeros(flat_size(shape), np.float32)
    buffer[: num_parameters(shape)] = values
    return buffer
