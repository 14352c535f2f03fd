"""A model of two tensors in a user's file: no layer, no attention, no backward or decoder of its own, no tables.

hidden[t] = wte[token t] + mean of wte[token 0] … wte[token t]

B batch, T sequence length, C channels, V vocabulary
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.models.family import Family
from llmc_jax.models.layout import flat_size, num_parameters
from llmc_jax.models.tensors import Tensor


@dataclass(frozen=True)
class Shape:
    """A toy's shape."""

    vocab_size: int  # V
    width: int  # C
    max_seq_len: int
    family: str = "toy"
    source: str = ""


def parse(descriptor: str) -> Shape:
    """Return the shape of a descriptor such as toy-V61-C8-T16."""
    if found := re.fullmatch(r"toy-V([0-9]+)-C([0-9]+)-T([0-9]+)", descriptor):
        return Shape(*map(int, found.groups()))
    raise InputError(f"-e {descriptor}: no toy; write toy-V61-C8-T16")


def initial(shape: Shape, seed: int) -> np.ndarray:
    """Return random weights (flat_size,)."""
    flat = np.zeros(flat_size(shape), np.float32)
    flat[: num_parameters(shape)] = np.random.default_rng(seed).normal(0.0, 0.1, num_parameters(shape))
    return flat


def program() -> Any:
    """Return what computes a toy."""
    import jax.numpy as jnp

    from llmc_jax.models.program import Program

    def hidden(params: Any, tokens: Any, shape: Shape, execution: Any) -> Any:
        """Return what the head reads, (B, T, C), of tokens (B, T)."""
        x = params.wte[tokens]
        counts = jnp.arange(1, tokens.shape[1] + 1, dtype=x.dtype)
        return x + jnp.cumsum(x, axis=1) / counts[:, None]

    return Program(hidden)


FAMILY = Family(
    name="toy",
    shape=Shape,
    parse=parse,
    tensors=lambda shape: (
        Tensor("wte", "V C", "embedding", "normal"),
        Tensor("head", "V C", "linear", "normal"),
    ),
    letters=lambda shape: {"V": shape.vocab_size, "C": shape.width},
    initial=initial,
    program=program,
    head="head",
)
