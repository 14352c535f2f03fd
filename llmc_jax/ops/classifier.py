"""The classifier: softmax over the vocabulary and cross-entropy, fused.

    forward     logsumexp = log sum_{v<V} exp(logit[v])
                loss      = logsumexp - logit[target]           = -log softmax(logit)[target]

    backward    d logsumexp / d logit[v] = exp(logit[v] - logsumexp) = prob[v], so
                    dlogit[v] = dloss * (prob[v] - [v = target])    for v < V
                    dlogit[v] = 0                                   for the padding V <= v < Vp

The gradient of a mean is known before its losses are, so `classifier` does both at one place: on a GPU in one kernel
that writes dlogits over the logits (pallas_kernels/classifier.py).

Only the V real columns take part: the padded ones get no probability and no gradient, so wte's padded rows stay zero.
"""

from functools import partial

import jax
import jax.numpy as jnp


def classifier_forward(logits: jax.Array, targets: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of logits (B, T, Vp) at targets (B, T) int32, over the first vocab_size columns.

    Returns losses (B, T) in nats and logsumexp (B, T), both in at least float32; the backward needs the latter.
    Source: llm.c train_gpt2.c, `softmax_forward` and `crossentropy_forward`.
    """
    wide = _without_padding(logits, vocab_size)  # (B, T, Vp)
    largest = jnp.max(wide, axis=-1)  # (B, T)
    weight = jnp.exp(wide - largest[..., None])  # (B, T, Vp)
    total = jax.lax.platform_dependent(weight, cpu=_sum_by_product, default=lambda x: jnp.sum(x, axis=-1))  # (B, T)
    logsumexp = largest + jnp.log(total)
    picked = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]  # (B, T)
    return logsumexp - picked, logsumexp


def classifier_backward(
    dlosses: jax.Array, logits: jax.Array, targets: jax.Array, logsumexp: jax.Array, vocab_size: int
) -> jax.Array:
    """Gradient of the losses with respect to the logits: (B, T, Vp), zero in the padded columns.

    dlosses (B, T) the gradient that reaches each position's loss: 1/(B T) for their mean.
    Source: the derivation above; llm.c train_gpt2.c, `crossentropy_softmax_backward`.
    """
    wide = _without_padding(logits, vocab_size)  # (B, T, Vp) the forward's own: XLA computes it once
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    prob = jnp.exp(wide - logsumexp[..., None])  # (B, T, Vp)
    dlogits = dlosses[..., None] * (prob - (column == targets[..., None]))  # (B, T, Vp)
    return dlogits.astype(logits.dtype)


def classifier(
    logits: jax.Array, targets: jax.Array, dlosses: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Losses and the gradient of the logits at once, for training: the logits are not needed after it.

    logits (n, Vp); targets (n,) int32; dlosses (n,) the gradient that will reach each row's loss, known beforehand:
    1/n for their mean. Returns losses (n,) in nats, in at least float32, and dlogits (n, Vp) in logits' dtype, zero in
    the padded columns. Source: llm.c llmc/fused_classifier.cuh, `fused_classifier`.
    """

    def with_two_exps(logits: jax.Array, targets: jax.Array, dlosses: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, logsumexp = classifier_forward(logits, targets, vocab_size)
        return losses, classifier_backward(dlosses, logits, targets, logsumexp, vocab_size)

    with_one_exp = partial(_with_one_exp, vocab_size=vocab_size)
    return jax.lax.platform_dependent(logits, targets, dlosses, cpu=with_one_exp, default=with_two_exps)


def _with_one_exp(
    logits: jax.Array, targets: jax.Array, dlosses: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """`classifier` where an exp takes longer than reading a number: prob = weight / total, as the forward has them."""
    pinned = jax.lax.optimization_barrier  # else XLA computes the exps wherever they are used
    wide = _without_padding(logits, vocab_size)  # (n, Vp)
    largest = pinned(jnp.max(wide, axis=-1))  # (n,)
    weight = pinned(jnp.exp(wide - largest[..., None]))  # (n, Vp)
    total = _sum_by_product(weight)  # (n,)
    picked = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]  # (n,)
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    dlogits = weight * (dlosses / total)[..., None] - jnp.where(column == targets[..., None], dlosses[..., None], 0.0)
    return largest + jnp.log(total) - picked, dlogits.astype(logits.dtype)


def _sum_by_product(weight: jax.Array) -> jax.Array:
    """Sum over the last axis as a product with ones: XLA's CPU code for the sum of an exp takes ten times as long."""
    ones = jnp.ones(weight.shape[-1], weight.dtype)
    return jnp.matmul(weight, ones, precision=jax.lax.Precision.HIGHEST)


def _without_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits (..., Vp) in at least float32, with -inf, whose exp is 0, in the columns from vocab_size on."""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < vocab_size, logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), -jnp.inf)
