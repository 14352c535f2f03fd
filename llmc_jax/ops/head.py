"""The output head: the product with wte, the classifier, and the gradients of both, a chunk of rows at a time.

The logits are the largest array of a training step: B T Vp elements, 6.6 GB in bf16 at B=64 T=1024 for GPT-2. Nothing
but the loss and the gradients of lnf and wte is needed of them, and each of these is a sum over rows or has one row for
each row of logits. So rows are taken in chunks:

    forward     logits = lnf wte^T                          of the chunk's rows
                losses and dlogits from the classifier, one over the other
    backward    dlnf   = dlogits wte                        the chunk's rows of dlnf
                dwte  += dlogits^T lnf                      summed over the chunks in at least float32

and the logits of the whole batch never exist. With one chunk this is llm.c's order of things.

Where a product can take exponentials as it ends (`Weights`), there is no classifier: z[k], the target's logit, is known
before the product, which then leaves e[v] = exp(z[v] - base) in the logits' place, 0 for v = k, and total = sum_v e[v].
base is z[k], and the largest other logit of a row whose exponentials could overflow.

    forward     S = total + exp(z[k] - base);  loss = log S + base - z[k]
    backward    dlnf  = dloss / S (e wte - total wte[k])
                dwte += e^T (dloss / S lnf), and for each row  dwte[k] -= dloss / S total lnf

Nothing here is a difference of nearly equal numbers, as prob - 1 is where a model is sure: docs/derivations/head.md.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from llmc_jax.ops.linear import linear_backward, linear_forward

# classifier(logits (n, Vp), targets (n,), dlosses (n,), V) -> losses (n,), dlogits (n, Vp)
Classifier = Callable[[jax.Array, jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]
# classifier_forward(logits (n, Vp), targets (n,), V) -> losses (n,), logsumexp (n,)
ClassifierForward = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]
# weights(lnf (n, C), wte (Vp, C), targets (n,), picked (n,), V, keep) -> e (n, Vp), total (n,), base (n,), as
# `head_weights`
Weights = Callable[..., tuple[jax.Array | None, jax.Array, jax.Array]]
# add(dout (1, n, C), tokens (1, n), dwte (Vp, C)) -> dwte with each row added at its token, and a sum (n, C)
AddRows = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]

# The largest total for which base is the target's logit: a loss of 44 nats. exp(88.7) would overflow; up to here
# 1 / (S B T) keeps all its digits in bfloat16 as well.
LARGEST = 2.0**64


def rows_per_chunk(rows: int, limit: int) -> int:
    """Return the largest divisor of `rows` that is at most `limit`; all rows for 0 or a limit beyond them."""
    if limit <= 0 or limit >= rows:
        return rows
    return next(size for size in range(limit, 0, -1) if rows % size == 0)


def head_losses(
    lnf: jax.Array,
    wte: jax.Array,
    targets: jax.Array,
    vocab_size: int,
    forward: ClassifierForward,
    limit: int = 0,
    weights: Weights | None = None,
) -> jax.Array:
    """Cross-entropy (n,) in nats of targets (n,) given lnf (n, C) and wte (Vp, C); at most `limit` rows at a time.

    weights: computes sums of exponentials in the product, and no logits are ever in memory.
    """
    if weights is not None:
        with jax.named_scope("classifier"):
            picked = picked_logits(lnf, wte, targets)  # (n,)
        with jax.named_scope("head"):
            _, total, base = weights(lnf, wte, targets, picked, vocab_size, keep=False)  # (n,) each
        with jax.named_scope("classifier"):
            return _losses(total, base, picked)[0]
    size = rows_per_chunk(lnf.shape[0], limit)

    def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, targets = chunk  # (size, C), (size,)
        with jax.named_scope("head"):
            logits = linear_forward(rows, wte, None)  # (size, Vp)
        with jax.named_scope("classifier"):
            return forward(logits, targets, vocab_size)[0]

    if size == lnf.shape[0]:
        return of_chunk((lnf, targets))
    return jax.lax.map(of_chunk, (lnf.reshape(-1, size, lnf.shape[-1]), targets.reshape(-1, size))).reshape(-1)


def head_gradients(
    lnf: jax.Array,
    wte: jax.Array,
    targets: jax.Array,
    dlosses: jax.Array,
    vocab_size: int,
    classifier: Classifier,
    limit: int = 0,
    weights: Weights | None = None,
    add_rows: AddRows | None = None,
    rounded: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses (n,) in nats, and the gradients dlnf (n, C) and dwte (Vp, C) that dlosses (n,) give.

    lnf (n, C), wte (Vp, C), targets (n,) int32. dlnf has lnf's dtype, dwte is in at least float32. At most `limit` rows
    of logits exist at a time (0: all of them). weights: computes their exponentials instead, and add_rows, the
    embedding's backward, adds to dwte what belongs to the targets. rounded: each product of dwte is rounded to lnf's
    dtype before more is added, for a library that is fast in no other.
    Source: llm.c train_gpt2.cu, `gpt2_backward_and_reduce`; docs/derivations/head.md.
    """
    rows, C = lnf.shape
    size = rows_per_chunk(rows, limit)
    wide = jnp.promote_types(lnf.dtype, jnp.float32)

    def of_chunk(lnf: jax.Array, targets: jax.Array, dlosses: jax.Array) -> tuple[jax.Array, ...]:
        if weights is not None:
            return _by_weights(lnf, wte, targets, dlosses, vocab_size, weights)
        with jax.named_scope("head"):
            logits = linear_forward(lnf, wte, None)  # (size, Vp)
        with jax.named_scope("classifier"):
            losses, dlogits = classifier(logits, targets, dlosses, vocab_size)  # (size,), (size, Vp)
        with jax.named_scope("backward"), jax.named_scope("head"):
            dlnf, dwte = linear_backward(dlogits, lnf, wte, dw_dtype=lnf.dtype if rounded else wide)
        return dwte.astype(wide), losses, dlnf

    if size == rows:
        dwte, *of_rows = of_chunk(lnf, targets, dlosses)
    else:

        def add(dwte: jax.Array, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            share, *of_rows = of_chunk(*chunk)
            return dwte + share, of_rows

        chunks = (lnf.reshape(-1, size, C), targets.reshape(-1, size), dlosses.reshape(-1, size))
        dwte, of_rows = jax.lax.scan(add, jnp.zeros(wte.shape, wide), chunks)
    losses, dlnf, *of_targets = of_rows
    if of_targets:
        assert add_rows is not None
        with jax.named_scope("backward"), jax.named_scope("classifier"):
            taken = -of_targets[0].reshape(rows, 1) * lnf.astype(wide)  # (n, C)
            dwte, _ = add_rows(taken[None], targets[None], dwte)
    return losses.reshape(rows), dlnf.reshape(rows, C), dwte


# ----- without a classifier ----------------------------------------------------------------------------------------


def picked_logits(lnf: jax.Array, wte: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the logits (n,) of targets (n,), in at least float32."""
    wide = jnp.promote_types(lnf.dtype, jnp.float32)
    return jnp.sum(lnf.astype(wide) * wte[targets].astype(wide), axis=-1)


def head_weights(
    lnf: jax.Array, wte: jax.Array, targets: jax.Array, picked: jax.Array, vocab_size: int, keep: bool = True
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Return e (n, Vp) = exp(logits - base) in lnf's dtype, 0 at targets (n,) and in the padding, its sums, and base.

    lnf (n, C), wte (Vp, C); picked (n,): the targets' logits, which are base (n,) but where a sum would be larger than
    LARGEST: there it is the row's largest other logit. The sums (n,) are in at least float32, of e before it is
    rounded. keep=False: e is None. Source: docs/derivations/head.md.
    """
    wide = jnp.promote_types(lnf.dtype, jnp.float32)
    logits = jnp.einsum("nc,vc->nv", lnf, wte, preferred_element_type=wide)
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    others = jnp.where((column != targets[:, None]) & (column < vocab_size), logits, -jnp.inf)
    fits = jnp.sum(jnp.exp(others - picked[:, None]), axis=1) <= LARGEST
    base = jnp.where(fits, picked, jnp.max(others, axis=1))
    e = jnp.exp(others - base[:, None])
    return e.astype(lnf.dtype) if keep else None, jnp.sum(e, axis=1), base


def _losses(total: jax.Array, base: jax.Array, picked: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return losses (n,), and 1 / S (n,), from sums of exponentials, what was subtracted in them, and the targets'."""
    S = total + jnp.exp(picked - base)
    return jnp.where(base == picked, jnp.log1p(total), jnp.log(S) + (base - picked)), 1 / S


def _by_weights(
    lnf: jax.Array,
    wte: jax.Array,
    targets: jax.Array,
    dlosses: jax.Array,
    vocab_size: int,
    weights: Weights,
) -> tuple[jax.Array, ...]:
    """Return dwte (Vp, C), losses (n,), dlnf (n, C), and what of each row of lnf is still to be taken from dwte[k]."""
    wide = jnp.promote_types(lnf.dtype, jnp.float32)
    with jax.named_scope("classifier"):
        picked = picked_logits(lnf, wte, targets)  # (n,)
    with jax.named_scope("head"):
        e, total, base = weights(lnf, wte, targets, picked, vocab_size)  # (n, Vp), (n,), (n,)
    with jax.named_scope("classifier"):
        losses, inverse = _losses(total, base, picked)
    with jax.named_scope("backward"), jax.named_scope("classifier"):
        share = (dlosses * inverse).astype(wide)[:, None]  # (n, 1)
        scaled = (share * lnf).astype(lnf.dtype)
    with jax.named_scope("backward"), jax.named_scope("head"):
        e_wte = jnp.einsum("nv,vc->nc", e, wte, preferred_element_type=wide)  # not yet rounded: more is taken from it
        dwte = jnp.einsum("nv,nc->vc", e, scaled, preferred_element_type=wide)
    with jax.named_scope("backward"), jax.named_scope("classifier"):
        dlnf = share * (e_wte - total[:, None] * wte[targets].astype(wide))
        return dwte, losses, dlnf.astype(lnf.dtype), share[:, 0] * total
