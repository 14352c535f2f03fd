"""Causal self-attention of several heads, with the T x T matrix of weights written out.

Per head, with q, k, v of shape (T, HS) and scale = 1/sqrt(HS):

    forward     score[t,u] = scale * sum_h q[t,h] k[u,h]          for u <= t; the future is masked
                att[t,u]   = exp(score[t,u]) / sum_{u'<=t} exp(score[t,u'])
                out[t,h]   = sum_u att[t,u] v[u,h]

    backward    out is linear in att and in v:
                    datt[t,u] = sum_h dout[t,h] v[u,h]            datt = dout v^T
                    dv[u,h]   = sum_t att[t,u] dout[t,h]          dv = att^T dout
                softmax: d att[t,u] / d score[t,w] = att[t,u] (delta_uw - att[t,w]), hence
                    dscore[t,w] = att[t,w] (datt[t,w] - sum_u att[t,u] datt[t,u])
                where att = 0, beyond the diagonal, dscore = 0 as it must be. The sum need not be taken over T columns:
                    sum_u att[t,u] datt[t,u] = sum_h dout[t,h] sum_u att[t,u] v[u,h] = sum_h dout[t,h] out[t,h]
                score is linear in q and in k:
                    dq[t,h] = scale * sum_u dscore[t,u] k[u,h]    dq = scale dscore k
                    dk[u,h] = scale * sum_t dscore[t,u] q[t,h]    dk = scale dscore^T q
"""

import math

import jax
import jax.numpy as jnp


def attention_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, jax.Array]:
    """Causal attention from packed qkv (B, T, 3C): Q | K | V, each split into NH heads of HS channels.

    Returns out (B, T, C) and the attention weights att (B, NH, T, T) in qkv's dtype, which the backward needs.
    The softmax is taken in at least float32. Source: Vaswani et al., Attention Is All You Need (2017);
    llm.c train_gpt2.c, `attention_forward`.
    """
    q, k, v = _split_heads(qkv, num_heads)  # (B, NH, T, HS) each
    T, HS = q.shape[-2:]
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    score = jnp.einsum("bnth,bnuh->bntu", q, k, preferred_element_type=wide) * (1.0 / math.sqrt(HS))
    mask = jnp.arange(T)[:, None] >= jnp.arange(T)  # (T, T) row t sees columns u <= t
    score = jnp.where(mask, score, -jnp.inf)  # (B, NH, T, T)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True))  # the largest exponent is 0: no overflow
    att = (weight / jnp.sum(weight, axis=-1, keepdims=True)).astype(qkv.dtype)  # (B, NH, T, T)
    out = jnp.einsum("bntu,bnuh->bnth", att, v, preferred_element_type=wide)  # (B, NH, T, HS)
    return _merge_heads(out.astype(qkv.dtype)), att


def attention_backward(dout: jax.Array, qkv: jax.Array, out: jax.Array, att: jax.Array) -> jax.Array:
    """Gradient of attention with respect to packed qkv: (B, T, 3C).

    dout (B, T, C); qkv (B, T, 3C); out (B, T, C) and att (B, NH, T, T) as the forward returned them.
    Source: the derivation above; llm.c train_gpt2.c, `attention_backward`; the sum over HS instead of T from Dao et
    al., FlashAttention (2022), appendix B.
    """
    B, T, C = dout.shape
    num_heads = att.shape[1]
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    q, k, v = _split_heads(qkv, num_heads)  # (B, NH, T, HS) each
    by_head = (B, T, num_heads, C // num_heads)
    row_sum = jnp.sum((dout.astype(wide) * out).reshape(by_head), axis=-1)  # (B, T, NH)
    row_sum = row_sum.transpose(0, 2, 1)[..., None]  # (B, NH, T, 1)
    dout = dout.reshape(by_head).transpose(0, 2, 1, 3)  # (B, NH, T, HS)
    scale = 1.0 / math.sqrt(C // num_heads)

    dv = jnp.einsum("bntu,bnth->bnuh", att, dout, preferred_element_type=wide)  # (B, NH, T, HS)
    datt = jnp.einsum("bnth,bnuh->bntu", dout, v, preferred_element_type=wide)  # (B, NH, T, T)
    dscore = (att * (datt - row_sum) * scale).astype(qkv.dtype)  # (B, NH, T, T) with the scale of dq and dk
    dq = jnp.einsum("bntu,bnuh->bnth", dscore, k, preferred_element_type=wide)  # (B, NH, T, HS)
    dk = jnp.einsum("bntu,bnth->bnuh", dscore, q, preferred_element_type=wide)  # (B, NH, T, HS)
    return jnp.concatenate([_merge_heads(d.astype(qkv.dtype)) for d in (dq, dk, dv)], axis=-1)  # (B, T, 3C)


def _split_heads(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packed (B, T, 3C) to q, k, v of (B, NH, T, HS)."""
    B, T, C3 = qkv.shape
    heads = qkv.reshape(B, T, 3, num_heads, C3 // 3 // num_heads).transpose(2, 0, 3, 1, 4)  # (3, B, NH, T, HS)
    return heads[0], heads[1], heads[2]


def _merge_heads(x: jax.Array) -> jax.Array:
    """(B, NH, T, HS) to (B, T, C)."""
    B, NH, T, HS = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)
