"""GPT-2 whose queries, keys and values are 0 at the start: qkvw begins at 0, as qkvb does.

    forward     q = k = v = 0: every score is 0, every position takes the mean of values that are all 0, atty = 0
    backward    dattprojw = dattproj^T atty = 0 at the first step
                dv = att^T datty, which is not 0: the rows of V learn from the first step on
                dscore = att (datt - sum_u att datt), with datt = datty v^T = 0 at first, later not; but
                    dq = scale dscore k = 0         dk = scale dscore^T q = 0       as long as both are 0

So q and k are each other's only source of gradient, and never leave 0; weight decay keeps it, too. The loss falls all
the same, since V and everything else learn, but attention remains the mean of all positions so far. If one of the two
were not 0, both would learn. See it: `llmc-jax generate … --attention` after a thousand steps.
"""

import numpy as np

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.layout import views


def initial(shape: ModelConfig, seed: int) -> np.ndarray:
    """Return GPT-2's random weights (flat_size,) with zeros in qkvw."""
    flat = GPT2.initial(shape, seed)
    views(flat, shape).qkvw[:] = 0
    return flat


FAMILY = GPT2._replace(name="qkv-zero", initial=initial)
