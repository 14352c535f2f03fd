"""GPT-2 with the layernorms where the first transformers had them: x = LN(x + f(x)), not x + f(LN(x)).

    forward     x1 = LN1(what came + what is pending)       the end of the block below; of the first: the embedding's
                x2 = LN2(x1 + projection(attention(x1)))
                pending = MLP(x2)                           the next block's LN1, or the last layernorm, adds it to x2

The 2 L + 1 layernorms and their tensors are GPT-2's, so its checkpoints can be read. Only what goes on differs: the
normalised stream, where GPT-2 hands on the sum.

    backward    x2 is read twice, by the MLP and by the next sum. Both readers have it behind its layernorm, so their
                gradients meet before that, and all goes back through the layernorm:
                    dsum = layernorm_backward(dx2 of the next sum + dx2 of the MLP)
                In GPT-2 the first of the two passes the layernorm by. Here every path from the loss to the first layer
                goes through all 2 L + 1 layernorms, which is why post-LN needs a warm-up.

Source: Xiong et al., On Layer Normalization in the Transformer Architecture (2020).
"""

from typing import Any

import jax

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import Execution, pinned, scope
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.model import BlockActivations, BlockParams, recomputed
from llmc_jax.models.gpt2.program import BLOCK, PROGRAM
from llmc_jax.ops.linear import linear_rows_forward
from llmc_jax.ops.table import Operations


def forward(
    x: jax.Array, pending: jax.Array | None, p: BlockParams, shape: ModelConfig, execution: Execution
) -> tuple[jax.Array, jax.Array, BlockActivations]:
    """Compute one block (`Block.forward`)."""
    op = execution.op
    with scope("ln1"):
        if pending is None:
            sum1, (x1, mean1, rstd1) = x, pinned(op.layernorm_forward(x, p.ln1w, p.ln1b))
        else:
            sum1, x1, mean1, rstd1 = pinned(op.residual_layernorm_forward(x, pending, p.ln1w, p.ln1b))
    with scope("qkv"):
        qkv = pinned(op.linear_forward(x1, p.qkvw, p.qkvb))
    with scope("attention"):
        atty, att = pinned(op.attention_forward(qkv, shape.num_heads))
    with scope("attproj"):
        attproj = pinned(op.linear_forward(atty, p.attprojw, p.attprojb))
    with scope("ln2"):
        sum2, x2, mean2, rstd2 = pinned(op.residual_layernorm_forward(x1, attproj, p.ln2w, p.ln2b))
    with scope("fc"):
        fch = pinned(op.linear_forward(x2, p.fcw, p.fcb))
    with scope("gelu"):
        fch, fch_gelu = pinned((fch, op.gelu_forward(fch)))
    with scope("fcproj"):
        fcproj = pinned(op.linear_forward(fch_gelu, p.fcprojw, p.fcprojb))
    a = BlockActivations(sum1, x1, mean1, rstd1, qkv, att, atty, sum2, x2, mean2, rstd2, fch, fch_gelu)
    return x2, fcproj, a


def backward(
    dx: jax.Array, dfcprojb: jax.Array, p: BlockParams, a: Any, shape: ModelConfig, execution: Execution
) -> tuple[jax.Array, jax.Array, BlockParams]:
    """Go one block backwards (`Block.backward`). dx: of the next sum, so of x2 and of what the MLP adds to it."""
    op = execution.op
    a, dx = pinned((a, dx))
    a = recomputed(a, p, op)
    with scope("fcproj"):
        dfch_gelu, dfcprojw = op.linear_backward(dx, a.fch_gelu, p.fcprojw)
    with scope("gelu"):
        dfch, dfcb = op.gelu_backward(pinned(dfch_gelu), a.fch)
    with scope("fc"):
        dx2, dfcw = op.linear_backward(dfch, a.ln2, p.fcw)
    with scope("ln2"):
        dsum2, dln2w, dln2b, dattprojb = op.layernorm_backward(dx + dx2, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd)
    with scope("attproj"):
        datty, dattprojw = op.linear_backward(dsum2, a.atty, p.attprojw)
    with scope("attention"):
        dqkv, dqkvb = op.attention_backward(datty, a.qkv, a.atty, a.att, shape.num_heads)
    with scope("qkv"):
        dx1, dqkvw = op.linear_backward(dqkv, a.ln1, p.qkvw)
    with scope("ln1"):
        dsum1, dln1w, dln1b, dbias = op.layernorm_backward(dsum2 + dx1, a.residual1, p.ln1w, a.ln1_mean, a.ln1_rstd)
    gradients = BlockParams(
        dln1w, dln1b, dqkvw, dqkvb, dattprojw, dattprojb, dln2w, dln2b, dfcw, dfcb, dfcprojw, dfcprojb
    )
    return pinned((dsum1, dbias, gradients))


def step(
    x: jax.Array, pending: jax.Array | None, p: BlockParams, attention: Any, position: Any, shape: Any, op: Operations
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute one block of one position (`Block.step`)."""
    if pending is None:
        x1, _, _ = op.layernorm_forward(x, p.ln1w, p.ln1b)
    else:
        _, x1, _, _ = op.residual_layernorm_forward(x, pending, p.ln1w, p.ln1b)
    atty, keys, values = attention(linear_rows_forward(x1, p.qkvw, p.qkvb))
    attproj = linear_rows_forward(atty, p.attprojw, p.attprojb)
    _, x2, _, _ = op.residual_layernorm_forward(x1, attproj, p.ln2w, p.ln2b)
    fch_gelu = op.gelu_forward(linear_rows_forward(x2, p.fcw, p.fcb))
    return x2, linear_rows_forward(fch_gelu, p.fcprojw, p.fcprojb), keys, values


OWN = PROGRAM._replace(block=BLOCK._replace(forward=forward, backward=backward, step=step))
FAMILY = GPT2._replace(name="post-ln", program=lambda: OWN)
