"""Matrix products on Hopper that end in what would be a pass over their result: the head's exp, GELU, GELU's backward.

A product of a training step writes its result to memory only for the next kernel to read it again. Here an epilogue, a
function of a piece of the sums while they are still in registers, does that kernel's work; docs/kernels/matmul.md
explains it from the beginning. Three warpgroups share a block ("ping-pong"): one starts copies, and two compute, each
a tile of its own, in turns: while one is in its epilogue, the tensor cores work for the other. Two blocks make a
cluster: their tiles lie under each other, so each copies half of what both read of the right factor, to both of them.

    grid        a cluster for each two multiprocessors, which goes round over pairs of tiles
    copies      tile after tile, 64 elements of the sum at a time, into a ring of slots that both computing warpgroups
                read: a slot is copied anew when both blocks of the cluster have read it
    epilogue    of 64 x 64 elements at a time, written to memory by way of SMEM, so that whole lines are written

No atomics: the same inputs give the same bits. Leaves out other GPUs, other dtypes than bfloat16, and products without
an epilogue, where NVIDIA's library is at least as good. Source: llmc_jax/ops/head.py and gelu.py; the scheme is
CUTLASS' "warp-specialized ping-pong".
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import gelu, mosaic
from pallas_kernels.mosaic import COMPUTING_REGISTERS, COPYING_REGISTERS, LOG2E, bf16, f32, round_up
from pallas_kernels.tuning import architecture_of, sizes

ROWS = COLUMNS = 128  # of a tile of the result: 128 registers of each thread of a warpgroup
DEPTH = 64  # of the sum that a slot holds: 128 bytes of a row, the widest swizzle
PIECE = 64  # rows and columns that an epilogue takes at a time
WORKERS, BLOCKS = 2, 2  # warpgroups of a block that compute, blocks of a cluster
STRIP = 16  # clusters' tiles below each other that are taken before the next columns: what they read stays in L2
# The largest sum of exponentials that is taken as it is: a loss of 44 nats. exp(88.7) would overflow; up to here one
# over the sum and over the tokens of a batch keeps all its digits in bfloat16 as well. Source: llmc_jax/ops/head.py.
LARGEST = 2.0**64


class Epilogue(NamedTuple):
    """The end of a product: a function of a piece of its sums; the arrays that it takes and makes, in this order."""

    # (sums (PIECE, PIECE) float32, the first one's column, vectors by row, by column, read) -> values of each output
    apply: Callable[..., Sequence[jax.Array]]
    rows: int = 0  # vectors (M,)
    columns: int = 0  # vectors (N,)
    reads: bool = False  # an array (M, N), which lies in shared memory when the sums are there
    outputs: int = 1  # arrays (M, N), in bfloat16
    # Of the first value in each tile, float32: its sum "by row" (N / COLUMNS, M) or "by column" (M / ROWS, N), or the
    # "largest by row"; empty: nothing.
    sums: str = ""


@partial(jax.jit, static_argnames=("vocab_size", "keep", "target", "interpret"))
def head_weights(
    lnf: jax.Array, wte: jax.Array, targets: jax.Array, picked: jax.Array, vocab_size: int, keep: bool = True,
    *, target: str = "sm_90", interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:  # fmt: skip
    """Return e (n, Vp) = exp(lnf wte^T - base) in bfloat16, without targets and padding, its sums (n,), and base (n,).

    lnf (n, C) and wte (Vp, C) bfloat16, targets (n,) int32, picked (n,) float32: the targets' logits. e is 0 in the
    column of the row's target and from vocab_size on. The sums are float32, of e before it is rounded. base is picked;
    of a row whose sum would be larger than LARGEST it is the largest other logit, for which the product is made again.
    keep=False: e is None, and never in memory.
    C to a multiple of 64, Vp of 128, else ValueError; n is padded to a multiple of 256, by copies.

    Compulsory bytes: 2 n C + 2 Vp C + 2 n Vp; 2 n C Vp operations, of which d12's 65,536 rows have 5.1e12: 5.1 ms at an
    H200's peak. Source: llmc_jax/ops/head.py, `head_weights`; docs/derivations/head.md.
    """
    n, name = lnf.shape[0], "head_weights" if keep else "head_totals"
    lnf, targets, picked = (_padded(each, round_up(n, ROWS * BLOCKS)) for each in (lnf, targets, picked))

    def product(apply: Callable[..., Any], sums: str, beside: jax.Array, more: str = "", **how: Any) -> list[jax.Array]:
        """Return what the product gives with an epilogue. beside (n,): what that takes of each row but the target."""
        epilogue = Epilogue(apply, rows=2, outputs=int(keep and sums == "by row"), sums=sums)
        rows = [targets.astype(jnp.int32), beside]
        return _product(lnf, wte, rows, epilogue, target, interpret, name=name + more, **how)

    def others(column: Any, sums: jax.Array, wanted: jax.Array) -> jax.Array:
        """Return which elements of a piece are real logits of other tokens than the row's target."""
        here = mosaic.iota(sums.shape, 1, mosaic.WGMMA)
        return (here != mosaic.along(wanted - column, here, 0)) & (here < vocab_size - column)

    def exponentials(sums: jax.Array, column: Any, rows: Any, *_: Any) -> list[jax.Array]:
        e = jnp.exp2(sums * LOG2E - mosaic.along(rows[1], sums, 0))
        return [jnp.where(others(column, sums, rows[0]), e, 0.0)]

    def logits(sums: jax.Array, column: Any, rows: Any, *_: Any) -> list[jax.Array]:
        return [jnp.where(others(column, sums, rows[0]), sums, -jnp.inf)]

    *e, shares = product(exponentials, "by row", picked * LOG2E)
    total = jnp.sum(shares, axis=0)
    again = ~(total <= LARGEST)  # also where it is no number
    run = jnp.any(again)
    (largest,) = product(logits, "largest by row", picked, "_largest", run=run)
    base = jnp.where(again, jnp.max(largest, axis=0), picked)
    *e, shares = product(exponentials, "by row", base * LOG2E, "_again", run=run, over=e)
    total = jnp.where(run, jnp.sum(shares, axis=0), total)
    return e[0][:n] if keep else None, total[:n], base[:n]


@partial(jax.jit, static_argnames=("target", "interpret"))
def linear_gelu_forward(
    x: jax.Array, w: jax.Array, b: jax.Array, *, target: str = "sm_90", interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return h = x w^T + b (..., O) and GELU of h as it was rounded, both bfloat16; x (..., I), w (O, I), b (O,).

    I to a multiple of 64, O of 128, else ValueError; the rows of x are padded to a multiple of 256, by copies.
    GELU's bits are those of `gelu.gelu_forward` of h, so that a backward may compute it again.

    Compulsory bytes of n rows: 2 n I + 4 n O + 2 O I. Source: llmc_jax/ops/gelu.py, `linear_gelu_forward`.
    """

    def apply(sums: jax.Array, _column: Any, _rows: Any, columns: Any, *_: Any) -> list[jax.Array]:
        h = (sums + mosaic.along(columns[0].astype(f32), sums, 1)).astype(bf16)
        return [h, gelu.forward(mosaic.widened(h, mosaic.WGMMA, interpret))]

    epilogue = Epilogue(apply, columns=1, outputs=2)
    h, out = _product(x, w, [b], epilogue, target, interpret, name="linear_gelu_forward")
    return h, out


@partial(jax.jit, static_argnames=("target", "interpret"))
def linear_gelu_backward(
    dout: jax.Array, w: jax.Array, h: jax.Array, *, target: str = "sm_90", interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of h (..., I) through GELU and the linear layer after it, and its sum over all rows (I,).

    dout (..., O), w (O, I), h (..., I), bfloat16 all; both results too. The sum is of the gradient as it was rounded.
    O to a multiple of 64, I of 128, else ValueError; the rows are padded to a multiple of 256, by copies.

    Compulsory bytes of n rows: 2 n O + 4 n I + 2 O I. Source: llmc_jax/ops/gelu.py, `linear_gelu_backward`.
    """

    def apply(sums: jax.Array, _column: Any, _rows: Any, _columns: Any, read: jax.Array) -> list[jax.Array]:
        return [gelu.backward(sums, mosaic.widened(read, mosaic.WGMMA, interpret))]

    epilogue = Epilogue(apply, reads=True, sums="by column")
    dh, shares = _product(dout, w, [h], epilogue, target, interpret, name="linear_gelu_backward", transposed=False)
    return dh, jnp.sum(shares, axis=0).astype(h.dtype)


# ----- a product, for any epilogue ----------------------------------------------------------------------------------


class Problem(NamedTuple):
    """The sizes that a kernel is made for. Static."""

    M: int  # rows of the result, a multiple of a cluster's
    N: int  # its columns, a multiple of COLUMNS
    K: int  # of the sum, a multiple of DEPTH
    transposed: bool  # the right factor is (N, K), else (K, N)
    clusters: int
    stages: int  # slots of the ring
    epilogue: Epilogue
    interpret: bool
    asks: bool = False  # whether to run at all: what a number in memory says

    @property
    def steps(self) -> int:
        """Return the slots that a tile's sum is read from, one after another."""
        return self.K // DEPTH

    @property
    def tiles(self) -> int:
        """Return the tiles of a cluster, one for each of its blocks."""
        return self.M // (ROWS * BLOCKS) * (self.N // COLUMNS)

    def place(self, tile: Any) -> tuple[Any, Any]:
        """Return the first row of a cluster's tile, and its first column: down a strip of rows, then to the right."""
        high, wide = self.M // (ROWS * BLOCKS), self.N // COLUMNS
        strip, within = lax.div(tile, STRIP * wide), lax.rem(tile, STRIP * wide)
        below = jnp.minimum(STRIP, high - strip * STRIP)
        row, column = strip * STRIP + lax.rem(within, below), lax.div(within, below)
        return row * (ROWS * BLOCKS), column * COLUMNS


SLOT_BYTES = 2 * (ROWS + COLUMNS) * DEPTH
STAGED = (ROWS // PIECE) * (COLUMNS // PIECE)  # pieces of a tile, for each of which there is a place in SMEM


def _product(
    a: jax.Array,
    b: jax.Array,
    beside: Sequence[jax.Array],
    epilogue: Epilogue,
    target: str,
    interpret: bool,
    *,
    name: str,
    transposed: bool = True,
    run: jax.Array | None = None,
    over: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Return an epilogue's outputs, and its sums, of a (..., K) times b (N, K) transposed, or (K, N).

    beside: what the epilogue takes besides. run: a bool; where it is false nothing is computed, and what is returned
    is what was there before. over: the outputs, if they exist; they are changed in place.
    Raises ValueError for shapes and dtypes that the kernel does not serve.
    """
    p = _problem(a, b, epilogue, target, interpret, transposed)
    rows, wide = a.size // p.K, (p.M, p.N)
    kinds = ["row"] * epilogue.rows + ["column"] * epilogue.columns + ["read"] * epilogue.reads
    given = [_padded(a.reshape(rows, p.K), p.M), b]
    for kind, array in zip(kinds, beside, strict=True):
        flat = array.reshape(rows, p.N) if kind == "read" else array
        given.append(flat if kind == "column" else _padded(flat, p.M))
    if run is not None:
        given.append(run.reshape(1).astype(jnp.int32))
    sums = {"": [], "by column": [(p.M // ROWS, p.N)]}.get(epilogue.sums, [(p.N // COLUMNS, p.M)])
    made = [] if over else [mosaic.shape_of(wide, bf16)] * epilogue.outputs
    slots = (p.stages, ROWS, DEPTH), (p.stages, COLUMNS, DEPTH) if transposed else (p.stages, DEPTH, COLUMNS)
    call = mosaic.kernel(
        partial(_body, p._replace(asks=run is not None)),
        name=name,
        out_type=[*made, *(mosaic.shape_of(shape, f32) for shape in sums)],
        grid=(p.clusters,),
        grid_names=("cluster",),
        blocks=BLOCKS,
        scratch=[
            *[mosaic.tile_spec(shape, bf16) for shape in slots],
            *([mosaic.tile_spec((WORKERS, COLUMNS // PIECE, ROWS, PIECE), bf16)] if epilogue.outputs else []),
            *_copies(p).barriers((WORKERS * p.stages, 2)),
            mosaic.barriers_of_a_cluster(p.stages),
            *(_copies(p).barriers((WORKERS, STAGED)) if epilogue.reads else []),
        ],
        approx_math=True,
        sums_cross_warps=False,
        warpgroups=WORKERS + 1,
        interpret=interpret,
    )
    found, changed = mosaic.in_place(call, given, [_padded(each.reshape(rows, p.N), p.M) for each in over])
    found = [*changed, *found]
    outputs = [each[:rows].reshape(*a.shape[:-1], p.N) for each in found[: epilogue.outputs]]
    return [*outputs, *found[epilogue.outputs :]]


def _problem(a: jax.Array, b: jax.Array, epilogue: Epilogue, target: str, interpret: bool, transposed: bool) -> Problem:
    """Check shapes and dtypes. Raises ValueError with what is possible."""
    if architecture_of(target) != "sm_90":
        raise ValueError(f"the products are made of Hopper's instructions (sm_90), not for {architecture_of(target)}")
    N, K = b.shape if transposed else b.shape[::-1]
    if a.dtype != bf16 or b.dtype != bf16:
        raise ValueError(f"the products take bfloat16, not {a.dtype} and {b.dtype}")
    if a.shape[-1] != K or K % DEPTH or N % COLUMNS:
        raise ValueError(
            f"the products take {N} columns and a sum over {K} of a {a.shape}: the sum must be over a multiple of "
            f"{DEPTH}, the columns a multiple of {COLUMNS}"
        )
    size = sizes(target)
    M = round_up(a.size // K, ROWS * BLOCKS)
    staged = 2 * WORKERS * STAGED * PIECE * PIECE if epilogue.outputs else 0
    stages = min((size.smem - staged - 1024) // SLOT_BYTES, 4 if interpret else 6)
    p = Problem(M, N, K, transposed, 0, stages, epilogue, interpret)
    return p._replace(clusters=min(2 if interpret else size.sms // BLOCKS, p.tiles))


def _padded(x: jax.Array, rows: int) -> jax.Array:
    return x if x.shape[0] == rows else jnp.pad(x, [(0, rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])


# ----- the kernel ---------------------------------------------------------------------------------------------------

FULL, RELEASED, READ = 0, 1, 2  # kinds of barriers: a slot is there; all who read it are done; what is read is there
PIECES = [(r, c) for c in range(COLUMNS // PIECE) for r in range(ROWS // PIECE)]  # of a tile, as they lie in SMEM


class Refs(NamedTuple):
    """A block's arrays; of those that a kernel may lack a list of one or none."""

    a: Any
    b: Any
    rows: list[Any]  # by what the epilogue calls them, in GMEM
    columns: list[Any]
    read: list[Any]
    run: list[Any]
    outputs: list[Any]
    sums: list[Any]
    a_s: Any  # the ring, in SMEM
    b_s: Any
    staged: list[Any]  # a tile of each worker, on its way out or in
    barriers: list[Any]


def _refs(p: Problem, a: Any, b: Any, *refs: Any) -> Refs:
    """Return a kernel's refs by name."""
    rest, given = iter(refs), p.epilogue

    def take(count: int) -> list[Any]:
        return [next(rest) for _ in range(count)]

    rows, columns, read, run = (take(count) for count in (given.rows, given.columns, given.reads, p.asks))
    outputs, sums, (a_s, b_s) = take(given.outputs), take(bool(given.sums)), take(2)
    return Refs(a, b, rows, columns, read, run, outputs, sums, a_s, b_s, take(bool(given.outputs)), list(rest))


def _body(p: Problem, *refs: Any) -> None:
    found = _refs(p, *refs)
    worker, cluster = lax.axis_index("warpgroup"), lax.axis_index("cluster")
    count = lax.div(p.tiles - cluster + p.clusters - 1, p.clusters)  # of this cluster's tiles
    if found.run:
        count *= found.run[0][0]

    @pl.when(worker < WORKERS)
    def _() -> None:
        mosaic.set_registers(COMPUTING_REGISTERS, more=True)
        turns = lax.div(count - worker + WORKERS - 1, WORKERS)
        lax.fori_loop(0, turns, lambda i, _: _compute(p, found, worker, i * WORKERS + worker), None)
        if found.outputs:
            mosaic.wait_for_sent(0, arrived=True)

    @pl.when(worker == WORKERS)
    def _() -> None:
        mosaic.set_registers(COPYING_REGISTERS, more=False)
        _copy(p, found, count * p.steps)


def _place(p: Problem, j: Any) -> tuple[Any, Any]:
    """Return the first row and column of this block's j-th tile."""
    row, column = p.place(lax.axis_index("cluster") + j * p.clusters)
    return row + lax.axis_index("block") * ROWS, column


def _copies(p: Problem) -> mosaic.Copies:
    return mosaic.Copies("sm_90", p.interpret)


def _copy(p: Problem, refs: Refs, total: Any) -> None:
    """Fill slots, tile after tile; at the end wait until all have been read, in the other block too.

    total: steps of all tiles together.
    """
    copies, barriers = _copies(p), refs.barriers

    def released(step: Any) -> None:
        copies.wait(barriers, RELEASED, lax.rem(step, p.stages))

    def fill(step: Any, _: None) -> None:
        j, k = lax.div(step, p.steps), lax.rem(step, p.steps)
        slot = lax.rem(step, p.stages)
        full = lax.rem(j, WORKERS) * p.stages + slot
        row, column = _place(p, j)
        depth, columns = pl.ds(k * DEPTH, DEPTH), pl.ds(column, COLUMNS)
        pl.when(step >= p.stages)(lambda: released(step))
        copies.start(refs.a.at[pl.ds(row, ROWS), depth], refs.a_s.at[slot], barriers, FULL, full)
        right = refs.b.at[columns, depth] if p.transposed else refs.b.at[depth, columns]
        copies.start(right, refs.b_s.at[slot], barriers, FULL, full, to_all=True)

    lax.fori_loop(0, total, fill, None)
    lax.fori_loop(jnp.maximum(total - p.stages, 0), total, lambda step, _: released(step), None)


def _compute(p: Problem, refs: Refs, worker: Any, j: Any) -> None:
    """Do the j-th tile."""
    copies, barriers, (row, column) = _copies(p), refs.barriers, _place(p, j)

    def slot(k: Any) -> Any:
        return lax.rem(j * p.steps + k, p.stages)

    def operands(k: Any) -> tuple[Any, Any]:
        copies.wait(barriers, FULL, worker * p.stages + slot(k))
        right = refs.b_s.at[slot(k)]
        return refs.a_s.at[slot(k)], right.T if p.transposed else right

    if refs.read:
        mosaic.wait_for_sent(0)
        mosaic.finish_reading()
        for piece in PIECES:
            source, tile_s = _piece(refs.read[0], row, column, piece), _staged(refs, worker, piece)
            copies.start(source, tile_s, barriers, READ, worker)
    products = mosaic.WgmmaProducts(bf16, p.interpret)
    sums = products.summed((ROWS, COLUMNS), p.steps, operands, lambda k: copies.release(barriers, RELEASED, slot(k)))
    _finish(p, refs, worker, row, column, sums)


def _piece(array: Any, row: Any, column: Any, piece: tuple[int, int]) -> Any:
    """Return a Ref (PIECE, PIECE) of a piece of the tile at row, column of an array (M, N) in GMEM."""
    r, c = piece
    return array.at[pl.ds(row + r * PIECE, PIECE), pl.ds(column + c * PIECE, PIECE)]


def _staged(refs: Refs, worker: Any, piece: tuple[int, int]) -> Any:
    """Return a Ref (PIECE, PIECE) of a worker's place of a piece in SMEM."""
    r, c = piece
    return refs.staged[0].at[worker, c, pl.ds(r * PIECE, PIECE)]


def _finish(p: Problem, refs: Refs, worker: Any, row: Any, column: Any, sums: jax.Array) -> None:
    """Apply the epilogue to a tile's sums, piece by piece, and send off what it gives."""
    epilogue = p.epilogue
    # Loaded here and not before the sums: else the compiler releases the last slot only when all this is computed.
    by_row = [
        [mosaic.load(each.at[pl.ds(row + r * PIECE, PIECE)], mosaic.WGMMA.reduce(1)) for each in refs.rows]
        for r in range(ROWS // PIECE)
    ]
    if refs.read:
        _copies(p).wait(refs.barriers, READ, worker)
    of_rows: dict[int, jax.Array] = {}
    for n, (r, c) in enumerate(PIECES):
        part = sums[r * PIECE : (r + 1) * PIECE, c * PIECE : (c + 1) * PIECE]
        columns = pl.ds(column + c * PIECE, PIECE)
        by_column = [mosaic.load(each.at[columns], mosaic.WGMMA.reduce(0)) for each in refs.columns]
        read = mosaic.load_tile(_staged(refs, worker, (r, c)), mosaic.WGMMA) if refs.read else None
        values = epilogue.apply(part, column + c * PIECE, by_row[r], by_column, read)
        for o, (value, output) in enumerate(zip(values, refs.outputs, strict=False)):
            tile_s = _staged(refs, worker, PIECES[(n * epilogue.outputs + o) % STAGED])
            if not refs.read:
                mosaic.wait_for_sent(STAGED - 1)
            tile_s[...] = value.astype(bf16)
            mosaic.send(tile_s, _piece(output, row, column, (r, c)))
        if epilogue.sums == "by column" and r == ROWS // PIECE - 1:
            mosaic.store(refs.sums[0].at[lax.div(row, ROWS), columns], mosaic.column_sums(refs.staged[0].at[worker, c]))
        elif epilogue.sums == "by row":
            of_rows[r] = of_rows.get(r, 0.0) + values[0].sum(1)
        elif epilogue.sums == "largest by row":
            largest = values[0].max(1)
            of_rows[r] = jnp.maximum(of_rows[r], largest) if r in of_rows else largest
    for r, found in of_rows.items():
        mosaic.store(refs.sums[0].at[lax.div(column, COLUMNS), pl.ds(row + r * PIECE, PIECE)], found)
