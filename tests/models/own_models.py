"""Files of models as a user would write them: GPT-2 with its own block under another name, and one that JAX
differentiates, with layers and an operation of its own.

Tests put a mistake into one of them by replacing words.
"""

from pathlib import Path

from llmc_jax.models import family as families
from llmc_jax.models.family import Family

GPT2 = """\
from typing import Any, NamedTuple

import jax

from llmc_jax.models.gpt2.family import FAMILY as GPT2


class Moved(NamedTuple):
    ln1w: Any
    ln1b: Any
    qkvw: Any
    qkvb: Any
    attprojw: Any
    attprojb: Any
    ln2w: Any
    ln2b: Any
    fcb: Any
    fcw: Any
    fcprojw: Any
    fcprojb: Any


def silu_backward(dout, x):
    dx = jax.vjp(jax.nn.silu, x)[1](dout)[0]
    return dx, dx.sum((0, 1))


def program():
    from llmc_jax.models.gpt2 import decode, model
    from llmc_jax.models.gpt2.program import BLOCK, PROGRAM

    def forward(x, pending, p, shape, execution):
        return model.block_forward(x, pending, p, shape, execution)

    def backward(dx, dbias, p, a, shape, execution):
        dx, dbias, found = model.block_backward(dx, dbias, p, a, shape, execution)
        return dx, dbias, found

    def step(x, *given):
        y, pending, keys, values = decode.block_step(x, *given)
        return y, pending, keys, values

    def loss_and_gradients(*given):
        return model.loss_and_gradients(*given)

    block = BLOCK._replace(forward=forward, backward=backward, step=step)
    return PROGRAM._replace(block=block, loss_and_gradients=loss_and_gradients)


FAMILY = GPT2._replace(name="mine", program=program)
"""

SMALL = """\
from dataclasses import dataclass

import jax
import numpy as np

from llmc_jax.models.family import Family
from llmc_jax.models.tensors import Tensor


@dataclass(frozen=True)
class Small:
    channels: int
    vocab_size: int = 11
    max_seq_len: int = 6
    family: str = "small"
    source: str = ""


TENSORS = (
    Tensor("table", "Vp C", "embedding", "normal"),
    Tensor("scale", "L C", "layernorm", "one"),
    Tensor("out", "Vp C", "linear", "normal"),
)


def letters(shape):
    return {"L": 2, "C": shape.channels, "Vp": 16}


def initial(shape, seed):
    return np.zeros(65536, np.float32)


@jax.custom_vjp
def double(x):
    return 2 * x


double.defvjp(lambda x: (2 * x, None), lambda _, dout: (2 * dout,))


def hidden(params, tokens, shape, execution):
    x = double(params.table[tokens])
    return x * params.scale[0] + params.scale[1]


def program():
    from llmc_jax.models.program import Program

    return Program(hidden=hidden)


def parse(words):
    return Small(int(words))


FAMILY = Family("small", Small, parse, lambda shape: TENSORS, letters, initial, program, head="out")
"""


def changed(text: str, *words: str) -> str:
    """Return a text with words in the place of others, which must stand there: old, new, old, new."""
    for old, new in zip(words[::2], words[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    return text


def loaded(text: str, folder: Path) -> Family:
    """Return the family of a file."""
    (folder / "model.py").write_text(text)
    return families.load(folder / "model.py")


def line_of(text: str, words: str) -> int:
    """Return the number of the first line with some words."""
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)
