"""Causal attention without the T x T matrix, forward and backward, by softmax or relu: "flash attention".

A block of threads takes 64 rows of the scores and goes through them tile by tile, so that a tile of scores lives in
registers from its birth to its last use. The backward computes the scores again. docs/kernels/attention.md explains it
from the beginning, with pictures. qkv is read, and its gradient written, as packed as the linear layers have them:
no transposition of heads takes place. No atomics: the same inputs give the same bits.

Two versions: products by mma.sync for every GPU from Ampere on, with one warpgroup in a block, and by wgmma for Hopper
(compute capability 9.0 exactly), with two, which share the tiles that they walk over. All else is the same code. Leaves
out dropout, padding masks and windows.

    forward     grid point (i, n, b): 64 rows t of one head, over the tiles of keys and values u up to the diagonal:
                    score = q k^T;  weights = softmax or relu of it;  out += weights v
                The softmax is taken online: m is the largest score so far and total the sum of exp(score - m); when a
                tile brings a larger one, m' > m, what was summed is multiplied by exp(m - m'). At the end comes
                out / total, and lse = m + log(total) is kept: exp(score - lse) is a weight, the backward's start.
                All exponents are of base 2, which the GPU has an instruction for: m, total and lse stand for
                score log2(e), whose factor log2(e) is taken together with the scale in one fused multiply-add.
    backward    two kernels, because dq sums over u and dk, dv sum over t: each owns the rows of what it sums.
                    dq      grid point (i, n, b): 64 rows t, over the tiles of u up to the diagonal
                    dk, dv  grid point (j, n, b): 64 rows u, over the tiles of t from the diagonal on
                with weights = exp(score - lse), dweights = dout v^T, delta = sum_h dout out, of which dq's kernel
                writes a number for each row that the other one reads:
                    dscore = weights (dweights - delta)             softmax
                    dscore = dweights where score > 0               relu
                dq and dk are multiplied by the scale of the scores once, at the end.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import COMPUTING_REGISTERS, COPYING_REGISTERS, LOG2E, f32
from pallas_kernels.tuning import AttentionSizes, architecture_of, attention_sizes

ROWS = 64  # of a tile: 16 per warp, what the matrix instructions take
HEAD_SIZE_STEP = 16  # a head's channels are padded to a multiple of it: what an mma instruction sums over

Saved = jax.Array | tuple[()]


class Problem(NamedTuple):
    """What a kernel is made for. Static."""

    B: int
    T: int  # a multiple of a block's rows
    NH: int
    HS: int  # a multiple of HEAD_SIZE_STEP
    scale: float  # of the scores
    relu: bool
    sizes: AttentionSizes
    products: Any
    copies: mosaic.Copies
    interpret: bool

    @property
    def scale_within(self) -> float:
        """Return the part of dscore's scale that is taken before dscore is rounded; dq and dk get the rest at the end.

        float16 has a largest number of 65,504, which a gradient that is multiplied by a loss scale may come near to.
        """
        return self.scale if self.products.dtype == jnp.float16 else 1.0

    @property
    def parts(self) -> tuple[int, int, int]:
        """Return into how many parts the work falls: sequences, heads, and rows of a block."""
        return self.B, self.NH, self.T // (self.sizes.warpgroups * ROWS)

    def lasting_blocks(self, kernel: str) -> int:
        """Return how many blocks of threads share the parts in a kernel where each goes from one to the next.

        As many as there may be, or a few less: with no factor in common with a head's parts, which differ in length, a
        block gets each of them in turn. No more than parts, so that each has one where they are few.
        """
        most = self.sizes.lasting[kernel]
        if math.prod(self.parts) <= most:
            return math.prod(self.parts)
        return next(blocks for blocks in range(most, 0, -1) if math.gcd(blocks, self.parts[2]) == 1)

    @property
    def scale_at_end(self) -> float:
        """Return what dq and dk are multiplied by."""
        return self.scale / self.scale_within


@partial(jax.jit, static_argnames=("num_heads", "target", "version", "interpret"))
def attention_forward(
    qkv: jax.Array, num_heads: int, *, target: str = "sm_90", version: str | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Compute causal softmax attention from packed qkv (B, T, 3C): Q | K | V, each split into NH heads of HS channels.

    Returns out (B, T, C) in qkv's dtype and lse (B, NH, T) float32, each row's log2(sum(exp(score))): of base 2.
    qkv is bfloat16 or float16; sums and softmax are float32, weights are rounded to qkv's dtype before they meet v.
    Any T; B and NH up to 65,535, the limit of a grid. T is padded to a multiple of a block's rows, 64 (mma) or 128
    (wgmma), and HS to one of 16 with zeros, which costs a copy of qkv; HS is at most 128. version: "mma", "wgmma", or
    None for the one that target's table names. Raises ValueError for other dtypes, head sizes and larger grids.

    Compulsory bytes: 6 B T C + 2 B T C + 4 B NH T. The 4 B T^2 C / 2 operations are more than that for T above some
    hundreds, so the floor is set by the tensor cores. Source: Dao, FlashAttention-2 (2023), algorithm 1.
    """
    return _forward(qkv, num_heads, False, target, version, interpret)  # type: ignore[return-value]


@partial(jax.jit, static_argnames=("num_heads", "target", "version", "interpret"))
def attention_backward(
    dout: jax.Array,
    qkv: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    num_heads: int,
    *,
    target: str = "sm_90",
    version: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return softmax attention's gradient by packed qkv: dqkv (B, T, 3C), and dbias (3C,), the sum of its rows.

    Both in qkv's dtype; the sum is of the rounded gradients, in float32.

    dout and out (B, T, C), qkv (B, T, 3C), lse (B, NH, T) float32, as the forward took and returned them. Dtypes,
    padding, version and errors as in the forward.

    Compulsory bytes: 2 * 2 B T C + 6 B T C read, 4 B NH T of lse, 6 B T C written. Besides, delta and lse go from the
    first kernel to the second, 8 B NH T, and sums over 64 rows to their sum over all, 12 B T C / 64. 7 products of
    2 B T^2 C / 2 operations each, two of them twice because dq and dk, dv come from kernels of their own: the floor is
    the tensor cores'. Source: Dao, FlashAttention-2 (2023), algorithm 2.
    """
    return _backward(dout, qkv, out, lse, num_heads, False, target, version, interpret)


@partial(jax.jit, static_argnames=("num_heads", "target", "version", "interpret"))
def relu_attention_forward(
    qkv: jax.Array, num_heads: int, *, target: str = "sm_90", version: str | None = None, interpret: bool = False
) -> tuple[jax.Array, tuple[()]]:
    """Compute causal attention with weights relu(score), not normalised: out (B, T, C), and (), for nothing is kept.

    As `attention_forward` in everything else. Source: docs/relu_attention.md.
    """
    return _forward(qkv, num_heads, True, target, version, interpret)  # type: ignore[return-value]


@partial(jax.jit, static_argnames=("num_heads", "target", "version", "interpret"))
def relu_attention_backward(
    dout: jax.Array,
    qkv: jax.Array,
    out: jax.Array,
    saved: tuple[()],
    num_heads: int,
    *,
    target: str = "sm_90",
    version: str | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return relu attention's gradient by packed qkv: dqkv (B, T, 3C), and dbias (3C,), its sum over all rows.

    out is not read, saved is (). As `attention_backward` in everything else. Source: docs/relu_attention.md.
    """
    return _backward(dout, qkv, out, saved, num_heads, True, target, version, interpret)


# ----- from packed, unpadded arrays to the kernels ------------------------------------------------------------------


def _problem(qkv: jax.Array, num_heads: int, relu: bool, target: str, version: str | None, interpret: bool) -> Problem:
    """Check and pad. Raises ValueError with what is possible."""
    if qkv.ndim != 3 or qkv.shape[-1] % (3 * num_heads):
        raise ValueError(f"qkv has shape {qkv.shape}; expected (B, T, 3C), 3C a multiple of 3 * {num_heads} heads")
    if qkv.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"attention kernels take bfloat16 or float16, not {qkv.dtype}; "
            "the jnp version (llmc_jax/ops/attention.py) serves float32"
        )
    B, T, C3 = qkv.shape
    HS = C3 // 3 // num_heads
    padded = mosaic.round_up(HS, HEAD_SIZE_STEP)
    sizes = attention_sizes(target, padded, version)
    if sizes.version == "mma":
        products: Any = mosaic.MmaProducts(qkv.dtype, interpret)
    else:
        products = mosaic.WgmmaProducts(qkv.dtype, interpret)
    return Problem(
        B=B, T=mosaic.round_up(T, sizes.warpgroups * ROWS), NH=num_heads, HS=padded, scale=1 / math.sqrt(HS), relu=relu,
        sizes=sizes, products=products, copies=mosaic.Copies(architecture_of(target), interpret),
        interpret=interpret,
    )  # fmt: skip


def _padded(x: jax.Array, heads: int, p: Problem) -> jax.Array:
    """Return (B, T, heads * HS) padded with zeros to the T and HS of the kernels.

    Zeros are harmless: padded channels add 0 to every product; padded keys lie in the future of every real row; padded
    rows have dout = 0 and with it all that they contribute to dk and dv.
    """
    B, T, width = x.shape
    if (T, width) == (p.T, heads * p.HS):
        return x
    by_head = x.reshape(B, T, heads, width // heads)
    by_head = jnp.pad(by_head, ((0, 0), (0, p.T - T), (0, 0), (0, p.HS - width // heads)))
    return by_head.reshape(B, p.T, heads * p.HS)


def _unpadded(x: jax.Array, T: int, width: int, p: Problem) -> jax.Array:
    """Undo `_padded`."""
    if x.shape[1:] == (T, width):
        return x
    heads = x.shape[2] // p.HS
    return x.reshape(p.B, p.T, heads, p.HS)[:, :T, :, : width // heads].reshape(p.B, T, width)


def _forward(
    qkv: jax.Array, num_heads: int, relu: bool, target: str, version: str | None, interpret: bool
) -> tuple[jax.Array, Saved]:
    p = _problem(qkv, num_heads, relu, target, version, interpret)
    T, C = qkv.shape[1], qkv.shape[2] // 3
    out_type = [mosaic.shape_of((p.B, p.T, p.NH * p.HS), qkv.dtype)]
    if not relu:
        out_type.append(mosaic.shape_of((p.B, p.NH, p.T), f32))
    out, *lse = _kernel(_forward_kernel, "forward", p, out_type)(_padded(qkv, 3 * num_heads, p))
    return _unpadded(out, T, C, p), lse[0][:, :, :T] if lse else ()


def _backward(
    dout: jax.Array, qkv: jax.Array, out: jax.Array, saved: Saved, num_heads: int,
    relu: bool, target: str, version: str | None, interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    p = _problem(qkv, num_heads, relu, target, version, interpret)
    T, C = dout.shape[1:]
    inputs = [_padded(qkv, 3 * num_heads, p), _padded(dout.astype(qkv.dtype), num_heads, p)]
    changed = [
        mosaic.empty(inputs[0].shape, qkv.dtype, interpret=interpret),
        mosaic.empty((p.B, p.T // ROWS, inputs[0].shape[-1]), f32, interpret=interpret),  # sums over a tile's rows
    ]
    if relu:
        _, changed = mosaic.in_place(_kernel(_dq_kernel, "dq", p, ()), inputs, changed)
    else:
        assert isinstance(saved, jax.Array)
        inputs.append(jnp.pad(saved, ((0, 0), (0, 0), (0, p.T - T))))  # (B, NH, T)
        with_out = [*inputs, _padded(out.astype(qkv.dtype), num_heads, p)]
        values = [mosaic.shape_of((p.B, p.NH, p.T // ROWS, 2, ROWS), f32)]  # of each row, by tile: lse and minus delta
        inputs[-1:], changed = mosaic.in_place(_kernel(_dq_kernel, "dq", p, values), with_out, changed)
    _, (dqkv, sums) = mosaic.in_place(_kernel(_dkv_kernel, "dkv", p, ()), inputs, changed)
    dbias = jnp.sum(sums, axis=(0, 1)).reshape(-1, p.HS)[:, : C // num_heads].reshape(-1)
    return _unpadded(dqkv, T, 3 * C, p), dbias.astype(qkv.dtype)


ABSENT = {"forward": (2,), "dq": (2, 3, 6, 7), "dkv": (2, 5)}  # refs of ReLU attention, which has no sums of rows


def _kernel(body: Any, name: str, p: Problem, out_type: Any) -> Any:
    """Return a kernel with one block of threads for each 64 rows of every warpgroup, each head and sequence.

    A block that lasts does many such parts of the work.
    """
    columns, stages, warpgroups = p.sizes.columns[name], p.sizes.stages, p.sizes.warpgroups
    lasting = name in p.sizes.lasting
    own = 1 if name == "forward" else 2  # tiles of a block's own rows: q, or q and dout, or k and v
    values = name == "dkv" and not p.relu  # of rows, which are walked over as well
    held = name == "dkv" and p.sizes.held
    dtype = p.products.dtype
    return mosaic.kernel(
        mosaic.without(partial(body, p), ABSENT[name] if p.relu else ()),
        name=f"{'relu_' if p.relu else ''}attention_{name}_{p.sizes.version}",
        out_type=out_type,
        # The last is the fastest. Blocks of one head run at about the same time, so that L2 holds what they all read.
        grid=(p.lasting_blocks(name),) if lasting else p.parts,
        grid_names=("block",) if lasting else ("sequence", "head", "tile"),
        scratch=[
            *([mosaic.shared((stages, 2, ROWS))] if values else []),
            *([mosaic.shared((warpgroups, ROWS))] if name == "dq" and not p.relu else []),
            # Where keys and values are in registers, the next ones arrive meanwhile: a tile more for dk and dv.
            mosaic.tile_spec((warpgroups * (2 if held else 1), ROWS, p.HS), dtype),
            *[mosaic.tile_spec((warpgroups, ROWS, p.HS), dtype)] * (own - 1),
            *[mosaic.tile_spec((stages, columns, p.HS), dtype)] * 2,  # the two that are walked over
            *p.copies.barriers((warpgroups, own), (stages, 2 + values)),
            *(p.copies.barriers((stages, warpgroups)) if warpgroups > 1 else []),
        ],
        approx_math=True,
        sums_cross_warps=False,
        warpgroups=warpgroups + (name in p.sizes.copied_apart),
        interpret=p.interpret,
    )


# ----- the kernels --------------------------------------------------------------------------------------------------

# Kinds of barriers: the tiles that a warpgroup owns are there; a tile that the block walks over is there; all
# warpgroups are done with a slot.
OWN, WALKED, RELEASED = 0, 1, 2


class Part(NamedTuple):
    """A part of the work: which sequence, which head and which of its parts. Traced."""

    sequence: Any
    head: Any
    tile: Any


class Head(NamedTuple):
    """One head of one sequence of a packed array (B, T, parts * NH * HS) in GMEM."""

    x: Any
    b: Any
    column: Any  # of the head's first channel
    HS: int

    def rows(self, tile: Any, size: int) -> Any:
        """Return a Ref (size, HS) of the rows of a tile."""
        return self.x.at[self.b, pl.ds(tile * size, size), pl.ds(self.column, self.HS)]

    def row(self, t: Any) -> Any:
        """Return a Ref (HS,) of one row."""
        return self.x.at[self.b, t, pl.ds(self.column, self.HS)]


class RowValues(NamedTuple):
    """What an array (B, NH, T / ROWS, 2, ROWS) in GMEM holds of the rows of a head."""

    x: Any
    part: Part

    def rows(self, tile: Any, size: int) -> Any:
        """Return a Ref (2, ROWS) with a tile's rows: a smaller one's neighbours too, since copies have a least size.

        Its elements lie one after another, because cp.async takes a plain array for one piece, whatever its strides.
        """
        return self.x.at[self.part.sequence, self.part.head, tile * size // ROWS]


def _heads(p: Problem, part: Part, x: Any, thirds: int = 1) -> list[Head]:
    """Return the head of a part of the work, in each third of a packed array: Q, K and V of qkv."""
    return [Head(x, part.sequence, (third * p.NH + part.head) * p.HS, p.HS) for third in range(thirds)]


class Walk(NamedTuple):
    """A block's walk over the tiles begin..end-1 of some arrays, in SMEM a ring of slots: some are always on their way.

    Every warpgroup has to arrive at every tile. The first of them starts the copies for all, or one of its own does.
    A slot is filled anew when the block is so many tiles further as it has warpgroups: a warpgroup that is alone has
    then read it, and of two the slower may be a tile behind the faster.
    """

    begin: Any
    end: Any
    sources: Sequence[Any]  # what of an array belongs to a tile: Head, RowValues
    rings: Sequence[Any]  # SMEM for each, (stages, …)
    size: int  # of a tile
    barriers: Sequence[Any]
    p: Problem
    apart: bool  # a warpgroup of its own starts the copies, and does nothing else
    before: Any = 0  # how many tiles this block has walked over before, in other parts
    following: Part | None = None  # the block's next part, or one that lies beyond the last sequence

    @property
    def ahead(self) -> int:
        """Return how many tiles are on their way while one is in use."""
        return self.p.sizes.stages - self.p.sizes.warpgroups

    def slot(self, tile: Any) -> Any:
        """Return where a tile lies."""
        return jnp.int32(self.before + tile - self.begin) & (self.p.sizes.stages - 1)

    def fetch(self, tile: Any) -> None:
        """Start copying a tile, when its slot is free."""
        slot = self.slot(tile)
        if self.p.sizes.warpgroups > 1:

            @pl.when(self.before + tile - self.begin >= self.p.sizes.stages)
            def _() -> None:
                self.p.copies.wait(self.barriers, RELEASED, slot)

        for source, ring in zip(self.sources, self.rings, strict=True):
            self.p.copies.start(source.rows(tile, self.size), ring.at[slot], self.barriers, WALKED, slot)

    def fetch_early(self, tile: Any) -> None:
        """Let the first warpgroup start copying a tile, if there is one of this number."""
        if not self.apart:
            pl.when((tile < self.end) & (_warpgroup(self.p) == 0))(lambda: self.fetch(tile))

    def start(self) -> None:
        """Start copying the first tiles."""
        for tile in range(self.ahead):
            self.fetch_early(self.begin + tile)

    def arrive(self, tile: Any) -> list[Any]:
        """Return what belongs to a tile, when it is there; this warpgroup is done with the tile before."""
        if self.p.sizes.warpgroups > 1:
            again = self.following is not None or tile - 1 + self.p.sizes.stages < self.end  # if the slot is used again

            @pl.when((tile > self.begin) & again)
            def _() -> None:
                self.release(tile - 1)

        slot = self.slot(tile)
        self.p.copies.wait(self.barriers, WALKED, slot)
        self.p.products.finish_reading(self.p.copies)  # of the slot that is overwritten
        self.fetch_early(tile + self.ahead)
        return [ring.at[slot] for ring in self.rings]

    def release(self, tile: Any) -> None:
        """Tell that this warpgroup is done with a tile."""
        self.p.copies.release(self.barriers, RELEASED, self.slot(tile))

    def skip(self, begin: Any, end: Any) -> None:
        """Pass tiles that only other warpgroups of the block have to see."""

        def step(tile: Any, _: None) -> None:
            self.arrive(tile)

        if self.p.sizes.warpgroups > 1:
            lax.fori_loop(begin, end, step, None)


def _warpgroup(p: Problem) -> Any:
    """Return which of its block this is."""
    return lax.axis_index("warpgroup") if p.sizes.warpgroups > 1 else 0


def _each_part(
    p: Problem, name: str, barriers: Sequence[Any], walk_of: Callable[[Part], Walk], work: Callable[[Part, Walk], None]
) -> None:
    """Run a block's work: one part, or one after another where it lasts.

    A warpgroup that only copies goes over all walks meanwhile, and leaves registers to the others.
    """

    def each(do: Callable[[Part, Walk], None]) -> Any:
        """Do something for all parts. Returns how many tiles a block that lasts has walked over."""
        if name not in p.sizes.lasting:
            part = Part(*map(lax.axis_index, ("sequence", "head", "tile")))
            return do(part, walk_of(part))
        blocks, first, tiles = p.lasting_blocks(name), lax.axis_index("block"), p.parts[2]

        def part_of(number: Any) -> Part:
            return Part(number // (tiles * p.NH), number // tiles % p.NH, number % tiles)

        def step(turn: Any, before: Any) -> Any:
            number = first + turn * blocks
            part = part_of(number)
            walk = walk_of(part)._replace(before=before, following=part_of(number + blocks))
            do(part, walk)
            return before + walk.end - walk.begin

        return lax.fori_loop(0, pl.cdiv(math.prod(p.parts) - first, blocks), step, jnp.int32(0))

    def compute(part: Part, walk: Walk) -> None:
        work(part, walk)
        if walk.following is not None:
            walk.release(walk.end - 1)
            mosaic.finish_reading()  # of a warpgroup's own tiles, which are overwritten

    if name not in p.sizes.copied_apart:
        each(compute)
        return

    def copy(_: Part, walk: Walk) -> None:
        lax.fori_loop(walk.begin, walk.end, lambda tile, _: walk.fetch(tile), None)

    computes = _warpgroup(p) < p.sizes.warpgroups

    @pl.when(computes)
    def _() -> None:
        mosaic.set_registers(COMPUTING_REGISTERS, more=True)
        each(compute)

    @pl.when(~computes)
    def _() -> None:
        mosaic.set_registers(COPYING_REGISTERS, more=False)
        walked = each(copy)
        if name in p.sizes.lasting:  # who waits for a barrier sees its last phase too: the interpreter asks for it
            for last in range(1, p.sizes.stages + 1):
                slot = (walked - last) & (p.sizes.stages - 1)
                pl.when(walked >= last)(partial(p.copies.wait, barriers, RELEASED, slot))


def _walk_of_queries(
    p: Problem, name: str, qkv: Any, rings: Sequence[Any], barriers: Sequence[Any], part: Part
) -> Walk:
    """Return a block's walk over the tiles of keys and values."""
    columns, warpgroups = p.sizes.columns[name], p.sizes.warpgroups
    last = (_block_of_queries(p, part) + 1) * warpgroups * (ROWS // columns)
    sources = _heads(p, part, qkv, 3)[1:]
    return Walk(0, last, sources, rings, columns, barriers, p, name in p.sizes.copied_apart)


def _block_of_queries(p: Problem, part: Part) -> Any:
    """Return which rows of a block these are, the longest walk first: the GPU ends with short ones."""
    return p.parts[2] - 1 - part.tile


def _own_queries(p: Problem, name: str, part: Part) -> tuple[Any, Any, Any, Any]:
    """Return this warpgroup, its tile i of 64 rows t, how many tiles lie below its diagonal, and with those on it."""
    w, tiles = _warpgroup(p), ROWS // p.sizes.columns[name]
    i = _block_of_queries(p, part) * p.sizes.warpgroups + w
    return w, i, i * tiles, (i + 1) * tiles


def _forward_kernel(
    p: Problem, qkv: Any, out: Any, lse: Any, q_s: Any, k_s: Any, v_s: Any, *barriers: Any
) -> None:  # fmt: skip
    dot, columns = p.products, p.sizes.columns["forward"]

    def work(part: Part, walk: Walk) -> None:
        w, i, full, end = _own_queries(p, "forward", part)
        q_g, own_q_s = _heads(p, part, qkv)[0], q_s.at[w]
        p.copies.start(q_g.rows(i, ROWS), own_q_s, barriers, OWN, w)
        walk.start()
        p.copies.wait(barriers, OWN, w)
        q = dot.left(own_q_s)

        def step(masked: bool, j: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            k, v = walk.arrive(j)
            score = dot.product(q, k.T)  # (ROWS, columns), not yet scaled
            if masked:
                score = _causal(score, dot.layout, i * ROWS, j * columns, rows=0)
            if p.relu:
                return (dot.add_weighted(sums[0], jnp.maximum(score * p.scale, 0), v),)
            acc, m, total = sums
            larger = jnp.maximum(m, score.max(1) * (p.scale * LOG2E))
            shrink = jnp.exp2(m - larger)
            weights = jnp.exp2(score * (p.scale * LOG2E) - mosaic.along(larger, score, 0))
            total = total * shrink + weights.sum(1)
            return dot.add_weighted(acc * mosaic.along(shrink, acc, 0), weights, v), larger, total

        sums: tuple[jax.Array, ...] = (mosaic.zeros((ROWS, p.HS), dot.layout),)
        if not p.relu:
            by_row = dot.layout.reduce(1)
            sums += (mosaic.full((ROWS,), -math.inf, by_row), mosaic.zeros((ROWS,), by_row))
        sums = lax.fori_loop(0, full, partial(step, False), sums)
        sums = _loop(full, end, ROWS // columns, partial(step, True), sums)
        walk.skip(end, walk.end)
        acc = sums[0]
        if not p.relu:
            _, m, total = sums
            acc = acc * mosaic.along(1 / total, acc, 0)
            mosaic.store(_row_values(lse, part, i), m + jnp.log(total) * LOG2E)
        mosaic.store_tile(acc.astype(dot.dtype), own_q_s, _heads(p, part, out)[0].rows(i, ROWS))

    _each_part(p, "forward", barriers, partial(_walk_of_queries, p, "forward", qkv, (k_s, v_s), barriers), work)


def _dq_kernel(
    p: Problem, qkv: Any, dout: Any, lse_g: Any, out: Any, dqkv: Any, sums_g: Any, values_g: Any, minus_delta_s: Any,
    q_s: Any, dout_s: Any, k_s: Any, v_s: Any, *barriers: Any,
) -> None:  # fmt: skip
    dot, columns = p.products, p.sizes.columns["dq"]

    def work(part: Part, walk: Walk) -> None:
        w, i, full, end = _own_queries(p, "dq", part)
        (q_g,), (dout_g,) = _heads(p, part, qkv), _heads(p, part, dout)
        own_q_s, own_dout_s = q_s.at[w], dout_s.at[w]
        p.copies.start(q_g.rows(i, ROWS), own_q_s, barriers, OWN, w)
        p.copies.start(dout_g.rows(i, ROWS), own_dout_s, barriers, OWN, w)
        walk.start()
        lse: Any = None
        zeros, by_row = mosaic.zeros((ROWS, columns), dot.layout), dot.layout.reduce(1)
        if not p.relu:
            lse = mosaic.load(_row_values(lse_g, part, i), by_row)
            products = mosaic.load(_heads(p, part, out)[0].rows(i, ROWS), dot.layout, f32)
        p.copies.wait(barriers, OWN, w)
        if not p.relu:
            minus_delta = -(products * mosaic.load_tile(own_dout_s, dot.layout, f32)).sum(1)
            values = RowValues(values_g, part).rows(i, ROWS)
            mosaic.store(values.at[0], lse)
            mosaic.store(values.at[1], minus_delta)
            mosaic.store(minus_delta_s.at[w], minus_delta)
        q, do = dot.left(own_q_s), dot.left(own_dout_s)

        def step(masked: bool, j: Any, dq: jax.Array) -> jax.Array:
            k, v = walk.arrive(j)

            def weigh(score: jax.Array) -> jax.Array:
                if masked:
                    score = _causal(score, dot.layout, i * ROWS, j * columns, rows=0)
                return _weights_again(p, score, lse, rows=0)

            # Read anew for every tile: what is kept in registers gets a copy for each of a thread's elements of a tile.
            start = zeros if p.relu else mosaic.along(mosaic.load(minus_delta_s.at[w], by_row), zeros, 0)
            (dq,) = dot.gradients((q, k.T), weigh, (do, v.T), start, partial(_dscore, p), [(dq, k)])
            return dq

        dq = mosaic.zeros((ROWS, p.HS), dot.layout)
        dq = lax.fori_loop(0, full, partial(step, False), dq)
        dq = _loop(full, end, ROWS // columns, partial(step, True), dq)
        walk.skip(end, walk.end)
        _store_gradient(p, dq * p.scale_at_end, own_q_s, _heads(p, part, dqkv)[0], _heads(p, part, sums_g)[0], i)

    _each_part(p, "dq", barriers, partial(_walk_of_queries, p, "dq", qkv, (k_s, v_s), barriers), work)


def _dkv_kernel(
    p: Problem, qkv: Any, dout: Any, values_g: Any, dqkv: Any, sums_g: Any, values_s: Any,
    k_s: Any, v_s: Any, q_s: Any, dout_s: Any, *barriers: Any,
) -> None:  # fmt: skip
    dot, columns = p.products, p.sizes.columns["dkv"]
    w, warpgroups, tiles = _warpgroup(p), p.sizes.warpgroups, ROWS // columns

    def walk_of(part: Part) -> Walk:
        sources: tuple[Any, ...] = _heads(p, part, qkv)[0], _heads(p, part, dout)[0]
        rings: tuple[Any, ...] = q_s, dout_s
        if not p.relu:
            sources, rings = (*sources, RowValues(values_g, part)), (*rings, values_s)
        begin = part.tile * warpgroups * tiles  # the first keys are seen by the most rows: again the longest first
        return Walk(begin, p.T // columns, sources, rings, columns, barriers, p, "dkv" in p.sizes.copied_apart)

    def work(part: Part, walk: Walk) -> None:
        def fetch_own(part: Part) -> None:
            for x, tile_s in zip(_heads(p, part, qkv, 3)[1:], (own_k_s, own_v_s), strict=True):
                p.copies.start(x.rows(part.tile * warpgroups + w, ROWS), tile_s, barriers, OWN, w)

        j = part.tile * warpgroups + w
        begin, full, end = j * tiles, (j + 1) * tiles, walk.end
        own_k_s, own_v_s = k_s.at[w], v_s.at[w]
        if p.sizes.held:
            pl.when(walk.before == 0)(lambda: fetch_own(part))
        else:
            fetch_own(part)
        walk.start()
        p.copies.wait(barriers, OWN, w)
        k, v, dk_s, dv_s = own_k_s, own_v_s, own_k_s, own_v_s
        if p.sizes.held:
            k, v = (mosaic.load_tile(tile, dot.layout) for tile in (k, v))
            dk_s = dv_s = k_s.at[warpgroups + w]
            mosaic.finish_reading()
            following = walk.following
            assert following is not None  # a table holds them where blocks last
            pl.when(following.sequence < p.B)(lambda: fetch_own(following))

        def step(masked: bool, i: Any, sums: list[jax.Array]) -> list[jax.Array]:
            """Do one tile, everything transposed: row u of a tile is a key, column t a query.

            The keys and values are read anew for each product, because the registers are full of dk and dv.
            """
            dk, dv = sums
            q, do, *values = walk.arrive(i)
            lse, start = None, mosaic.zeros((ROWS, columns), dot.layout)
            if not p.relu:
                here = pl.ds(i * columns % ROWS, columns)
                lse, minus_delta = (mosaic.load(values[0].at[n, here], dot.layout.reduce(0)) for n in range(2))
                start = mosaic.along(minus_delta, start, 1)

            def weigh(score: jax.Array) -> jax.Array:
                if masked:
                    score = _causal(score, dot.layout, i * columns, j * ROWS, rows=1)
                return _weights_again(p, score, lse, rows=1)

            return dot.gradients((k, q.T), weigh, (v, do.T), start, partial(_dscore, p), [(dk, q), (dv, do)])

        walk.skip(walk.begin, begin)
        sums = [mosaic.zeros((ROWS, p.HS), dot.layout)] * 2
        sums = _loop(begin, full, tiles, partial(step, True), sums)
        dk, dv = lax.fori_loop(full, end, partial(step, False), sums)
        (_, *gradients), (_, *sums_heads) = _heads(p, part, dqkv, 3), _heads(p, part, sums_g, 3)
        _store_gradient(p, dk * p.scale_at_end, dk_s, gradients[0], sums_heads[0], j)
        _store_gradient(p, dv, dv_s, gradients[1], sums_heads[1], j)

    _each_part(p, "dkv", barriers, walk_of, work)


def _loop(begin: Any, end: Any, times: int, step: Any, carry: Any) -> Any:
    """Loop so many times, without bookkeeping where that is once."""
    return step(begin, carry) if times == 1 else lax.fori_loop(begin, end, step, carry)


def _store_gradient(p: Problem, values: jax.Array, tile_s: Any, gradient: Head, sums: Head, tile: Any) -> None:
    """Write a tile of a gradient, by way of SMEM, and the sum over its rows, as they were rounded."""
    mosaic.store_tile(values.astype(p.products.dtype), tile_s, gradient.rows(tile, ROWS))
    mosaic.store(sums.row(tile), mosaic.column_sums(tile_s))


def _row_values(x: Any, part: Part, tile: Any) -> Any:
    """Return a Ref (ROWS,) of what (B, NH, T) holds of the rows of a tile."""
    return x.at[part.sequence, part.head, pl.ds(tile * ROWS, ROWS)]


def _causal(score: jax.Array, layout: Any, first_row: Any, first_column: Any, *, rows: int) -> jax.Array:
    """Put minus infinity into the scores of the future. `rows` is the axis along which t runs, the other one is u's."""
    t, u = (mosaic.iota(score.shape, axis, layout) for axis in (rows, 1 - rows))
    return jnp.where(t + (first_row - first_column) >= u, score, -math.inf)


def _weights_again(p: Problem, score: jax.Array, lse: Any, *, rows: int) -> jax.Array:
    """Return the weights of scores that are not yet scaled. A score of -inf gives 0."""
    if p.relu:
        return jnp.maximum(score * p.scale, 0)
    return jnp.exp2(score * (p.scale * LOG2E) - mosaic.along(lse, score, rows))


def _dscore(p: Problem, weights: jax.Array, dweights: jax.Array) -> jax.Array:
    """Return dscore times `scale_within`, of weights and of dweights less delta."""
    dscore = jnp.where(weights > 0, dweights, 0) if p.relu else weights * dweights
    return dscore * p.scale_within
