"""GPT-2 whose output head has weights of its own, headw, where GPT-2 takes wte once more.

    forward     logits = lnf headw^T
    backward    tied:    dwte = what the head adds + what the embedding adds
                untied:  each of the two tensors has its own part of that sum

The head's Vp C parameters come on top, 39M for a GPT-2 of 124M. A row of wte now learns only where its token is read, a
row of headw at every position. headw is reduced by itself (`own`), since it is large and its gradient complete first.
"""

import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.layout import views
from llmc_jax.models.tensors import Tensor

HEAD = Tensor("headw", "Vp C", "embedding", "normal", own=True)


def initial(shape: ModelConfig, seed: int) -> np.ndarray:
    """Return random weights (flat_size,); the rows of headw that no token has are 0, as wte's are."""
    flat = GPT2.initial(shape, seed)
    views(flat, shape).headw[shape.vocab_size :] = 0
    return flat


FAMILY = GPT2._replace(
    name="untied-head", tensors=lambda shape: (*GPT2.tensors(shape), HEAD), head="headw", initial=initial
)
