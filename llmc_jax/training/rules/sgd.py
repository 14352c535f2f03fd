"""Stochastic gradient descent: alone, with momentum, and with Nesterov's.

    SGD         p = p - lr g
    momentum    b = mu b + g            a ball that rolls: steps in one direction add up to g / (1 - mu),
                p = p - lr b            those to and fro cancel
    Nesterov    b as above
                p = p - lr (g + mu b)   the gradient counts as if it were taken where b leads to

Weight decay is added to the gradient: g + decay p. PyTorch's SGD has the same form with dampening 0, its default.
Source: Polyak (1964); Nesterov (1983); Sutskever et al., On the importance of initialization and momentum (2013).
"""

from llmc_jax.training.optimizer import Optimizer, Rule

BUFFERS = (("b", lambda b, g, t, n: n.momentum * b + g),)
SGD = Optimizer("sgd", (Rule((), lambda g, t, n: g, couples=True),), ())
MOMENTUM = Optimizer("momentum", (Rule(BUFFERS, lambda g, b, t, n: b, couples=True),), ("momentum",))
NESTEROV = Optimizer("nesterov", (Rule(BUFFERS, lambda g, b, t, n: g + n.momentum * b, couples=True),), ("momentum",))
