"""GPT-2 without the skip paths: x = f(x), or x = SKIP x + f(x).

    forward     residual = SKIP x + f               out = layernorm(residual)
    backward    residual is read by its layernorm, and by the next sum, which took it times SKIP:
                    dresidual_below = SKIP dresidual + what comes back through the layernorm

With SKIP = 0 the gradient has one way down, through every matrix and every softmax of every layer above: compare the
norms of the first and the last layer's gradients with GPT-2's, and how the loss falls with twice the layers. With 0.5
what the embedding wrote is still there after L layers, 0.25^L times. The other side of the sum: residual_scale.py.
"""

from typing import Any

import jax

from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.ops.table import Operations

SKIP = 0.0  # 1: GPT-2


def operations(op: Operations) -> Operations:
    """Return the operations of a run, whose additions to the stream take x, and give its gradient, times SKIP."""

    def forward(x: jax.Array, f: jax.Array, *affine: Any) -> Any:
        return op.residual_layernorm_forward(SKIP * x, f, *affine)

    def backward(dresidual: jax.Array, *rest: Any) -> Any:
        return op.residual_layernorm_backward(SKIP * dresidual, *rest)

    return op._replace(residual_layernorm_forward=forward, residual_layernorm_backward=backward)


OWN = PROGRAM._replace(operations=operations)
FAMILY = GPT2._replace(name="no-residual", program=lambda: OWN)
