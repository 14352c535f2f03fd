"""Muon: momentum whose matrices are made orthogonal; AdamW for all that is no matrix of a layer.

A linear layer's gradient is a sum of few outer products: some of its singular values are large, most are small. Muon
keeps the directions and makes all singular values one. With the gradient G of one matrix (rows, cols):

    B = mu B + (1 - mu) G
    U = (1 - mu) G + mu B                               Nesterov's, as in sgd.py
    O = orthogonal(U)                                   U = P S Q^T becomes about P Q^T
    p = p - lr (0.2 sqrt(max(rows, cols)) O + decay p)

The root mean square of the elements of P Q^T is 1 / sqrt(max(rows, cols)). The factor makes it 0.2, which is about that
of AdamW's changes: one rate and one decay do for both.

Newton and Schulz find P Q^T by products alone. An odd polynomial of a matrix is the same polynomial of its singular
values: X (X^T X) = P S^3 Q^T. So X is scaled until no singular value exceeds 1, by the Frobenius norm, which is the
root of the sum of their squares. Then five times

    A = X X^T,   X = a X + (b A + c A A) X              s becomes a s + b s^3 + c s^5

Keller Jordan's coefficients are the same in all five: they lift small values quickly, by 3.4 each time, and leave large
ones anywhere from 0.7 to 1.2, which does no harm. Those of Polar Express differ from step to step: each are the best
for what the ones before them leave. Products are in bfloat16 where the model computes in 16 bits, else in the dtype of
the parameters.

Q, K and V stand in one tensor and are three matrices. The tied embedding and the head are no matrices of a layer.
Source: Jordan et al., Muon (2024, https://kellerjordan.github.io/posts/muon); Liu et al., Muon is Scalable for LLM
Training (2025, arXiv 2502.16982: the factor); Amsel et al., The Polar Express (2025, arXiv 2505.16932).
"""

from functools import partial

import jax
import jax.numpy as jnp

from llmc_jax.models.tensors import Tensor
from llmc_jax.training.optimizer import Optimizer, Rule
from llmc_jax.training.rules import adamw

Steps = tuple[tuple[float, float, float], ...]
KELLER: Steps = ((3.4445, -4.7750, 2.0315),) * 5
POLAR_EXPRESS: Steps = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonal(u: jax.Array, steps: Steps = KELLER, scale: float = 1.0) -> jax.Array:
    """Return matrices (…, rows, cols) with their singular values made about one.

    scale: of the Frobenius norm that they are divided by.
    """
    if u.shape[-2] > u.shape[-1]:  # X X^T is the smaller of the two products
        return jnp.swapaxes(orthogonal(jnp.swapaxes(u, -1, -2), steps, scale), -1, -2)
    squares = jnp.square(u.astype(jnp.promote_types(u.dtype, jnp.float32)))
    norm = jnp.sqrt(jnp.sum(squares, axis=(-2, -1), keepdims=True)) * scale
    x = (u / jnp.maximum(norm, 1e-7)).astype(u.dtype)
    for a, b, c in steps:
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def direction(u: jax.Array, steps: Steps, scale: float) -> jax.Array:
    """Return the change of matrices (…, rows, cols): orthogonal, and as large as AdamW's."""
    return 0.2 * max(u.shape[-2:]) ** 0.5 * orthogonal(u, steps, scale)


def muon(name: str, steps: Steps, scale: float) -> Optimizer:
    """Return Muon with the steps of an iteration."""
    mean = ("m", lambda m, g, t, n: n.momentum * m + (1.0 - n.momentum) * g)
    matrix = partial(direction, steps=steps, scale=scale)
    # Nesterov's: the mean with this gradient counted once more
    matrices = Rule((mean,), lambda g, m, t, n: (1.0 - n.momentum) * g + n.momentum * m, False, matrix, len(steps))

    def rule_of(tensor: Tensor) -> Rule:
        return matrices if tensor.layer_matrix else adamw.RULE

    return Optimizer(name, (adamw.RULE, matrices), ("momentum", *adamw.NUMBERS), rule_of=rule_of)


MUON = muon("muon", KELLER, 1.0)
MUON_POLAR = muon("muon-polar", POLAR_EXPRESS, 1.01)  # their bound leaves room for rounding
