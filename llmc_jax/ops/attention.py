"""Self-attention of several heads with the T x T matrix of weights written out, as a model's `Attention` has it.

Leaves out the forms without that matrix (pallas_kernels/attention.py), which compute what GPT-2 does, or relu's.

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

What else an `Attention` may be, each a change of one line above:

    visible     row t sees the keys from k_start[t] up to k_end[t], not those u <= t: a window, a prefix, a document
    relu        att[t,u]   = max(score[t,u], 0); the row is not normalised
                dscore[t,w] = datt[t,w] if score[t,w] > 0 else 0
                Each weight depends on its own score alone: nothing is subtracted, no other weight takes part. At
                score = 0, where relu has no derivative, 0 is taken as in jax.nn.relu.
    softcap     score'     = c tanh(score / c)
                dscore     = dscore' (1 - (score' / c)^2)
    bias        score'     = score + b[t,u], which depends on no tensor; dscore = dscore'
    kv heads    head n reads the keys and values of head n // (NH / KV), whose gradients are sums over those n
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import CAUSAL, Attention
from llmc_jax.ops.linear import bias_backward

# ----- what a row sees ------------------------------------------------------------------------------------------------


def visible(
    spec: Attention, rows: jax.Array, keys: int, starts: jax.Array | None = None
) -> tuple[jax.Array | int, jax.Array | int]:
    """Return the interval of keys that each row sees, [k_start, k_end): numbers, or int32 of the shape of rows.

    rows: positions, int32; of starts (B, R), with a first axis of 1. keys: how many there are. starts: where the
    document of each row begins.
    """
    window = spec.window or keys
    first, end = (rows, keys) if spec.mask == "reversed" else (0, keys if spec.mask == "none" else rows + 1)
    if spec.window:
        first = rows if spec.mask == "reversed" else jnp.maximum(rows - window + 1, 0)
        end = end if spec.mask == "causal" else jnp.minimum(rows + window, keys)
    if spec.prefix:
        end = jnp.maximum(end, spec.prefix)
    return (first if starts is None else jnp.maximum(first, starts)), end


def document_starts(tokens: jax.Array, separator: int) -> jax.Array:
    """Return where the document of each row begins, (B, T) int32: at the last separator at or before it, or at 0."""
    position = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(tokens == separator, position, 0), axis=tokens.ndim - 1)


def bias_of(spec: Attention, num_heads: int, rows: jax.Array, keys: int, dtype: Any) -> jax.Array | None:
    """Return what is added to the scores of rows (R,), (NH, R, keys) in a dtype; None: nothing.

    ALiBi's slopes are 2^(-8 h / NH) of head h = 1 to NH. Source: Press et al., Train Short, Test Long (2022).
    """
    if not spec.bias:
        return None
    slopes = 2 ** (-8 / num_heads * jnp.arange(1, num_heads + 1, dtype=dtype))
    return -slopes[:, None, None] * jnp.abs(rows[:, None] - jnp.arange(keys))


# ----- all positions --------------------------------------------------------------------------------------------------


def attention_forward(
    qkv: jax.Array, num_heads: int, spec: Attention = CAUSAL, starts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention from packed qkv (B, T, Q): the NH heads of Q, then the KV of K and of V, of HS channels each.

    Returns out (B, T, C) and the attention weights att (B, NH, T, T) in qkv's dtype, which the backward needs. starts
    (B, T) int32: where the document of each row begins, if rows see no other. The softmax is taken in at least
    float32. Source: Vaswani et al., Attention Is All You Need (2017); llm.c train_gpt2.c, `attention_forward`.
    """
    q, k, v = _split_heads(qkv, num_heads, spec)  # (B, NH, T, HS) each
    att = _weights(q, k, spec, starts)
    return _weighted_sum(att, v), att


def attention_weights(
    qkv: jax.Array, num_heads: int, spec: Attention = CAUSAL, starts: jax.Array | None = None
) -> jax.Array:
    """Weights (B, NH, T, T) of `attention_forward` alone, in qkv's dtype."""
    q, k, _ = _split_heads(qkv, num_heads, spec)
    return _weights(q, k, spec, starts)


def attention_backward(
    dout: jax.Array,
    qkv: jax.Array,
    out: jax.Array,
    att: jax.Array,
    num_heads: int,
    spec: Attention = CAUSAL,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gradient of attention with respect to packed qkv: dqkv (B, T, Q), and dbias (Q,), its sum over all rows.

    dout (B, T, C); qkv (B, T, Q); out (B, T, C) and att (B, NH, T, T) as the forward returned them. dbias is the
    gradient of the bias of the linear layer that made qkv: here because a kernel that has dqkv in registers need not
    read it again.
    Source: the derivation above; llm.c train_gpt2.c, `attention_backward`; the sum over HS instead of T from Dao et
    al., FlashAttention (2022), appendix B.
    """
    B, T, C = dout.shape
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    row_sum: Any = 0
    if spec.weights == "softmax":
        row_sum = jnp.sum((dout.astype(wide) * out).reshape(B, T, num_heads, C // num_heads), axis=-1)  # (B, T, NH)
        row_sum = row_sum.transpose(0, 2, 1)[..., None]  # (B, NH, T, 1)

    def weights_backward(datt: jax.Array) -> jax.Array:
        dscore = jnp.where(att > 0, datt, 0) if spec.weights == "relu" else att * (datt - row_sum)
        if spec.softcap:
            q, k, _ = _split_heads(qkv, num_heads, spec)
            dscore *= 1 - jnp.tanh(_products(q, k, spec) / spec.softcap) ** 2
        return dscore

    return _backward(dout, qkv, att, weights_backward, num_heads, spec)


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


# ----- one position -----------------------------------------------------------------------------------------------


def attention_step_forward(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    num_heads: int,
    spec: Attention = CAUSAL,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one position over itself and those before it, whose keys and values are in a cache.

    qkv (B, Q) is of the position, a scalar below S; keys and values (B KV, S, HS) are of all positions before it, and
    what stands behind it does not matter as long as it is finite: it is taken 0 times. starts (B,): as in
    `attention_forward`. Returns out (B, C) as row `position` of `attention_forward` is, and keys and values with the
    position's own.

    One batch axis of B NH heads, and each product by itself behind a barrier: XLA's CPU compiler reads the cache many
    times slower otherwise (benchmarks/results/generate.md).
    """
    pinned = jax.lax.optimization_barrier
    (rows, S, HS), B, wide = keys.shape, len(qkv), jnp.promote_types(qkv.dtype, jnp.float32)
    group = num_heads * B // rows  # heads that read the same keys
    each = (num_heads * HS, num_heads * HS + rows // B * HS)
    q, k, v = (x.reshape(-1, 1, HS) for x in jnp.split(qkv, each, axis=-1))
    put = jax.lax.dynamic_update_slice_in_dim
    keys, values = pinned((put(keys, k, position, axis=1), put(values, v, position, axis=1)))
    shared, own = (jnp.repeat(x, group, axis=0) if group > 1 else x for x in (keys, values))
    score = pinned(jnp.einsum("nh,nsh->ns", q[:, 0], shared, preferred_element_type=wide)) * scale_of(spec, HS)
    if spec.softcap:
        score = spec.softcap * jnp.tanh(score / spec.softcap)
    if (bias := bias_of(spec, num_heads, position[None], S, wide)) is not None:
        score = score + jnp.tile(bias[:, 0], (B, 1))
    own_starts = None if starts is None else jnp.repeat(starts, num_heads)[:, None]  # (B NH, 1)
    first, end = visible(spec, position, S, own_starts)
    column = jnp.arange(S)
    mask = column < end if isinstance(first, int) else (column >= first) & (column < end)  # (S,), or (B NH, S)
    weights = jnp.where(mask, jax.nn.relu(score), 0) if spec.weights == "relu" else _softmax_of_row(score, mask)
    att = pinned(weights.astype(qkv.dtype))  # (B NH, S)
    out = jnp.einsum("ns,nsh->nh", att, own, preferred_element_type=wide)  # (B NH, HS)
    return pinned(out.astype(qkv.dtype).reshape(-1, num_heads * HS)), keys, values


def keys_and_values(qkv: jax.Array, num_heads: int, size: int, spec: Attention = CAUSAL) -> tuple[jax.Array, jax.Array]:
    """Return the cache (B KV, S, HS) of keys, and that of values, from packed qkv (B, T, Q): T positions, then zeros.

    size: S, at least T.
    """
    _, k, v = _packed_heads(qkv, num_heads, spec)  # (B, KV, T, HS) each
    B, KV, T, HS = k.shape
    behind = ((0, 0), (0, size - T), (0, 0))
    return jnp.pad(k.reshape(B * KV, T, HS), behind), jnp.pad(v.reshape(B * KV, T, HS), behind)


# ----- parts ----------------------------------------------------------------------------------------------------------


def _softmax_of_row(score: jax.Array, mask: jax.Array) -> jax.Array:
    score = jnp.where(mask, score, -jnp.inf)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True))
    return weight / jnp.sum(weight, axis=-1, keepdims=True)


def scale_of(spec: Attention, head_size: int) -> float:
    """Return what scores are multiplied by."""
    return spec.scale or 1.0 / math.sqrt(head_size)


def _products(q: jax.Array, k: jax.Array, spec: Attention) -> jax.Array:
    """Scaled products (B, NH, T, T) of queries and keys in at least float32."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("bnth,bnuh->bntu", q, k, preferred_element_type=wide) * scale_of(spec, q.shape[-1])


def _weights(q: jax.Array, k: jax.Array, spec: Attention, starts: jax.Array | None) -> jax.Array:
    """Weights (B, NH, T, T) in q's dtype; 0 where a row does not see."""
    NH, T = q.shape[1:3]
    score = _products(q, k, spec)
    if spec.softcap:
        score = spec.softcap * jnp.tanh(score / spec.softcap)
    if (bias := bias_of(spec, NH, jnp.arange(T), T, score.dtype)) is not None:
        score = score + bias
    mask = seen(spec, T, starts)
    if spec.weights == "relu":
        return jnp.where(mask, jax.nn.relu(score), 0).astype(q.dtype)
    return _softmax_of_row(score, mask).astype(q.dtype)


def seen(spec: Attention, T: int, starts: jax.Array | None = None) -> jax.Array:
    """Return which keys each row sees, boolean (T, T); with starts (B, T), (B, 1, T, T)."""
    if starts is None and spec[1:4] == CAUSAL[1:4]:
        return jnp.arange(T)[:, None] >= jnp.arange(T)
    column = jnp.arange(T)
    rows = column if starts is None else jnp.broadcast_to(column, starts.shape)
    first, end = (jnp.broadcast_to(each, rows.shape)[..., None] for each in visible(spec, rows, T, starts))
    mask = (column >= first) & (column < end)  # (T, T) or (B, T, T)
    return mask if starts is None else mask[:, None]


def _weighted_sum(att: jax.Array, v: jax.Array) -> jax.Array:
    """out (B, T, C) of weights (B, NH, T, T) and v (B, NH, T, HS)."""
    return _merge_heads(jnp.einsum("bntu,bnuh->bnth", att, v, preferred_element_type=v.dtype))  # of (B, NH, T, HS)


def _sum_over_rows(weights: jax.Array, rows: jax.Array, dtype: Any) -> jax.Array:
    """Sums (B, NH, T, HS) in a dtype, for each key over the rows (B, NH, T, HS), of weights (B, NH, T, T)."""

    def transposed(weights: jax.Array, rows: jax.Array) -> jax.Array:
        rows = jax.lax.optimization_barrier(rows.swapaxes(2, 3))  # (B, NH, HS, T)
        return jnp.einsum("bnht,bntu->bnhu", rows, weights, preferred_element_type=dtype).swapaxes(2, 3)

    def direct(weights: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.einsum("bntu,bnth->bnuh", weights, rows, preferred_element_type=dtype)

    # A CPU's libraries are slow where the left factor is transposed. Transposing rows first pays where it is smaller.
    T, HS = rows.shape[2:]
    return jax.lax.platform_dependent(weights, rows, cpu=transposed if T > HS else direct, default=direct)


def _backward(
    dout: jax.Array,
    qkv: jax.Array,
    att: jax.Array,
    weights_backward: Callable[[jax.Array], jax.Array],
    num_heads: int,
    spec: Attention = CAUSAL,
) -> tuple[jax.Array, jax.Array]:
    """dqkv (B, T, Q) and dbias (Q,) of any weights att (B, NH, T, T); weights_backward(datt) is the dscore."""
    B, T, C = dout.shape
    wide = jnp.promote_types(qkv.dtype, jnp.float32)
    q, k, v = _split_heads(qkv, num_heads, spec)  # (B, NH, T, HS) each
    dout = dout.reshape(B, T, num_heads, C // num_heads).transpose(0, 2, 1, 3)  # (B, NH, T, HS)
    scale = scale_of(spec, C // num_heads)

    dtype = wide if spec.kv_heads else qkv.dtype  # of what is not added to any more
    dv = _sum_over_rows(att, dout, dtype)  # (B, NH, T, HS)
    datt = jnp.einsum("bnth,bnuh->bntu", dout, v, preferred_element_type=wide)  # (B, NH, T, T)
    dscore = (weights_backward(datt) * scale).astype(qkv.dtype)  # (B, NH, T, T) with the scale of dq and dk
    dq = jnp.einsum("bntu,bnuh->bnth", dscore, k, preferred_element_type=qkv.dtype)  # (B, NH, T, HS)
    dk = _sum_over_rows(dscore, q, dtype)  # (B, NH, T, HS)
    if spec.kv_heads:  # of the heads that read the same keys
        dk, dv = (d.reshape(B, spec.kv_heads, -1, T, d.shape[-1]).sum(axis=2) for d in (dk, dv))  # (B, KV, T, HS)
    dqkv = jnp.concatenate([_merge_heads(d.astype(qkv.dtype)) for d in (dq, dk, dv)], axis=-1)  # (B, T, Q)
    return dqkv, bias_backward(dqkv)


def _split_heads(qkv: jax.Array, num_heads: int, spec: Attention = CAUSAL) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packed (B, T, Q) to q, k, v of (B, NH, T, HS): keys and values once for each head that reads them."""
    q, k, v = _packed_heads(qkv, num_heads, spec)
    if not spec.kv_heads:
        return q, k, v
    k, v = (jnp.repeat(x, num_heads // spec.kv_heads, axis=1) for x in (k, v))
    return q, k, v


def _packed_heads(qkv: jax.Array, num_heads: int, spec: Attention) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packed (B, T, Q) to q (B, NH, T, HS), and k and v (B, KV, T, HS)."""
    B, T, Q = qkv.shape
    KV = spec.kv_heads or num_heads
    if num_heads == KV:
        heads = qkv.reshape(B, T, 3, num_heads, Q // 3 // num_heads).transpose(2, 0, 3, 1, 4)  # (3, B, NH, T, HS)
        return heads[0], heads[1], heads[2]
    heads = qkv.reshape(B, T, num_heads + 2 * KV, -1).transpose(0, 2, 1, 3)  # (B, NH + 2 KV, T, HS)
    return heads[:, :num_heads], heads[:, num_heads : num_heads + KV], heads[:, num_heads + KV :]


def _merge_heads(x: jax.Array) -> jax.Array:
    """(B, NH, T, HS) to (B, T, C)."""
    B, NH, T, HS = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, NH * HS)
