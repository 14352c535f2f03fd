"""Softmax over the vocabulary, cross-entropy and its gradient in one Triton kernel, in place.

Mathematics: llmc_jax/ops/classifier.py. One program takes a row of logits in two passes: the first finds logsumexp
with a running maximum, the second writes the gradient over the logits. Any V <= Vp; 16-byte accesses where Vp is a
multiple of 8 (bf16).
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's parameters: those without one are pointers.

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from llmc_jax.kernels.triton.call import call, check_dtype

BLOCK = 8192  # columns at a time: 7 blocks of GPT-2's 50304, 32 values for each thread of 8 warps
WARPS = 8


@triton.jit
def _logits(at, column, V: tl.constexpr, Vp: tl.constexpr):
    """Load logits of the row in fp32, -inf from V on. Masked at Vp: a mask at V, 50257, would split vectors."""
    logit = tl.load(at + column, mask=column < Vp, other=0.0).to(tl.float32)
    return tl.where(column < V, logit, -float("inf"))


@triton.jit
def _classifier(targets, dlosses, logits, losses, V: tl.constexpr, Vp: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * Vp  # an index into more than 2^31 elements
    target = tl.load(targets + row)
    # Before the first sum, whose barrier keeps the second pass of a faster warp from overwriting it.
    picked = tl.load(at + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)

    largest = -1e30  # a finite one: -inf - -inf is no number
    total = 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = _logits(at, column, V, Vp)
        larger = tl.maximum(largest, tl.max(logit, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logit - larger), 0)
        largest = larger
    logsumexp = largest + tl.log(total)
    tl.store(losses + row, logsumexp - picked)

    dloss = tl.load(dlosses + row)
    for start in range(0, Vp, BLOCK):
        column = start + tl.arange(0, BLOCK)
        logit = _logits(at, column, V, Vp)
        prob = tl.exp(logit - logsumexp)
        tl.store(at + column, dloss * tl.where(column == target, prob - 1.0, prob), mask=column < Vp)


@partial(jax.jit, static_argnames=("vocab_size", "target", "interpret"))
def classifier(
    logits: jax.Array,
    targets: jax.Array,
    dlosses: jax.Array,
    vocab_size: int,
    *,
    target: str = "sm_90",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of logits (n, Vp) at targets (n,) int32, and its gradient.

    Over the first V = vocab_size columns. dlosses (n,) fp32: the gradient that reaches each row's loss. logits: bf16,
    fp16 or fp32, overwritten where XLA needs them no more. A target outside 0..V-1 gives a loss of NaN.
    Returns losses (n,) fp32 in nats, dlogits (n, Vp) in logits' dtype with zeros from column V on.
    Bytes, at least: 2 n Vp size(logits) + 12 n: memory bandwidth is the floor. The second pass reads the row, 100 kB
    for GPT-2 in bf16, once more: from L2 where the rows of all programs that run together fit.
    """
    check_dtype("logits", logits)
    rows, Vp = logits.shape
    if not 1 <= vocab_size <= Vp:
        raise ValueError(f"vocab_size is {vocab_size}; it must be between 1 and the {Vp} columns of the logits")
    dlogits, losses = call(
        _classifier, targets, dlosses, changed=[logits], outputs=[jax.ShapeDtypeStruct((rows,), jnp.float32)],
        programs=rows, warps=WARPS, target=target, interpret=interpret, V=vocab_size, Vp=Vp,
        BLOCK=min(BLOCK, triton.next_power_of_2(Vp)),
    )  # fmt: skip
    return losses, dlogits
