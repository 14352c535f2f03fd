"""GPT-2 whose blocks are attention alone. An example of tensors that are left out.

    forward     x1 = x + what is pending
                pending = projection(attention(LN1(x1)))
    backward    GPT-2's, without the MLP's half

The MLP has 8 of a layer's 12 C C weights, and two thirds of its products with them: see both in `llmc-jax plan` and
`profile`. What is left moves information between positions and does little else to it. Compare the loss with GPT-2's at
equal steps, at equal time, and at equal weights, with three times the layers.
"""

from collections import namedtuple
from typing import Any

import jax

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import Execution, pinned, scope
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.model import BlockActivations
from llmc_jax.models.gpt2.operations import TABLES
from llmc_jax.models.gpt2.program import BLOCK, PROGRAM
from llmc_jax.models.gpt2.tensors import TENSORS as GPT2_TENSORS
from llmc_jax.models.tensors import Operation, Tables
from llmc_jax.ops.linear import linear_rows_forward
from llmc_jax.ops.table import Operations

TENSORS = tuple(each for each in GPT2_TENSORS if not each.name.startswith(("ln2", "fc")))
BlockParams = namedtuple("BlockParams", [tensor.name for tensor in TENSORS if tensor.layered])


def forward(
    x: jax.Array, pending: jax.Array | None, p: Any, shape: ModelConfig, execution: Execution
) -> tuple[jax.Array, jax.Array, Any]:
    """Compute one block (`Block.forward`)."""
    op = execution.op
    with scope("ln1"):
        if pending is None:
            residual1, (ln1, mean, rstd) = x, pinned(op.layernorm_forward(x, p.ln1w, p.ln1b))
        else:
            residual1, ln1, mean, rstd = pinned(op.residual_layernorm_forward(x, pending, p.ln1w, p.ln1b))
    with scope("qkv"):
        qkv = pinned(op.linear_forward(ln1, p.qkvw, p.qkvb))
    with scope("attention"):
        atty, att = pinned(op.attention_forward(qkv, shape.num_heads))
    with scope("attproj"):
        attproj = pinned(op.linear_forward(atty, p.attprojw, p.attprojb))
    return residual1, attproj, BlockActivations(residual1, ln1, mean, rstd, qkv, att, atty, *[None] * 6)


def backward(
    dx: jax.Array, dattprojb: jax.Array, p: Any, a: Any, shape: ModelConfig, execution: Execution
) -> tuple[jax.Array, jax.Array, Any]:
    """Go one block backwards (`Block.backward`)."""
    op = execution.op
    a, dx = pinned((a, dx))
    ln1 = pinned(op.layernorm_forward(a.residual1, p.ln1w, p.ln1b))[0] if a.ln1 is None else a.ln1
    with scope("attproj"):
        datty, dattprojw = op.linear_backward(dx, a.atty, p.attprojw)
    with scope("attention"):
        dqkv, dqkvb = op.attention_backward(datty, a.qkv, a.atty, a.att, shape.num_heads)
    with scope("qkv"):
        dln1, dqkvw = op.linear_backward(dqkv, ln1, p.qkvw)
    with scope("ln1"):
        dx, dln1w, dln1b, dbias = op.residual_layernorm_backward(dx, dln1, a.residual1, p.ln1w, a.ln1_mean, a.ln1_rstd)
    return pinned((dx, dbias, BlockParams(dln1w, dln1b, dqkvw, dqkvb, dattprojw, dattprojb)))


def step(
    x: jax.Array, pending: jax.Array | None, p: Any, attention: Any, position: Any, shape: ModelConfig, op: Operations
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute one block of one position (`Block.step`)."""
    if pending is None:
        ln1, _, _ = op.layernorm_forward(x, p.ln1w, p.ln1b)
    else:
        x, ln1, _, _ = op.residual_layernorm_forward(x, pending, p.ln1w, p.ln1b)
    atty, keys, values = attention(linear_rows_forward(ln1, p.qkvw, p.qkvb))
    return x, linear_rows_forward(atty, p.attprojw, p.attprojb), keys, values


# ----- what plan and profile count ------------------------------------------------------------------------------------

NAMES = {  # a block leaves its attention to be added, not its MLP, and there is no stream between two halves
    "below.residual2": "below.residual1", "below.fcproj": "below.attproj", "below.dfcprojb": "below.dattprojb",
    "dresidual2": "dresidual3",
}  # fmt: skip


def renamed(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Return operations with these names for what they take and make."""
    both = [[tuple(NAMES.get(name, name) for name in part) for part in (o.inputs, o.outputs)] for o in operations]
    return tuple(o._replace(inputs=a, outputs=b) for o, (a, b) in zip(operations, both, strict=True))


OWN_TABLES = Tables(
    tuple(each for each in TABLES.activations if not each.name.startswith(("ln2", "fc", "residual2"))),
    TABLES.embedding,
    block=renamed(TABLES.block[:5]),
    end=renamed(TABLES.end),
    end_backward=renamed(TABLES.end_backward),
    block_backward=renamed(TABLES.block_backward[4:]),
)
OWN = PROGRAM._replace(block=BLOCK._replace(parameters=BlockParams, forward=forward, backward=backward, step=step))
FAMILY = GPT2._replace(
    name="no-mlp", tensors=lambda shape: TENSORS, tables=lambda shape: OWN_TABLES, program=lambda: OWN
)
