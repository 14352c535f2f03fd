"""GPT-2 whose MLP is SwiGLU: a third matrix makes a gate for each hidden channel. An example of tensors of one's own.

    forward     gate = ln2 gatew^T                                      (no bias, as in LLaMA)
                fch  = ln2 fcw^T + fcb
                h    = silu(gate) fch                                   silu(g) = g s, s = 1 / (1 + exp(-g))
                out  = h fcprojw^T + fcprojb

    backward    h is a product, so each factor's gradient is dh times the other one:
                    dfch  = dh silu(gate)
                    dgate = dh fch silu'(gate)                          silu'(g) = s + g s (1 - s)
                ln2 is read by two matrices, so its gradient is a sum:
                    dln2  = dfch fcw + dgate gatew

F is 8/3 C rounded up to a multiple of 8, unless -e names one: three matrices of 8/3 C C have the weights of GPT-2's two
of 4 C C. The table of tensors has one row more, from which initialisation, files, decay and the split over devices
follow, and the tables of values and operations have theirs, from which `llmc-jax plan` and `profile` count.
Source: Shazeer, GLU Variants Improve Transformer (2020).
"""

from collections import namedtuple
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.models.execution import Execution, pinned, scope
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.model import BlockActivations, recomputed
from llmc_jax.models.gpt2.operations import TABLES
from llmc_jax.models.gpt2.program import BLOCK, PROGRAM
from llmc_jax.models.gpt2.tensors import TENSORS as GPT2_TENSORS
from llmc_jax.models.tensors import ALWAYS, Activation, Operation, Tensor
from llmc_jax.ops.linear import bias_backward, linear_rows_forward
from llmc_jax.ops.table import Operations

TENSORS = (*GPT2_TENSORS, Tensor("gatew", "L F C", "linear", "normal"))
# a layer's tensors in the table's order, and what its backward needs
BlockParams = namedtuple("BlockParams", [tensor.name for tensor in TENSORS if tensor.layered])
SwigluActivations = namedtuple("SwigluActivations", [*BlockActivations._fields, "gate"])


def parse(descriptor: str) -> ModelConfig:
    """Return the shape of a descriptor of -e. Raises InputError for one that is none."""
    shape = parse_descriptor(descriptor)
    return shape if shape.mlp_channels else replace(shape, mlp_channels=-(-round(8 / 3 * shape.channels) // 8) * 8)


def swiglu_forward(gate: jax.Array, fch: jax.Array) -> jax.Array:
    """Return h (..., F) of gate and fch (..., F), computed in at least float32."""
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    return (jax.nn.silu(gate.astype(wide)) * fch).astype(fch.dtype)


def swiglu_backward(dh: jax.Array, gate: jax.Array, fch: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dgate and dfch (..., F), and the sum of dfch over all rows (F,)."""
    g = gate.astype(jnp.promote_types(gate.dtype, jnp.float32))
    s = jax.nn.sigmoid(g)
    dfch = (dh * g * s).astype(fch.dtype)
    dgate = (dh * fch * (s + g * s * (1 - s))).astype(gate.dtype)
    return dgate, dfch, bias_backward(dfch)


def forward(
    x: jax.Array, pending: jax.Array | None, p: Any, shape: ModelConfig, execution: Execution
) -> tuple[jax.Array, jax.Array, Any]:
    """Compute one block (`Block.forward`): GPT-2's but for gate and h, which takes the place of fch_gelu."""
    op = execution.op
    with scope("ln1"):
        if pending is None:
            residual1, (ln1, mean1, rstd1) = x, pinned(op.layernorm_forward(x, p.ln1w, p.ln1b))
        else:
            residual1, ln1, mean1, rstd1 = pinned(op.residual_layernorm_forward(x, pending, p.ln1w, p.ln1b))
    with scope("qkv"):
        qkv = pinned(op.linear_forward(ln1, p.qkvw, p.qkvb))
    with scope("attention"):
        atty, att = pinned(op.attention_forward(qkv, shape.num_heads))
    with scope("attproj"):
        attproj = pinned(op.linear_forward(atty, p.attprojw, p.attprojb))
    with scope("ln2"):
        residual2, ln2, mean2, rstd2 = pinned(op.residual_layernorm_forward(residual1, attproj, p.ln2w, p.ln2b))
    with scope("fc"):
        gate = pinned(op.linear_forward(ln2, p.gatew, None))  # (B, T, F)
        fch = pinned(op.linear_forward(ln2, p.fcw, p.fcb))  # (B, T, F)
    with scope("gelu"):
        gate, fch, h = pinned((gate, fch, swiglu_forward(gate, fch)))
    with scope("fcproj"):
        fcproj = pinned(op.linear_forward(h, p.fcprojw, p.fcprojb))
    a = residual1, ln1, mean1, rstd1, qkv, att, atty, residual2, ln2, mean2, rstd2, fch, h, gate
    return residual2, fcproj, SwigluActivations(*a)


def backward(
    dresidual3: jax.Array, dfcprojb: jax.Array, p: Any, a: Any, shape: ModelConfig, execution: Execution
) -> tuple[jax.Array, jax.Array, Any]:
    """Go one block backwards (`Block.backward`)."""
    op = execution.op
    a, dresidual3 = pinned((a, dresidual3))
    if a.fch_gelu is None:
        with scope("gelu"):
            a = a._replace(fch_gelu=pinned(swiglu_forward(a.gate, a.fch)))
    a = recomputed(a, p, op)
    with scope("fcproj"):
        dh, dfcprojw = op.linear_backward(dresidual3, a.fch_gelu, p.fcprojw)
    with scope("gelu"):
        dgate, dfch, dfcb = swiglu_backward(pinned(dh), a.gate, a.fch)
    with scope("fc"):
        through_fch, dfcw = op.linear_backward(dfch, a.ln2, p.fcw)
        through_gate, dgatew = op.linear_backward(dgate, a.ln2, p.gatew)
        dln2 = through_fch + through_gate
    with scope("ln2"):
        dresidual2, dln2w, dln2b, dattprojb = op.residual_layernorm_backward(
            dresidual3, dln2, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd
        )
    with scope("attproj"):
        datty, dattprojw = op.linear_backward(dresidual2, a.atty, p.attprojw)
    with scope("attention"):
        dqkv, dqkvb = op.attention_backward(datty, a.qkv, a.atty, a.att, shape.num_heads)
    with scope("qkv"):
        dln1, dqkvw = op.linear_backward(dqkv, a.ln1, p.qkvw)
    with scope("ln1"):
        dresidual1, dln1w, dln1b, dbias = op.residual_layernorm_backward(
            dresidual2, dln1, a.residual1, p.ln1w, a.ln1_mean, a.ln1_rstd
        )
    gradients = BlockParams(
        ln1w=dln1w, ln1b=dln1b, qkvw=dqkvw, qkvb=dqkvb, attprojw=dattprojw, attprojb=dattprojb,
        ln2w=dln2w, ln2b=dln2b, fcw=dfcw, fcb=dfcb, fcprojw=dfcprojw, fcprojb=dfcprojb, gatew=dgatew,
    )  # fmt: skip
    return pinned((dresidual1, dbias, gradients))


def step(
    x: jax.Array, pending: jax.Array | None, p: Any, attention: Any, position: Any, shape: ModelConfig, op: Operations
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute one block of one position (`Block.step`)."""
    if pending is None:
        ln1, _, _ = op.layernorm_forward(x, p.ln1w, p.ln1b)
    else:
        x, ln1, _, _ = op.residual_layernorm_forward(x, pending, p.ln1w, p.ln1b)
    atty, keys, values = attention(linear_rows_forward(ln1, p.qkvw, p.qkvb))
    attproj = linear_rows_forward(atty, p.attprojw, p.attprojb)
    x, ln2, _, _ = op.residual_layernorm_forward(x, attproj, p.ln2w, p.ln2b)
    h = swiglu_forward(linear_rows_forward(ln2, p.gatew, None), linear_rows_forward(ln2, p.fcw, p.fcb))
    return x, linear_rows_forward(h, p.fcprojw, p.fcprojb), keys, values


OWN_TABLES = TABLES._replace(  # what GPT-2's rows call fch_gelu is h here
    activations=(*TABLES.activations, Activation("gate", "L B T F", ALWAYS)),
    block=(
        *TABLES.block[:8],
        Operation("fc", "linear_forward", ("ln2",), ("gatew",), ("gate",)),
        Operation("gelu", "swiglu_forward", ("gate", "fch"), (), ("fch_gelu",)),
        *TABLES.block[9:],
    ),
    block_backward=(
        *TABLES.block_backward[:1],
        Operation("gelu", "swiglu_backward", ("dfch_gelu", "gate", "fch"), (), ("dgate", "dfch", "dfcb")),
        *TABLES.block_backward[2:3],
        Operation("fc", "linear_backward", ("dgate", "ln2"), ("gatew",), ("dln2", "dgatew")),
        *TABLES.block_backward[3:],
    ),
)
OWN = PROGRAM._replace(block=BLOCK._replace(parameters=BlockParams, forward=forward, backward=backward, step=step))
FAMILY = GPT2._replace(
    name="swiglu", parse=parse, tensors=lambda shape: TENSORS, tables=lambda shape: OWN_TABLES, program=lambda: OWN
)
