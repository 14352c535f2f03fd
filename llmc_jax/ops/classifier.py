"""The classifier: softmax over the vocabulary and cross-entropy, fused.

    forward     logsumexp = log sum_{v<V} exp(logit[v])
                loss      = logsumexp - logit[target]           = -log softmax(logit)[target]

    backward    d logsumexp / d logit[v] = exp(logit[v] - logsumexp) = prob[v], so
                    dlogit[v] = dloss * (prob[v] - [v = target])    for v < V
                    dlogit[v] = 0                                   for the padding V <= v < Vp

Only the V real columns take part: the padded ones get no probability and no gradient, so wte's padded rows stay zero.
"""

import jax
import jax.numpy as jnp


def classifier_forward(logits: jax.Array, targets: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of logits (B, T, Vp) at targets (B, T) int32, over the first vocab_size columns.

    Returns losses (B, T) in nats and logsumexp (B, T), both in at least float32; the backward needs the latter.
    Source: llm.c train_gpt2.c, `softmax_forward` and `crossentropy_forward`.
    """
    wide = _mask_padding(logits, vocab_size, -jnp.inf)  # (B, T, Vp)
    largest = jnp.max(wide, axis=-1)  # (B, T)
    logsumexp = largest + jnp.log(jnp.sum(jnp.exp(wide - largest[..., None]), axis=-1))  # (B, T)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]  # (B, T)
    return logsumexp - picked.astype(wide.dtype), logsumexp


def classifier_backward(
    dlosses: jax.Array, logits: jax.Array, targets: jax.Array, logsumexp: jax.Array, vocab_size: int
) -> jax.Array:
    """Gradient of the losses with respect to the logits: (B, T, Vp), zero in the padded columns.

    dlosses (B, T) the gradient that reaches each position's loss: 1/(B T) for their mean.
    Source: the derivation above; llm.c train_gpt2.c, `crossentropy_softmax_backward`.
    """
    wide = logits.astype(logsumexp.dtype)
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    prob = jnp.exp(wide - logsumexp[..., None])  # (B, T, Vp)
    dlogits = dlosses[..., None] * (prob - (column == targets[..., None]))  # (B, T, Vp)
    return jnp.where(column < vocab_size, dlogits, 0).astype(logits.dtype)


def _mask_padding(logits: jax.Array, vocab_size: int, value: float) -> jax.Array:
    """Logits (..., Vp) in at least float32, with `value` in the columns from vocab_size on."""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < vocab_size, logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), value)
