"""GPT-2 with Linformer's attention: T keys and values become RANK of them. An example of a backward that JAX makes.

    forward     K = keysw k,  V = valuesw v         over positions: (RANK, T) times (T, HS) of each head
                out = softmax(q K^T / sqrt(HS)) V   T x RANK weights where GPT-2 has T x T

    backward    JAX's: the family gives `hidden` alone, made of operations that it can differentiate

It is not causal. Each of the RANK keys is a mixture of all positions, later ones too, and no mask over mixtures keeps
them out; the paper's models are encoders. With a loss of every position, a small model came to 0.09 nats for a byte:
each position reads its target. So the shape says `mask="none"`: of each row the last position alone has a loss, and
generation is refused. A causal form mixes whole blocks of positions, and a position looks at those before its own. What
can be seen here is the price: time and memory of attention grow with T RANK. JAX keeps what its backward needs, so
-r 2 and --recompute-blocks are refused.
Source: Wang et al., Linformer (2020).
"""

import math
from collections import namedtuple
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import Attention, ModelConfig, parse_descriptor
from llmc_jax.models.automatic import differentiable
from llmc_jax.models.execution import Execution, layer_scope
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.model import block_params
from llmc_jax.models.program import Program
from llmc_jax.models.tensors import Tensor

RANK = 32
TENSORS = (
    *GPT2.tensors(None),
    Tensor("keysw", "L R maxT", "linear", "normal"),
    Tensor("valuesw", "L R maxT", "linear", "normal"),
)
BlockParams = namedtuple("BlockParams", [tensor.name for tensor in TENSORS if tensor.layered])


def attention(qkv: jax.Array, p: Any, num_heads: int) -> jax.Array:
    """Return (B, T, C) of packed qkv (B, T, 3C)."""
    B, T, C3 = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(B, T, 3, num_heads, -1), 2, 0)  # (B, T, NH, HS) each
    keys = jnp.einsum("ru,bunh->brnh", p.keysw[:, :T], k)
    values = jnp.einsum("ru,bunh->brnh", p.valuesw[:, :T], v)
    score = jnp.einsum("btnh,brnh->bntr", q, keys) / math.sqrt(q.shape[-1])
    att = jax.nn.softmax(score.astype(jnp.promote_types(score.dtype, jnp.float32)), axis=-1).astype(qkv.dtype)
    return jnp.einsum("bntr,brnh->btnh", att, values).reshape(B, T, C3 // 3)


def hidden(params: Any, tokens: jax.Array, shape: ModelConfig, execution: Execution) -> jax.Array:
    """Return lnf (B, T, C), which the head reads."""
    op = differentiable(execution.op)
    x = op.embedding(tokens, params.wte, params.wpe)
    for layer in range(shape.num_layers):
        with layer_scope(layer):
            p = block_params(params, layer, BlockParams)
            qkv = op.linear(op.layernorm(x, p.ln1w, p.ln1b), p.qkvw, p.qkvb)
            x = x + op.linear(attention(qkv, p, shape.num_heads), p.attprojw, p.attprojb)
            fch = op.linear(op.layernorm(x, p.ln2w, p.ln2b), p.fcw, p.fcb)
            x = x + op.linear(op.gelu(fch), p.fcprojw, p.fcprojb)
    return op.layernorm(x, params.lnfw, params.lnfb)


OWN = Program(hidden=hidden)
FAMILY = GPT2._replace(
    name="linformer",
    parse=lambda descriptor: replace(parse_descriptor(descriptor), attention=Attention(mask="none")),
    tensors=lambda shape: TENSORS,
    letters=lambda shape: {**GPT2.letters(shape), "R": RANK},
    tables=None,  # GPT-2's would count its attention
    program=lambda: OWN,
)
