"""Causal softmax over rows of attention scores, in place, as Triton kernels.

Mathematics: llmc_jax/ops/attention.py. One program takes a row in registers and reads only the columns up to the
diagonal, eight by eight; it writes the whole row, zeros beyond. Any T; 16-byte accesses where T is a multiple of 8
(bf16).
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations of a kernel's parameters: those without one are pointers.

import math
from functools import partial

import jax
import triton
import triton.language as tl

from llmc_jax.kernels.triton.call import call, check_dtype, warps_for


@triton.jit
def _to_read(column, diagonal):
    """Mark columns up to the diagonal, eight by eight: a mask that splits no vector keeps accesses of 16 bytes."""
    return column // 8 <= diagonal // 8


@triton.jit
def _softmax_forward(scores, SCALE: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = scores + row.to(tl.int64) * T  # an index into more than 2^31 elements
    column = tl.arange(0, BLOCK)
    inside = column < T
    score = tl.load(at + column, mask=_to_read(column, row % T) & inside, other=0.0).to(tl.float32) * SCALE
    score = tl.where(column <= row % T, score, -float("inf"))
    weight = tl.exp(score - tl.max(score, 0))
    tl.store(at + column, weight / tl.sum(weight, 0), mask=inside)


@triton.jit
def _softmax_backward(att, datt, SCALE: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = row.to(tl.int64) * T
    column = tl.arange(0, BLOCK)
    inside = column < T
    past = column <= row % T
    mask = _to_read(column, row % T) & inside
    weight = tl.where(past, tl.load(att + base + column, mask=mask, other=0.0).to(tl.float32), 0.0)
    dweight = tl.where(past, tl.load(datt + base + column, mask=mask, other=0.0).to(tl.float32), 0.0)
    dscore = SCALE * weight * (dweight - tl.sum(weight * dweight, 0))
    tl.store(datt + base + column, dscore, mask=inside)


@partial(jax.jit, static_argnames=("scale", "target", "interpret"))
def softmax_forward(scores: jax.Array, scale: float, *, target: str = "sm_90", interpret: bool = False) -> jax.Array:
    """Return att (..., T, T): row t is the softmax of scale * scores[t, :t+1], in fp32; zeros beyond. In scores' dtype.

    scores (..., T, T) bf16, fp16 or fp32, overwritten where XLA needs them no more.
    Bytes for R rows of T, at least: R (T + 1) / 2 size read and R T size written: memory bandwidth is the floor.
    """
    check_dtype("scores", scores)
    T = _length(scores)
    block = triton.next_power_of_2(T)
    return call(
        _softmax_forward, changed=[scores], programs=math.prod(scores.shape[:-1]), warps=warps_for(block),
        target=target, interpret=interpret, SCALE=scale, T=T, BLOCK=block,
    )[0]  # fmt: skip


@partial(jax.jit, static_argnames=("scale", "target", "interpret"))
def softmax_backward(
    datt: jax.Array, att: jax.Array, scale: float, *, target: str = "sm_90", interpret: bool = False
) -> jax.Array:
    """Return dscores (..., T, T) = scale * att * (datt - sum_u att datt) of every row, in fp32; zeros beyond.

    datt and att (..., T, T) in one dtype; datt is overwritten where XLA needs it no more.
    Bytes for R rows of T, at least: R (T + 1) size read and R T size written: memory bandwidth is the floor.
    """
    check_dtype("datt", datt)
    check_dtype("att", att)
    T = _length(datt)
    block = triton.next_power_of_2(T)
    return call(
        _softmax_backward, att, changed=[datt], programs=math.prod(datt.shape[:-1]), warps=warps_for(block),
        target=target, interpret=interpret, SCALE=scale, T=T, BLOCK=block,
    )[0]  # fmt: skip


def _length(scores: jax.Array) -> int:
    """Return T of scores (..., T, T)."""
    if scores.ndim < 2 or scores.shape[-2] != scores.shape[-1]:
        raise ValueError(f"causal softmax needs scores (..., T, T) with as many rows as columns, not {scores.shape}")
    return scores.shape[-1]
