"""Attention's answer without the T x T matrix: `ops/attention.py` by blocks of query rows, with the same signatures."""

import math

import jax
import jax.numpy as jnp

SCORES = 2**27  # that exist at a time


def attention_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, None]:
    """Compute causal attention from packed qkv (B, T, 3C), by blocks of query rows, in at least float32.

    Returns out (B, T, C), and nothing that is kept.
    """
    return _attended(_wide(qkv), num_heads).astype(qkv.dtype), None


def attention_backward(
    dout: jax.Array, qkv: jax.Array, _out: jax.Array, _saved: None, num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `attention_forward` for qkv (B, T, 3C), and for the bias before it (3C,)."""
    _, pulled_back = jax.vjp(lambda qkv: _attended(qkv, num_heads), _wide(qkv))
    (dqkv,) = pulled_back(_wide(dout))
    return dqkv.astype(qkv.dtype), jnp.sum(dqkv, axis=(0, 1)).astype(qkv.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _attended(qkv: jax.Array, num_heads: int) -> jax.Array:
    """Return out (B, T, C), computed in as few blocks of rows as hold SCORES scores at most."""
    B, T, C3 = qkv.shape
    q, k, v = qkv.reshape(B, T, 3, num_heads, -1).transpose(2, 0, 3, 1, 4)  # (B, NH, T, HS) each
    HS = q.shape[-1]
    most = max(1, SCORES // (B * num_heads * T))
    R = max(rows for rows in range(1, min(T, most) + 1) if T % rows == 0)

    @jax.checkpoint  # the backward computes a block's weights again
    def block(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, start = rows
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(HS)
        past = jnp.arange(T) <= start + jnp.arange(R)[:, None]
        return jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1) @ v  # (B, NH, R, HS)

    blocks = q.reshape(B, num_heads, T // R, R, HS).transpose(2, 0, 1, 3, 4)
    out = jax.lax.map(block, (blocks, jnp.arange(0, T, R)))  # (blocks, B, NH, R, HS)
    return out.transpose(1, 0, 3, 2, 4).reshape(B, T, C3 // 3)
