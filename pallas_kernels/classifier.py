"""The classifier on the GPU: softmax, cross-entropy and dlogits, two warpgroups per row, dlogits over the logits.

A row is gone through twice: for its logsumexp, and to be overwritten. Two forms: 'sweeps' reads it from global memory
both times, the second time mostly from a cache; 'shared' keeps it in shared memory meanwhile, so that it is read once
and written once. Leaves out losses without gradient (classifier_forward of the jnp operations) and the logits' product.

Source of the running maximum and sum: Milakov, Gimelshein, Online normalizer calculation for softmax (2018); of the
fusion: llm.c llmc/fused_classifier.cuh.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import LOG2E, THREADS
from pallas_kernels.tuning import sizes

LN2 = math.log(2)
LOWEST = float(jnp.finfo(jnp.float32).min)  # below every logit and finite: 0 * exp2(lowest - x) is 0, not NaN
BLOCK_BYTES = 6144  # of shared memory that a block takes beside its row: warps' states, Mosaic's sums, the system's
GROUP = 7  # at most so many slabs' maximum is taken before the running sums are scaled anew: 8 exp2 for 7 elements
WIDE = 4  # slabs of one warpgroup in a row for several of them to share it


class Slab(NamedTuple):
    """Neighbouring columns that the warpgroups load with one access per thread, a part each; all numbers static."""

    start: int
    size: int  # columns of a part
    vector: int  # elements per thread
    parts: int  # warpgroups that have one: the first ones
    real: int  # columns of all parts that are not padding


class RowPass(NamedTuple):
    """How a row is gone through."""

    slab: Slab  # a whole one
    group: int  # whole slabs of a round
    rounds: int  # from column 0 on, without padding, in a loop
    singles: tuple[Slab, ...]  # the rest, one by one
    empty: tuple[Slab, ...]  # padding alone: written, never read


# Of each register: log2(e) times its largest logit so far, and the sum of 2 to the power of (log2(e) logit - that)
State = tuple[jax.Array, jax.Array]


class Place(NamedTuple):
    """Where a slab lies: `offset` columns, a static number that costs no instruction, behind column `start`."""

    start: Any
    offset: int
    slab: Slab


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
    """Compute losses and the logits' gradient at once, the gradient written over the logits.

    logits (n, Vp) bf16, fp16 or fp32; targets (n,) int32 in 0..vocab_size-1; dlosses (n,) fp32, the gradient that
    reaches each row's loss: 1/n for their mean. Returns losses (n,) fp32 in nats and dlogits (n, Vp) in logits' dtype,
    zero in the columns from vocab_size on. In place where the caller donates the logits.

    Compulsory bytes: 2 n Vp itemsize + 12 n. For d12's 65,536 rows of 50,304 bf16 that is 13.2 GB, so 2.75 ms on a card
    of 4.8 TB/s. 'shared' moves just these; 'sweeps' reads n Vp itemsize again, from L2 where the rows in flight fit
    there. form: 'shared', 'sweeps', or None: by the tuning table.
    Range: logits up to 10^9. A row with larger ones may become NaN, as does one with a logit that is not a number.
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
    vector = mosaic.widest(logits.dtype)
    warpgroups = sizes(target).classifier_warpgroups if width >= WIDE * THREADS * vector else 1
    kept = [mosaic.shared((width,), logits.dtype)] if form == "shared" else []
    states = mosaic.shared((2, mosaic.WARPS * warpgroups))
    call = mosaic.kernel(
        _body(_plan(width, vocab_size, vector, warpgroups), warpgroups, interpret),
        name=f"classifier_{form}",
        out_type=mosaic.shape_of((n,), jnp.float32),
        grid=(n,),
        grid_names=("row",),
        scratch=[*kept, states, mosaic.barrier(warpgroups)],
        approx_math=True,  # ex2.approx is right to 2 units in the last place of fp32
        auto_barriers=False,  # where a thread reads or overwrites what another wrote, `meet` stands between
        warpgroups=warpgroups,
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
    """Return 'shared' where a multiprocessor has room for as many rows as the tuning table asks for."""
    table = sizes(target)
    return "shared" if table.classifier_rows * (row_bytes + BLOCK_BYTES) <= table.smem else "sweeps"


def _plan(width: int, vocab_size: int, vector: int, warpgroups: int) -> RowPass:
    """Return which part of a row of `width` columns is treated how."""
    slabs = _slabs(width, vocab_size, vector, warpgroups)
    whole = sum(slab.size == THREADS * vector and slab.real == warpgroups * slab.size for slab in slabs)
    rounds = -(-whole // GROUP)
    group = whole // rounds if rounds else 0
    singles = tuple(slab for slab in slabs[rounds * group :] if slab.real)
    return RowPass(slabs[0], group, rounds, singles, tuple(slab for slab in slabs if not slab.real))


def _slabs(width: int, vocab_size: int, vector: int, warpgroups: int) -> list[Slab]:
    """Cut `width` columns, a multiple of 128, into slabs: whole ones, then each at most half as wide as the last."""
    slabs, start = [], 0
    while start < width:
        v = vector
        while v > 1 and warpgroups * THREADS * v > width - start:
            v //= 2
        size = THREADS * v
        parts = min(warpgroups, (width - start) // size)
        slabs.append(Slab(start, size, v, parts, min(max(vocab_size - start, 0), parts * size)))
        start += parts * size
    return slabs


# ----- the kernel's parts -------------------------------------------------------------------------------------------


def _layout(slab: Slab) -> Any:
    return mosaic.flat_layout(slab.size, slab.vector)


def _exponents(logits: jax.Array, base: Any, interpret: bool) -> jax.Array:
    """Return log2(e) logits - base: one instruction, which rounds once.

    base is log2(e) times the largest logit, rounded; what it lacks is in every exponent alike, and cancels. On a CPU
    XLA would round some of the products apart and some not: the barrier has it round all of them.
    """
    scaled = logits * LOG2E
    return (lax.optimization_barrier(scaled) if interpret else scaled) - base


def _running(state: State, logits: list[jax.Array], layout: Any, interpret: bool) -> State:
    """Return the state after some more slabs. No thread asks another before the row's end."""
    base, total = state
    wide = partial(mosaic.widened, layout=layout, interpret=interpret)
    new = jnp.maximum(base, wide(reduce(jnp.maximum, logits)) * LOG2E)
    total = total * jnp.exp2(base - new)
    for x in logits:
        total = total + jnp.exp2(_exponents(wide(x), new, interpret))
    return new, total


def _start(slab: Slab) -> State:
    return mosaic.full((slab.size,), LOWEST, _layout(slab)), mosaic.zeros((slab.size,), _layout(slab))


class Team(NamedTuple):
    """A warpgroup of those that go through a row together, and how they meet."""

    index: Any
    warpgroups: int
    states: Any  # SMEM (2, 4 warpgroups): each warp's base and total
    barrier: Any
    interpret: bool

    def part(self, ref: Any, place: Place) -> Any:
        """Return a row's columns that are its part of a slab: the last part for one that has none."""
        start, offset, slab = place
        start += jnp.minimum(self.index, slab.parts - 1) * slab.size
        return ref.at[pl.ds(start, offset + slab.size)].at[pl.ds(offset, slab.size)]

    def real(self, values: jax.Array, slab: Slab) -> jax.Array:
        """Return logits, -inf in the padding: exp2 makes it 0. No instruction where there is no padding."""
        if slab.real == self.warpgroups * slab.size:
            return values
        column = mosaic.iota((slab.size,), 0, _layout(slab)) + self.index * slab.size
        return jnp.where(column < slab.real, values, jnp.asarray(-jnp.inf, values.dtype))

    def if_it_has(self, slab: Slab, do: Callable[[], None]) -> None:
        """Do something where the warpgroup has a part of the slab."""
        if slab.parts == self.warpgroups:
            do()
        else:
            pl.when(self.index < slab.parts)(do)

    def join(self, states: list[State]) -> tuple[jax.Array, jax.Array]:
        """Return the state of the row, two scalars, from those of all its threads."""
        split = [[mosaic.by_warp(values, self.interpret) for values in state] for state in states]  # (WARPS, …) each
        base = reduce(jnp.maximum, [bases.max(1) for bases, _ in split])  # (WARPS,)
        shares = [totals * jnp.exp2(bases - mosaic.along(base, bases, 0)) for bases, totals in split]
        here = pl.ds(self.index * mosaic.WARPS, mosaic.WARPS)
        mosaic.store(self.states.at[0, here], base)
        mosaic.store(self.states.at[1, here], reduce(add, [share.sum(1) for share in shares]))
        mosaic.meet(self.barrier)
        warps = range(mosaic.WARPS * self.warpgroups)
        bases, totals = ([self.states[which, warp] for warp in warps] for which in range(2))
        base = reduce(jnp.maximum, bases)
        return base, reduce(add, [part * jnp.exp2(each - base) for each, part in zip(bases, totals, strict=True)])


# ----- the kernel ---------------------------------------------------------------------------------------------------


def _body(plan: RowPass, warpgroups: int, interpret: bool) -> Callable[..., None]:
    """Do one row. kept: the row in shared memory, where each thread puts and finds its own elements."""

    def body(targets_ref: Any, dlosses_ref: Any, logits_ref: Any, losses_ref: Any, *scratch: Any) -> None:
        *kept, states_ref, barrier = scratch
        index = lax.axis_index("warpgroup") if warpgroups > 1 else 0
        team = Team(index, warpgroups, states_ref, barrier, interpret)
        i = lax.axis_index("row")
        row = logits_ref.at[i]
        again = kept[0] if kept else row  # where a slab is read the second time
        wanted, dloss = targets_ref[i], dlosses_ref[i]
        picked = logits_ref[i, wanted].astype(jnp.float32)

        def look(state: State, places: list[Place]) -> State:
            # all on their way before the first is needed
            loaded = [mosaic.load(team.part(row, place), _layout(place.slab)) for place in places]
            for shared in kept:
                for place, values in zip(places, loaded, strict=True):
                    team.if_it_has(place.slab, partial(mosaic.store, team.part(shared, place), values))
            real = [team.real(values, place.slab) for place, values in zip(places, loaded, strict=True)]
            return _running(state, real, _layout(places[0].slab), interpret)

        def change(places: list[Place]) -> None:
            loaded = [mosaic.load(team.part(again, place), _layout(place.slab)) for place in places]
            for place, values in zip(places, loaded, strict=True):
                wide = mosaic.widened(team.real(values, place.slab), _layout(place.slab), interpret)
                dlogits = jnp.exp2(_exponents(wide, base, interpret)) * scale  # dloss prob
                mosaic.store(team.part(row, place), dlogits.astype(row.dtype))

        states = []
        if plan.rounds:
            at_first = _start(plan.slab)
            states += [lax.fori_loop(0, plan.rounds, lambda k, state: look(state, _round(k, plan)), at_first)]
        states += [look(_start(alike[0].slab), alike) for alike in _alike(plan)]
        base, total = team.join(states)
        scale = dloss / total
        exponent = _exponents(picked, base, interpret)

        @pl.when(team.index == 0)
        def _() -> None:
            losses_ref[i] = jnp.log(total) - exponent * LN2

        # From the end: what was read last is the likeliest to be in a cache still.
        for alike in _alike(plan):
            team.if_it_has(alike[0].slab, partial(change, alike))
        pl.loop(0, plan.rounds)(lambda k: change(_round(plan.rounds - 1 - k, plan)))
        for slab in plan.empty:
            zeros = mosaic.zeros((slab.size,), _layout(slab), row.dtype)
            team.if_it_has(slab, partial(mosaic.store, team.part(row, Place(slab.start, 0, slab)), zeros))

        mosaic.meet(barrier)  # the target's column is another thread's

        @pl.when(team.index == 0)
        def _() -> None:
            dlogit = jnp.exp2(exponent) * scale - dloss
            logits_ref[i, wanted] = dlogit.astype(row.dtype)

    return body


def _round(k: Any, plan: RowPass) -> list[Place]:
    """Return the slabs of the k-th round."""
    wide = plan.slab.parts * plan.slab.size
    return [Place(k * (plan.group * wide), j * wide, plan.slab) for j in range(plan.group)]


def _alike(plan: RowPass) -> list[list[Place]]:
    """Return the single slabs by their size."""
    kinds = sorted({(slab.size, slab.parts) for slab in plan.singles}, reverse=True)
    return [[Place(slab.start, 0, slab) for slab in plan.singles if (slab.size, slab.parts) == kind] for kind in kinds]
