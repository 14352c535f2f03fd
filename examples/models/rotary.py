"""GPT-2 with rotary positions: queries and keys are turned by their position, and wpe is 0.

    forward     The channels i and i + HS/2 of a head of q or k are a point of a plane, which position t turns by the
                angle t w_i, with w_i = 10000^(-2i/HS):
                    a' = a cos - b sin          b' = a sin + b cos
                A product of q' at t and k' at u depends on q, k and t - u alone, since turning both by the same angle
                changes no product. Values are not turned.

    backward    A rotation is orthogonal, its transpose is the rotation back:
                    da = da' cos + db' sin      db = -da' sin + db' cos
                The bias of qkv was added before the rotation: its gradient is the sum of these rows.

`a.qkv` keeps the turned rows: attention's backward reads them, and so does the cache of generation. wpe begins at 0 and
is frozen; a checkpoint of GPT-2 brings its own.
Source: Su et al., RoFormer (2021).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax.config.model import CAUSAL, Attention, ModelConfig
from llmc_jax.models.execution import Execution
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import BLOCK, PROGRAM
from llmc_jax.models.layout import views
from llmc_jax.ops.linear import bias_backward
from llmc_jax.ops.table import Operations

BASE = 10000.0


def turned(qkv: jax.Array, num_heads: int, spec: Attention, first: Any = 0, sign: int = 1) -> jax.Array:
    """Return packed qkv (B, T, Q) with q and k turned. first: the position of row 0; sign: -1 turns them back."""
    B, T, Q = qkv.shape
    KV = spec.kv_heads or num_heads
    heads = qkv.reshape(B, T, num_heads + 2 * KV, -1).astype(jnp.promote_types(qkv.dtype, jnp.float32))
    half = heads.shape[-1] // 2  # of an odd HS the last channel is left as it is
    a, b, rest = jnp.split(heads[:, :, :-KV], (half, 2 * half), axis=-1)  # (B, T, NH + KV, HS/2) each
    angle = (first + jnp.arange(T))[:, None] * BASE ** (-jnp.arange(half) / half)  # (T, HS/2)
    cos, sin = jnp.cos(angle)[:, None], sign * jnp.sin(angle)[:, None]  # (T, 1, HS/2)
    qk = jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)
    return jnp.concatenate([qk, heads[:, :, -KV:]], axis=2).reshape(B, T, Q).astype(qkv.dtype)


def operations(op: Operations) -> Operations:
    """Return the operations of a run, whose attention turns q and k. Its backward is given them as they are turned.

    how: what attention sees, if it is not GPT-2's.
    """

    def forward(qkv: jax.Array, num_heads: int, **how: Any) -> Any:
        return op.attention_forward(turned(qkv, num_heads, how.get("spec", CAUSAL)), num_heads, **how)

    def backward(dout: jax.Array, qkv: jax.Array, out: jax.Array, att: Any, num_heads: int, **how: Any) -> Any:
        dqkv, _ = op.attention_backward(dout, qkv, out, att, num_heads, **how)
        dqkv = turned(dqkv, num_heads, how.get("spec", CAUSAL), sign=-1)
        return dqkv, bias_backward(dqkv)

    return op._replace(attention_forward=forward, attention_backward=backward)


def forward(x: jax.Array, pending: jax.Array | None, p: Any, shape: ModelConfig, execution: Execution) -> Any:
    """Compute one block (`Block.forward`), and keep qkv as attention reads it."""
    x, pending, a = BLOCK.forward(x, pending, p, shape, execution)
    return x, pending, a._replace(qkv=turned(a.qkv, shape.num_heads, shape.attention))


def step(
    x: jax.Array, pending: jax.Array | None, p: Any, attention: Any, position: jax.Array, shape: ModelConfig, op: Any
) -> Any:
    """Compute one block of one position (`Block.step`)."""

    def of_turned(qkv: jax.Array) -> Any:
        return attention(turned(qkv[:, None], shape.num_heads, shape.attention, position)[:, 0])

    return BLOCK.step(x, pending, p, of_turned, position, shape, op)


def initial(shape: ModelConfig, seed: int) -> np.ndarray:
    """Return GPT-2's random weights (flat_size,) without positions."""
    flat = GPT2.initial(shape, seed)
    views(flat, shape).wpe[:] = 0
    return flat


OWN = PROGRAM._replace(operations=operations, block=BLOCK._replace(forward=forward, step=step))
FAMILY = GPT2._replace(name="rotary", program=lambda: OWN, initial=initial, frozen=lambda shape: ("wpe",))
