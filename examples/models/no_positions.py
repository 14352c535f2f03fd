"""GPT-2 without positions: wpe begins at 0 and is frozen, so it stays 0.

    forward     x = wte[token] + 0
    backward    wpe has a gradient as ever, which updates nothing

What still tells positions apart is the causal mask alone: position t takes its mean over t + 1 tokens. The first layer
sees a set of tokens and not their order; later ones may know from it where they are. The loss says how much that is.
Source: Haviv et al., Transformer Language Models without Positional Encodings Still Learn Positional Information.

A checkpoint of GPT-2 brings its own wpe, which then stays as it is: begin with a shape, such as -e d12.
"""

import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.layout import views


def initial(shape: ModelConfig, seed: int) -> np.ndarray:
    """Return GPT-2's random weights (flat_size,) without positions."""
    flat = GPT2.initial(shape, seed)
    views(flat, shape).wpe[:] = 0
    return flat


FAMILY = GPT2._replace(name="no-positions", initial=initial, frozen=lambda shape: ("wpe",))
