"""Adagrad: an element that has seen large gradients takes small steps.

    s = s + g^2
    p = p - lr g / (sqrt(s) + eps)

The sum only grows, so the steps shrink as 1 / sqrt(t) where gradients stay as large: a schedule of its own for each
element. Weight decay is added to the gradient. PyTorch's has eps 1e-10, here it is --eps.
Source: Duchi, Hazan, Singer, Adaptive Subgradient Methods (2011).
"""

import jax.numpy as jnp

from llmc_jax.training.optimizer import Optimizer, Rule

SQUARES = (("s", lambda s, g, t, n: s + g * g),)
RULE = Rule(SQUARES, lambda g, s, t, n: g / (jnp.sqrt(s) + n.eps), couples=True)
ADAGRAD = Optimizer("adagrad", (RULE,), ("eps",))
