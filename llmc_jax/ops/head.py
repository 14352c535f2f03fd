"""The output head: the product with wte, the classifier, and the gradients of both, a chunk of rows at a time.

The logits are the largest array of a training step: B T Vp elements, 6.6 GB in bf16 at B=64 T=1024 for GPT-2. Nothing
but the loss and the gradients of lnf and wte is needed of them, and each of these is a sum over rows or has one row for
each row of logits. So rows are taken in chunks:

    forward     logits = lnf wte^T                          of the chunk's rows
                losses and dlogits from the classifier, one over the other
    backward    dlnf   = dlogits wte                        the chunk's rows of dlnf
                dwte  += dlogits^T lnf                      summed over the chunks in at least float32

and the logits of the whole batch never exist. With one chunk this is llm.c's order of things.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from llmc_jax.ops.linear import linear_backward, linear_forward

# classifier(logits (n, Vp), targets (n,), dlosses (n,), V) -> losses (n,), dlogits (n, Vp)
Classifier = Callable[[jax.Array, jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]
# classifier_forward(logits (n, Vp), targets (n,), V) -> losses (n,), logsumexp (n,)
ClassifierForward = Callable[[jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]


def rows_per_chunk(rows: int, limit: int) -> int:
    """Return the largest divisor of `rows` that is at most `limit`; all rows for 0 or a limit beyond them."""
    if limit <= 0 or limit >= rows:
        return rows
    return next(size for size in range(limit, 0, -1) if rows % size == 0)


def head_losses(
    lnf: jax.Array, wte: jax.Array, targets: jax.Array, vocab_size: int, forward: ClassifierForward, limit: int = 0
) -> jax.Array:
    """Cross-entropy (n,) in nats of targets (n,) given lnf (n, C) and wte (Vp, C); at most `limit` rows at a time."""
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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses (n,) in nats, and the gradients dlnf (n, C) and dwte (Vp, C) that dlosses (n,) give.

    lnf (n, C), wte (Vp, C), targets (n,) int32. dlnf has lnf's dtype, dwte is in at least float32. At most `limit` rows
    of logits exist at a time (0: all of them). Source: llm.c train_gpt2.cu, `gpt2_backward_and_reduce`.
    """
    rows, C = lnf.shape
    size = rows_per_chunk(rows, limit)
    wide = jnp.promote_types(lnf.dtype, jnp.float32)

    def of_chunk(lnf: jax.Array, targets: jax.Array, dlosses: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        with jax.named_scope("head"):
            logits = linear_forward(lnf, wte, None)  # (size, Vp)
        with jax.named_scope("classifier"):
            losses, dlogits = classifier(logits, targets, dlosses, vocab_size)  # (size,), (size, Vp)
        with jax.named_scope("backward"), jax.named_scope("head"):
            return losses, *linear_backward(dlogits, lnf, wte, dw_dtype=wide)

    if size == rows:
        return of_chunk(lnf, targets, dlosses)

    def add(dwte: jax.Array, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        losses, dlnf, share = of_chunk(*chunk)
        return dwte + share, (losses, dlnf)

    chunks = (lnf.reshape(-1, size, C), targets.reshape(-1, size), dlosses.reshape(-1, size))
    dwte, (losses, dlnf) = jax.lax.scan(add, jnp.zeros(wte.shape, wide), chunks)
    return losses.reshape(rows), dlnf.reshape(rows, C), dwte
