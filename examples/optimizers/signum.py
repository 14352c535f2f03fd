"""Signum: every element moves as far as every other, in the direction of its momentum.

    m = beta1 m + (1 - beta1) g
    p = p - lr (sign(m) + decay p)

It keeps one buffer where AdamW keeps two. AdamW's changes are about 0.2 on average and these are 1, so the rate is a
fifth of AdamW's or less. Train with it: python train.py --optimizer examples/optimizers/signum.py
Source: Bernstein et al., signSGD (2018, arXiv 1802.04434).
"""

import jax.numpy as jnp

from llmc_jax.training.optimizer import Optimizer, Rule
from llmc_jax.training.rules.adamw import mean

RULE = Rule((("m", mean),), lambda g, m, t, n: jnp.sign(m))
OPTIMIZER = Optimizer("signum", (RULE,), ("beta1",))
