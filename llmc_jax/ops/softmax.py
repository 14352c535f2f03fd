"""Causal softmax of attention scores: row t sees columns u <= t.

forward     att[t,u] = exp(scale score[t,u]) / sum_{u'<=t} exp(scale score[t,u'])      for u <= t, and 0 beyond
            Numerator and denominator may be multiplied by the same number: with exp(-max_t) the largest exponent of a
            row is 0 and nothing overflows.

backward    in one row, with s_u = scale score_u and Z = sum_u exp(s_u), att_u = exp(s_u) / Z. s_w enters att_u
            directly where u = w, and through Z everywhere:
                d att_u / d s_w = delta_uw att_u - exp(s_u) / Z^2 exp(s_w) = att_u (delta_uw - att_w)
            Multiplied by datt_u and summed over u:
                ds_w = att_w datt_w - att_w sum_u att_u datt_u = att_w (datt_w - sum_u att_u datt_u)
            and score enters s by the factor scale:
                dscore[t,w] = scale att[t,w] (datt[t,w] - sum_{u<=t} att[t,u] datt[t,u])
            Beyond the diagonal att = 0, so dscore = 0: what datt has there does not count.
"""

import jax
import jax.numpy as jnp


def softmax_forward(scores: jax.Array, scale: float) -> jax.Array:
    """Softmax over the visible part of each row of scale * scores (..., T, T): att, of the same shape and dtype.

    Computed in at least float32; zeros beyond the diagonal. What scores has there does not count.
    Source: the formula above; llm.c train_gpt2.c, `attention_forward`.
    """
    scaled = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) * scale  # (..., T, T)
    scaled = jnp.where(_visible(scores.shape[-1]), scaled, -jnp.inf)
    weight = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    return (weight / jnp.sum(weight, axis=-1, keepdims=True)).astype(scores.dtype)


def softmax_backward(datt: jax.Array, att: jax.Array, scale: float) -> jax.Array:
    """Gradient of `softmax_forward`: dscores (..., T, T) in att's dtype, zero beyond the diagonal.

    datt and att (..., T, T). Computed in at least float32.
    Source: the derivation above; llm.c train_gpt2.c, `attention_backward`.
    """
    wide = jnp.promote_types(att.dtype, jnp.float32)
    visible = _visible(att.shape[-1])
    datt = jnp.where(visible, datt.astype(wide), 0.0)
    weight = jnp.where(visible, att.astype(wide), 0.0)
    row_sum = jnp.sum(weight * datt, axis=-1, keepdims=True)  # (..., T, 1)
    return (scale * weight * (datt - row_sum)).astype(att.dtype)


def _visible(T: int) -> jax.Array:
    """(T, T): whether row t sees column u."""
    return jnp.arange(T)[:, None] >= jnp.arange(T)
