"""AdamW and Adam.

With gradient g, rate lr, update number t = 1, 2, …:

    m = beta1 m + (1 - beta1) g                 running mean of the gradient
    v = beta2 v + (1 - beta2) g^2               running mean of its square
    mhat = m / (1 - beta1^t)                    both start at zero and are too small at first:
    vhat = v / (1 - beta2^t)                    the expectation of m is (1 - beta1^t) times the gradient's
    p = p - lr (mhat / (sqrt(vhat) + eps) + decay p)

The decay pulls at the parameter itself, outside the adaptive scaling ("decoupled"). Adam has it inside: g + decay p
takes the place of g.
Source: Kingma, Ba, Adam (2015); Loshchilov, Hutter, Decoupled Weight Decay Regularization (2019); llm.c
llmc/adamw.cuh.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.training.optimizer import Optimizer, Rule, record, update_by

NUMBERS = ("beta1", "beta2", "eps")
AdamWNumbers = record((*NUMBERS, "weight_decay"))  # for who calls it without a configuration


def mean(m: jax.Array, g: jax.Array, t: Any, n: Any) -> jax.Array:
    """Return the running mean of the gradient."""
    return n.beta1 * m + (1.0 - n.beta1) * g


def mean_square(v: jax.Array, g: jax.Array, t: Any, n: Any) -> jax.Array:
    """Return the running mean of its square."""
    return n.beta2 * v + (1.0 - n.beta2) * g * g


def change(g: jax.Array, m: jax.Array, v: jax.Array, t: Any, n: Any) -> jax.Array:
    """Return the mean over the root of the mean square, both without their bias."""
    mhat = m / (1.0 - n.beta1**t)
    vhat = v / (1.0 - n.beta2**t)
    return mhat / (jnp.sqrt(vhat) + n.eps)


RULE = Rule((("m", mean), ("v", mean_square)), change)
adamw_update = partial(update_by, rules=((RULE, ()),))
ADAMW = Optimizer("adamw", (RULE,), NUMBERS, scope="adamw", update=adamw_update)
ADAM = Optimizer("adam", (RULE._replace(couples=True),), NUMBERS)
