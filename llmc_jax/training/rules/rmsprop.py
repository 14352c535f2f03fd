"""RMSProp: Adagrad that forgets.

    v = beta2 v + (1 - beta2) g^2
    p = p - lr g / (sqrt(v) + eps)

The mean forgets what is older than about 1 / (1 - beta2) updates, so the steps need not shrink. It starts at zero and
its bias stays in, so that the first steps are larger by up to 1 / sqrt(1 - beta2): a warm-up helps. eps stands outside
the root, as in PyTorch, whose alpha is beta2 (0.99 there). Weight decay is added to the gradient.
Source: Hinton, Neural Networks for Machine Learning, lecture 6e (2012).
"""

import jax.numpy as jnp

from llmc_jax.training.optimizer import Optimizer, Rule
from llmc_jax.training.rules.adamw import mean_square

RULE = Rule((("v", mean_square),), lambda g, v, t, n: g / (jnp.sqrt(v) + n.eps), couples=True)
RMSPROP = Optimizer("rmsprop", (RULE,), ("beta2", "eps"))
