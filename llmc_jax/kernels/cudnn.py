"""Attention by cuDNN, with the signatures of ops/attention.py."""

from typing import Any

import jax

from llmc_jax.ops.linear import bias_backward


def attention_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, Any]:
    """Return causal attention by cuDNN of packed qkv (B, T, 3C): out (B, T, C), and its own means for the backward."""
    B, T, C3 = qkv.shape

    def attend(qkv: jax.Array) -> jax.Array:
        q, k, v = (qkv.reshape(B, T, 3, num_heads, -1)[:, :, i] for i in range(3))  # (B, T, NH, HS) each
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.reshape(B, T, C3 // 3)

    return jax.vjp(attend, qkv)


def attention_backward(
    dout: jax.Array, _qkv: jax.Array, _out: jax.Array, saved: Any, _num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of `attention_forward` for packed qkv (B, T, 3C), and its sum over all rows (3C,)."""
    (dqkv,) = saved(dout)
    return dqkv, bias_backward(dqkv)
