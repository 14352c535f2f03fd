"""Causal self-attention of several heads, by softmax or by relu, with the T x T matrix of weights written out.

Leaves out the forms without that matrix (pallas_kernels/attention.py).

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

    relu        att[t,u]   = max(score[t,u], 0)                   for u <= t; 0 beyond; the row is not normalised
                dscore[t,w] = datt[t,w] if score[t,w] > 0 else 0
                Each weight depends on its own score alone: nothing is subtracted, no other weight takes part. out, dv,
                datt, dq and dk are as above. At score = 0, where relu has no derivative, 0 is taken as in jax.nn.relu.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from llmc_jax.ops.linear import bias_backward


def attention_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, jax.Array]:
    """Causal attention from packed qkv (B, T, 3C): Q | K | V, each split into NH heads of HS channels.

    Returns out (B, T, C) and the attention weights att (B, NH, T, T) in qkv's dtype, which the backward needs.
    The softmax is taken in at least float32. Source: Vaswani et al., Attention Is All You Need (2017);
    llm.c train_gpt2.c, `attention_forward`.
    """
    q, k, v = _split_heads(qkv, num_heads)  # (B, NH, T, HS) each
    score, mask = _scores(q, k)
    score = jnp.where(mask, score, -jnp.inf)  # (B, NH, T, T)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True))  # the largest exponent is 0: no overflow
    att = (weight / jnp.sum(weight, axis=-1, keepdims=True)).astype(qkv.dtype)  # (B, NH, T, T)
    return _weighted_sum(att, v), att


def attention_backward(
    dout: jax.Array, qkv: jax.Array, out: jax.Array, att: jax.Array, num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Gradient of attention with respect to packed qkv: dqkv (B, T, 3C), and dbias (3C,), its sum over all rows.

    dout (B, T, C); qkv (B, T, 3C); out (B, T, C) and att (B, NH, T, T) as the forward returned them. dbias is the
    gradient of the bias of the linear layer that made qkv: here because a kernel that has dqkv in registers need not
    read it again.
    Source: the derivation above; llm.c train_gpt2.c, `attention_backward`; the sum over HS instead of T from Dao et
    al., FlashAttention (2022), appendix B.
    """
    B, T, C = dout.shape
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    row_sum = jnp.sum((dout.astype(wide) * out).reshape(B, T, num_heads, C // num_heads), axis=-1)  # (B, T, NH)
    row_sum = row_sum.transpose(0, 2, 1)[..., None]  # (B, NH, T, 1)
    return _backward(dout, qkv, att, lambda datt: att * (datt - row_sum), num_heads)


def attention_by_softmax_forward(
    qkv: jax.Array, num_heads: int, softmax: Callable[[jax.Array, float], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`attention_forward` with another softmax, such as a kernel: softmax(scores (B, NH, T, T), scale) masks them too.

    The scores are rounded to qkv's dtype on their way to it.
    """
    q, k, v = _split_heads(qkv, num_heads)  # (B, NH, T, HS) each
    score = jnp.einsum("bnth,bnuh->bntu", q, k, preferred_element_type=qkv.dtype)  # (B, NH, T, T) not yet scaled
    att = softmax(score, 1.0 / math.sqrt(q.shape[-1]))
    return _weighted_sum(att, v), att


def attention_by_softmax_backward(
    dout: jax.Array,
    qkv: jax.Array,
    out: jax.Array,
    att: jax.Array,
    num_heads: int,
    softmax: Callable[[jax.Array, jax.Array, float], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """`attention_backward` with another softmax's backward: softmax(datt, att, scale) gives dscores."""
    return _backward(dout, qkv, att, lambda datt: softmax(datt.astype(qkv.dtype), att, 1.0), num_heads)


def relu_attention_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, tuple[()]]:
    """Causal attention from packed qkv (B, T, 3C) whose weights are relu(score), not normalised.

    Returns out (B, T, C), and () because the backward needs nothing but qkv: it computes the weights again. Weights are
    rounded to qkv's dtype. out[t] grows with t, since nothing divides by the number of positions seen.
    Source: docs/relu_attention.md.
    """
    _, _, v = _split_heads(qkv, num_heads)  # (B, NH, T, HS)
    return _weighted_sum(relu_attention_weights(qkv, num_heads), v), ()


def relu_attention_weights(qkv: jax.Array, num_heads: int) -> jax.Array:
    """Weights (B, NH, T, T) of relu attention in the dtype of packed qkv (B, T, 3C); 0 beyond the diagonal."""
    q, k, _ = _split_heads(qkv, num_heads)  # (B, NH, T, HS) each
    score, mask = _scores(q, k)
    return jnp.where(mask, jax.nn.relu(score), 0).astype(qkv.dtype)


def relu_attention_backward(
    dout: jax.Array, qkv: jax.Array, out: jax.Array, saved: tuple[()], num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Gradient of relu attention with respect to packed qkv: dqkv (B, T, 3C), and dbias (3C,), its sum over all rows.

    dout (B, T, C); qkv (B, T, 3C); out and saved as the forward returned them, which stand here only because softmax
    attention needs them. Source: the derivation above.
    """
    q, k, _ = _split_heads(qkv, num_heads)  # (B, NH, T, HS) each
    score, mask = _scores(q, k)
    att = jnp.where(mask, jax.nn.relu(score), 0).astype(qkv.dtype)  # (B, NH, T, T)
    return _backward(dout, qkv, att, lambda datt: jnp.where(mask & (score > 0), datt, 0), num_heads)


def attention_step_forward(
    qkv: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array, num_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Causal attention of one position over itself and those before it, whose keys and values are in a cache.

    qkv (B, 3C) is of the position, a scalar below S; keys and values (B NH, S, HS) are of all positions before it, and
    what stands behind it does not matter as long as it is finite: it is taken 0 times. Returns out (B, C) as row
    `position` of `attention_forward` is, and keys and values with the position's own.
    """
    return _step(qkv, keys, values, position, num_heads, _softmax_of_row)


def relu_attention_step_forward(
    qkv: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array, num_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`attention_step_forward` with the weights of `relu_attention_forward`."""
    return _step(qkv, keys, values, position, num_heads, lambda score, mask: jnp.where(mask, jax.nn.relu(score), 0))


def keys_and_values(qkv: jax.Array, num_heads: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the cache (B NH, S, HS) of keys, and that of values, from packed qkv (B, T, 3C): T positions, then zeros.

    size: S, at least T.
    """
    _, k, v = _split_heads(qkv, num_heads)  # (B, NH, T, HS) each
    B, NH, T, HS = k.shape
    behind = ((0, 0), (0, size - T), (0, 0))
    return jnp.pad(k.reshape(B * NH, T, HS), behind), jnp.pad(v.reshape(B * NH, T, HS), behind)


def _softmax_of_row(score: jax.Array, mask: jax.Array) -> jax.Array:
    score = jnp.where(mask, score, -jnp.inf)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True))
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


def _step(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    num_heads: int,
    weights: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One position of attention with any weights: weights(score (B NH, S), mask (S,)), 0 where masked.

    One batch axis of B NH heads, and each product by itself behind a barrier: XLA's CPU compiler reads the cache many
    times slower otherwise (benchmarks/results/generate.md).
    """
    pinned = jax.lax.optimization_barrier
    (BNH, S, HS), wide = keys.shape, jnp.promote_types(qkv.dtype, jnp.float32)
    q, k, v = (x.reshape(BNH, 1, HS) for x in jnp.split(qkv, 3, axis=-1))
    put = jax.lax.dynamic_update_slice_in_dim
    keys, values = pinned((put(keys, k, position, axis=1), put(values, v, position, axis=1)))
    score = pinned(jnp.einsum("nh,nsh->ns", q[:, 0], keys, preferred_element_type=wide)) * (1.0 / math.sqrt(HS))
    att = pinned(weights(score, jnp.arange(S) <= position).astype(qkv.dtype))  # (B NH, S)
    out = jnp.einsum("ns,nsh->nh", att, values, preferred_element_type=wide)  # (B NH, HS)
    return pinned(out.astype(qkv.dtype).reshape(-1, num_heads * HS)), keys, values


def _scores(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scores (B, NH, T, T) in at least float32, and the mask (T, T): row t sees columns u <= t."""
    T, HS = q.shape[-2:]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    score = jnp.einsum("bnth,bnuh->bntu", q, k, preferred_element_type=wide) * (1.0 / math.sqrt(HS))
    return score, jnp.arange(T)[:, None] >= jnp.arange(T)


def _weighted_sum(att: jax.Array, v: jax.Array) -> jax.Array:
    """out (B, T, C) of weights (B, NH, T, T) and v (B, NH, T, HS)."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    out = jnp.einsum("bntu,bnuh->bnth", att, v, preferred_element_type=wide)  # (B, NH, T, HS)
    return _merge_heads(out.astype(v.dtype))


def _backward(
    dout: jax.Array, qkv: jax.Array, att: jax.Array, weights_backward: Callable[[jax.Array], jax.Array], num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """dqkv (B, T, 3C) and dbias (3C,) of any weights att (B, NH, T, T); weights_backward(datt) is the dscore."""
    B, T, C = dout.shape
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    q, k, v = _split_heads(qkv, num_heads)  # (B, NH, T, HS) each
    dout = dout.reshape(B, T, num_heads, C // num_heads).transpose(0, 2, 1, 3)  # (B, NH, T, HS)
    scale = 1.0 / math.sqrt(C // num_heads)

    dv = jnp.einsum("bntu,bnth->bnuh", att, dout, preferred_element_type=wide)  # (B, NH, T, HS)
    datt = jnp.einsum("bnth,bnuh->bntu", dout, v, preferred_element_type=wide)  # (B, NH, T, T)
    dscore = (weights_backward(datt) * scale).astype(qkv.dtype)  # (B, NH, T, T) with the scale of dq and dk
    dq = jnp.einsum("bntu,bnuh->bnth", dscore, k, preferred_element_type=wide)  # (B, NH, T, HS)
    dk = jnp.einsum("bntu,bnth->bnuh", dscore, q, preferred_element_type=wide)  # (B, NH, T, HS)
    dqkv = jnp.concatenate([_merge_heads(d.astype(qkv.dtype)) for d in (dq, dk, dv)], axis=-1)  # (B, T, 3C)
    return dqkv, bias_backward(dqkv)


def _split_heads(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packed (B, T, 3C) to q, k, v of (B, NH, T, HS)."""
    B, T, C3 = qkv.shape
    heads = qkv.reshape(B, T, 3, num_heads, C3 // 3 // num_heads).transpose(2, 0, 3, 1, 4)  # (3, B, NH, T, HS)
    return heads[0], heads[1], heads[2]


def _merge_heads(x: jax.Array) -> jax.Array:
    """(B, NH, T, HS) to (B, T, C)."""
    B, NH, T, HS = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)
