"""The classifier on the GPU: softmax, cross-entropy and dlogits, one warpgroup per row, dlogits over the logits.

A row is gone through twice: for its logsumexp, and to be overwritten. Two forms: 'sweeps' reads it from global memory
both times, the second time mostly from a cache; 'shared' keeps it in shared memory meanwhile, so that it is read once
and written once. Leaves out losses without gradient (classifier_forward of the jnp operations) and the logits' product.

Source of the running maximum and sum: Milakov, Gimelshein, Online normalizer calculation for softmax (2018); of the
fusion: llm.c llmc/fused_classifier.cuh.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.tuning import sizes

THREADS = mosaic.WARPS * mosaic.LANES
LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)  # below every logit and finite: 0 * exp2(lowest - x) is 0, not NaN
BLOCK_BYTES = 1024  # of shared memory that each block takes beside what it asks for
GROUP = 7  # slabs whose maximum is taken before the running sums are scaled anew: 8 exp2 for 7 elements


class Slab(NamedTuple):
    """Neighbouring columns that the warpgroup loads with one access per thread; all numbers static."""

    start: int
    size: int
    vector: int  # elements per thread
    real: int  # columns of it that are not padding


class Plan(NamedTuple):
    """How a row is gone through."""

    slab: Slab  # a whole one
    rounds: int  # of GROUP whole slabs each from column 0 on, without padding, in a loop
    singles: tuple[Slab, ...]  # the rest, one by one
    empty: tuple[Slab, ...]  # padding alone: written, never read


State = tuple[jax.Array, jax.Array]  # running maximum, and sum of exp(logit - maximum), of each register


@partial(jax.jit, static_argnames=("vocab_size", "target", "interpret", "form"))
def classifier(
    logits: jax.Array,
    targets: jax.Array,
    dlosses: jax.Array,
    vocab_size: int,
    *,
    target: str = "sm_90",
    interpret: bool = False,
    form: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Losses and the gradient of the logits at once, the gradient written over the logits.

    logits (n, Vp) bf16, fp16 or fp32; targets (n,) int32 in 0..vocab_size-1; dlosses (n,) fp32, the gradient that
    reaches each row's loss: 1/n for their mean. Returns losses (n,) fp32 in nats and dlogits (n, Vp) in logits' dtype,
    zero in the columns from vocab_size on. In place where the caller donates the logits.

    Compulsory bytes: 2 n Vp itemsize + 12 n. For d12's 65,536 rows of 50,304 bf16 that is 13.2 GB, so 2.75 ms on a card
    of 4.8 TB/s. 'shared' moves just these; 'sweeps' reads n Vp itemsize again, from L2 where the rows in flight fit
    there. form: 'shared', 'sweeps', or None: by the tuning table.
    Alignment: Vp a multiple of 128; any other is padded, which copies the logits. Raises ValueError for shapes or
    dtypes that do not fit together.
    """
    _check(logits, targets, dlosses, vocab_size)
    n, Vp = logits.shape
    if n == 0:
        return jnp.zeros(0, jnp.float32), logits
    padding = -Vp % THREADS
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)))
    width = Vp + padding
    form = form or _form(width * logits.dtype.itemsize, target)
    if form not in ("shared", "sweeps"):
        raise ValueError(f"form {form!r}: 'shared' or 'sweeps'")
    call = mosaic.kernel(
        _body(_plan(width, vocab_size, 16 // logits.dtype.itemsize)),
        name=f"classifier_{form}",
        out_type=mosaic.shape_of((n,), jnp.float32),
        grid=(n,),
        grid_names=("row",),
        scratch=[mosaic.shared((width,), logits.dtype)] if form == "shared" else [],
        auto_barriers=False,  # a thread reads only what it has not written: its own elements, and the target at first
        interpret=interpret,
    )
    losses, [dlogits] = mosaic.in_place(call, (targets, dlosses), (logits,))
    return losses, dlogits[:, :Vp]


def _check(logits: jax.Array, targets: jax.Array, dlosses: jax.Array, vocab_size: int) -> None:
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or dlosses.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {logits.shape}, targets {targets.shape}, dlosses {dlosses.shape}: expected (n, Vp), (n,), (n,)"
        )
    if not 0 < vocab_size <= logits.shape[1]:
        raise ValueError(f"vocab_size {vocab_size} is not in 1..{logits.shape[1]}, the columns of the logits")
    if logits.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) or targets.dtype != jnp.int32:
        raise ValueError(f"logits {logits.dtype}, targets {targets.dtype}: expected bf16, fp16 or fp32, and int32")


def _form(row_bytes: int, target: str) -> str:
    """'shared' where a multiprocessor has room for as many rows as the tuning table asks for."""
    table = sizes(target)
    return "shared" if table.classifier_rows * (row_bytes + BLOCK_BYTES) <= table.smem else "sweeps"


def _plan(width: int, vocab_size: int, vector: int) -> Plan:
    """Which part of a row of `width` columns is treated how."""
    slabs = _slabs(width, vocab_size, vector)
    whole = [slab for slab in slabs if slab.size == THREADS * vector == slab.real]
    rounds = len(whole) // GROUP
    singles = tuple(slab for slab in slabs[rounds * GROUP :] if slab.real)
    return Plan(slabs[0], rounds, singles, tuple(slab for slab in slabs if not slab.real))


def _slabs(width: int, vocab_size: int, vector: int) -> list[Slab]:
    """`width` columns, a multiple of 128, as slabs: whole ones first, then each half as wide as the last or less."""
    slabs, start = [], 0
    while start < width:
        v = vector
        while THREADS * v > width - start:
            v //= 2
        size = THREADS * v
        slabs.append(Slab(start, size, v, min(max(vocab_size - start, 0), size)))
        start += size
    return slabs


# ----- the kernel's parts -------------------------------------------------------------------------------------------


def _layout(slab: Slab) -> Any:
    return mosaic.flat_layout(slab.size, slab.vector)


def _load(row: Any, start: Any, slab: Slab) -> jax.Array:
    """A slab's elements in their own dtype, from column `start` of a row in GMEM."""
    return mosaic.load(row.at[pl.ds(start, slab.size)], _layout(slab))


def _real(values: jax.Array, slab: Slab) -> jax.Array:
    """Logits in float32, -inf in the padding: exp2 makes it 0. No instruction where there is no padding."""
    values = values.astype(jnp.float32)
    return values if slab.real == slab.size else jnp.where(_column(slab) < slab.real, values, -jnp.inf)


def _column(slab: Slab) -> jax.Array:
    return mosaic.iota((slab.size,), 0, _layout(slab))


def _running(state: State, logits: list[jax.Array]) -> State:
    """The state after some more slabs. No thread asks another before the row's end."""
    largest, total = state
    new = largest
    for x in logits:
        new = jnp.maximum(new, x)
    total = total * jnp.exp2((largest - new) * LOG2E)
    for x in logits:
        total = total + jnp.exp2((x - new) * LOG2E)
    return new, total


def _start(slab: Slab) -> State:
    return mosaic.full((slab.size,), LOWEST, _layout(slab)), mosaic.zeros((slab.size,), _layout(slab))


def _join(states: list[State]) -> tuple[jax.Array, jax.Array]:
    """The row's maximum and its sum of exp(logit - maximum), scalars."""
    largest = jnp.max(states[0][0])
    for each, _ in states[1:]:
        largest = jnp.maximum(largest, jnp.max(each))
    total = jnp.float32(0)
    for each, part in states:
        total = total + jnp.sum(part * jnp.exp2((each - largest) * LOG2E))
    return largest, total


# ----- the kernel ---------------------------------------------------------------------------------------------------


def _body(plan: Plan) -> Callable[..., None]:
    """The kernel of one row. kept: the row in shared memory, where each thread puts and finds its own elements."""

    def body(targets_ref: Any, dlosses_ref: Any, logits_ref: Any, losses_ref: Any, *kept: Any) -> None:
        i = lax.axis_index("row")
        row = logits_ref.at[i]
        again = kept[0] if kept else row  # where a slab is read the second time
        wanted, dloss = targets_ref[i], dlosses_ref[i]
        picked = logits_ref[i, wanted].astype(jnp.float32)

        def look(state: State, places: list[tuple[Any, Slab]]) -> State:
            loaded = [_load(row, start, slab) for start, slab in places]  # all on their way before the first is needed
            for shared in kept:
                for (start, slab), values in zip(places, loaded, strict=True):
                    mosaic.store(shared.at[pl.ds(start, slab.size)], values)
            return _running(state, [_real(values, slab) for (_, slab), values in zip(places, loaded, strict=True)])

        def change(places: list[tuple[Any, Slab]]) -> None:
            loaded = [_load(again, start, slab) for start, slab in places]
            for (start, slab), values in zip(places, loaded, strict=True):
                weight = jnp.exp2((_real(values, slab) - largest) * LOG2E)
                hit = _column(slab) == wanted - start
                dlogits = weight * scale - jnp.where(hit, dloss, 0.0)  # dloss * (prob - [column = target])
                mosaic.store(row.at[pl.ds(start, slab.size)], dlogits.astype(row.dtype))

        state = lax.fori_loop(0, plan.rounds, lambda k, state: look(state, _round(k, plan)), _start(plan.slab))
        states = [state] + [look(_start(alike[0][1]), alike) for alike in _alike(plan)]
        largest, total = _join(states)
        losses_ref[i] = jnp.log(total) + (largest - picked)
        scale = dloss / total

        # From the end: what was read last is the likeliest to be in a cache still.
        for alike in _alike(plan):
            change(alike)
        pl.loop(0, plan.rounds)(lambda k: change(_round(plan.rounds - 1 - k, plan)))
        for slab in plan.empty:
            mosaic.store(row.at[pl.ds(slab.start, slab.size)], mosaic.zeros((slab.size,), _layout(slab), row.dtype))

    return body


def _round(k: Any, plan: Plan) -> list[tuple[Any, Slab]]:
    """Where the slabs of the k-th round begin."""
    return [((k * GROUP + j) * plan.slab.size, plan.slab) for j in range(GROUP)]


def _alike(plan: Plan) -> list[list[tuple[Any, Slab]]]:
    """The single slabs by their size, with where they begin."""
    sizes_ = sorted({slab.size for slab in plan.singles}, reverse=True)
    return [[(slab.start, slab) for slab in plan.singles if slab.size == size] for size in sizes_]
