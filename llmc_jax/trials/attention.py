"""Attention's answer without the T x T matrix: `ops/attention.py` by blocks of query rows, with the same signatures."""

import math
from typing import Any

import jax
import jax.numpy as jnp

SCORES = 2**27  # that exist at a time


def attention_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, None]:
    """Causal attention from packed qkv (B, T, 3C), by blocks of query rows: out (B, T, C), and nothing that is kept.

    Computed in at least float32.
    """
    q, k, v = _heads(_wide(qkv), num_heads)
    blocks, starts = _blocks(q)

    def block(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _weights(*rows, k) @ v  # (B, NH, R, HS)

    return _packed(_joined(jax.lax.map(block, (blocks, starts)))).astype(qkv.dtype), None


def attention_backward(
    dout: jax.Array, qkv: jax.Array, _out: jax.Array, _saved: None, num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `attention_forward` for qkv (B, T, 3C), and for the bias before it (3C,)."""
    q, k, v = _heads(_wide(qkv), num_heads)
    B, NH, T, HS = q.shape
    blocks, starts = _blocks(q)
    douts, _ = _blocks(_wide(dout).reshape(B, T, NH, HS).transpose(0, 2, 1, 3))
    scale = 1.0 / math.sqrt(HS)

    def block(sums: tuple[jax.Array, jax.Array], rows: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        q, dout, start = rows
        att = _weights(q, start, k)
        datt = dout @ v.swapaxes(-1, -2)
        dscores = att * (datt - jnp.sum(datt * att, axis=-1, keepdims=True)) * scale
        dk, dv = sums
        return (dk + dscores.swapaxes(-1, -2) @ q, dv + att.swapaxes(-1, -2) @ dout), dscores @ k

    (dk, dv), dq = jax.lax.scan(block, (jnp.zeros_like(k), jnp.zeros_like(v)), (blocks, douts, starts))
    dqkv = jnp.concatenate([_packed(each) for each in (_joined(dq), dk, dv)], axis=-1)
    return dqkv.astype(qkv.dtype), jnp.sum(dqkv, axis=(0, 1)).astype(qkv.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _heads(qkv: jax.Array, num_heads: int) -> list[jax.Array]:
    """q, k, v (B, NH, T, HS) each."""
    B, T, _ = qkv.shape
    return list(qkv.reshape(B, T, 3, num_heads, -1).transpose(2, 0, 3, 1, 4))


def _packed(heads: jax.Array) -> jax.Array:
    """(B, NH, T, HS) as (B, T, C)."""
    B, NH, T, HS = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)


def _blocks(heads: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows in blocks (blocks, B, NH, R, HS), and where each begins: as few as hold SCORES scores at most."""
    B, NH, T, HS = heads.shape
    most = max(1, SCORES // (B * NH * T))
    R = max(rows for rows in range(1, min(T, most) + 1) if T % rows == 0)
    return heads.reshape(B, NH, T // R, R, HS).transpose(2, 0, 1, 3, 4), jnp.arange(0, T, R)


def _joined(blocks: jax.Array) -> jax.Array:
    count, B, NH, R, HS = blocks.shape
    return blocks.transpose(1, 2, 0, 3, 4).reshape(B, NH, count * R, HS)


def _weights(q: jax.Array, start: jax.Array, k: jax.Array) -> jax.Array:
    """The attention weights of the rows from `start` on: (B, NH, R, T)."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    rows, columns = start + jnp.arange(q.shape[-2])[:, None], jnp.arange(k.shape[-2])
    return jax.nn.softmax(jnp.where(columns <= rows, scores, -jnp.inf), axis=-1)
