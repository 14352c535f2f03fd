"""GPT-2 whose blocks write to the stream with a weight: x + s f(x).

    forward     f ends in a projection, so  s (W a + b) = (s W) a + (s b):  GPT-2's block with s W, s b in their place
    backward    dW = s d(s W),  db = s d(s b)

With s = 0 no block adds anything, and the model knows of a text only the last token and its position. With 0.5 and 0.1
the forward is that of smaller weights, but AdamW's steps are as large as ever, so in what the block adds they count s
times. Without the other side of the sum: no_residual.py.
"""

from typing import Any

import jax

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import BLOCK, PROGRAM

S = 0.5  # 0: nothing is added; 1: GPT-2
PROJECTIONS = ("attprojw", "attprojb", "fcprojw", "fcprojb")


def scaled(p: Any) -> Any:
    """Return a layer's tensors, or their gradients, with those of the two projections times S."""
    return p._replace(**{name: S * getattr(p, name) for name in PROJECTIONS})


def forward(x: jax.Array, pending: jax.Array | None, p: Any, *how: Any) -> Any:
    """Compute one block (`Block.forward`)."""
    return BLOCK.forward(x, pending, scaled(p), *how)


def backward(dx: jax.Array, dbias: jax.Array, p: Any, *how: Any) -> Any:
    """Go one block backwards (`Block.backward`)."""
    dx, dbias, gradients = BLOCK.backward(dx, dbias, scaled(p), *how)
    return dx, dbias, scaled(gradients)


def step(x: jax.Array, pending: jax.Array | None, p: Any, *how: Any) -> Any:
    """Compute one block of one position (`Block.step`)."""
    return BLOCK.step(x, pending, scaled(p), *how)


OWN = PROGRAM._replace(block=BLOCK._replace(forward=forward, backward=backward, step=step))
FAMILY = GPT2._replace(name="residual-scale", program=lambda: OWN)
