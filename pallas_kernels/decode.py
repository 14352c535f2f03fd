"""One token of each of a few texts: GPT-2's products of few rows with whatever stands around them, and its attention.

    norm_linear       layernorm of the stream, a product with it, and GELU if asked for: qkv, fc, lnf with the head
    attention_step    one position over those before it, whose keys and values are in a cache
    linear_residual   a product that is added to the stream: attproj, fcproj

A product of few rows takes as long as its weights take to arrive, so it is computed on the CUDA cores, in float32, and
each block of threads asks for its weights first and prepares the rows meanwhile: all blocks normalise the stream anew,
which spares a kernel. Each weight is read once for all texts. A warp holds whole rows of weights, so that a sum is five
shuffles; a row of four times C channels lies over the four warps. No sum depends on how many texts there are.

The weights come as one array: the model's flat buffer as rows of C channels, where every tensor begins with a row. The
layer is an operand, so that all layers share one lowering. Leaves out every attention but the causal one with softmax,
the embedding, and more than `TEXTS` texts, for which tensor cores are due.

Source of the mathematics: llmc_jax/models/gpt2/decode.py, which XLA compiles, with the same roundings but for
attention's weights, which stay in float32.
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

from pallas_kernels import gelu as gelu_of, mosaic
from pallas_kernels.layernorm import EPS
from pallas_kernels.mosaic import LANES, LOG2E, THREADS, WARPS, along, f32, load, store, widest
from pallas_kernels.tuning import HEAD_SIZES, sizes

TEXTS = 16  # at most
LOWEST = -1e30  # a running maximum before the first score; a score that is not seen is half as high again
TILES = 4  # of four rows of weights, in a block
HELD = 100  # float32 numbers of its weights that a thread has in registers at a time
ROWS_HELD = 128  # and of the stream, while it is normalised


class Tensor(NamedTuple):
    """Where a tensor lies in the model's rows of C channels."""

    first: int  # row with which it begins
    of_layer: int = 0  # rows of each layer; 0: it belongs to none


class Product(NamedTuple):
    """What a kernel of products does."""

    weight: Tensor
    bias: Tensor | None
    outputs: int
    norm: tuple[Tensor, Tensor] | None = None  # weight and bias of the layernorm before it; None: the stream is added
    gelu: bool = False
    wide: int = 1  # rows of C channels that make one of weights: 1, or 4, of which each warp has one
    tiles: int = TILES  # that a block multiplies, of four rows each
    held: int = TILES  # of which so many at a time


# ----- products -----------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("norm", "weight", "bias", "outputs", "gelu", "out_dtype", "target", "interpret"))
def norm_linear(
    x: jax.Array,
    rows: jax.Array,
    layer: jax.Array,
    *,
    norm: tuple[Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    outputs: int,
    gelu: bool = False,
    out_dtype: Any = None,
    target: str = "sm_90",
    interpret: bool = False,
) -> jax.Array:
    """Return layernorm(x) W^T + b of a layer, (B, outputs), and GELU of it if asked for.

    x (B, C), the stream; rows (R, C), the model, in x's dtype: bf16, fp16 or fp32; layer, an int32 scalar; norm: the
    layernorm's weight and bias; weight (outputs, C), bias (outputs,) or None: where they lie. out_dtype: of the result, x's
    by default; it has been rounded to x's in any case, after the product, after the bias and after GELU.
    Compulsory bytes: itemsize (outputs C + outputs + 2 C + B (C + outputs)). For d12's qkv in bf16 3.5 MB, so 0.74 us
    at 4.8 TB/s. Raises ValueError for more than 16 texts, for C that 32 does not divide, and outputs that 16 does not.
    """
    p = Product(weight, bias, outputs, norm, gelu)
    return _multiplied(p, x, None, rows, layer, jnp.dtype(out_dtype or x.dtype), target, interpret)


@partial(jax.jit, static_argnames=("weight", "bias", "target", "interpret"))
def linear_residual(
    x: jax.Array,
    a: jax.Array,
    rows: jax.Array,
    layer: jax.Array,
    *,
    weight: Tensor,
    bias: Tensor,
    target: str = "sm_90",
    interpret: bool = False,
) -> jax.Array:
    """Return x + (a W^T + b) of a layer, (B, C) in x's dtype; rounded to it after the product, each time.

    x (B, C), the stream; a (B, C) or (B, 4 C); weight (C, C) or (C, 4 C), bias (C,): where they lie in `rows`. All in
    one dtype; otherwise as `norm_linear`. Compulsory bytes of d12's fcproj in bf16: 4.7 MB, 0.98 us at 4.8 TB/s.
    """
    C = x.shape[-1]
    if a.shape not in ((len(x), C), (len(x), 4 * C)):
        raise ValueError(f"a {a.shape} and x {x.shape}: expected (B, C) or (B, 4 C), and (B, C)")
    p = Product(weight, bias, C, wide=a.shape[1] // C)
    return _multiplied(p, x, a, rows, layer, x.dtype, target, interpret)


def _multiplied(
    p: Product, x: jax.Array, a: jax.Array | None, rows: jax.Array, layer: jax.Array, dtype: Any, target: str,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """Return what a product's kernel makes of the stream x and of a."""
    (B, C), size = x.shape, sizes(target)
    if not 0 < B <= TEXTS:
        raise ValueError(f"{B} texts: these kernels take 1 to {TEXTS}; XLA's products take more")
    if C % LANES or p.outputs % (WARPS * TILES) or rows.shape[1:] != (C,):
        raise ValueError(
            f"x {x.shape}, rows {rows.shape}, {p.outputs} outputs: C must be both last axes and a multiple of {LANES}, "
            f"outputs one of {WARPS * TILES}"
        )
    if {each.dtype for each in (x, rows, x if a is None else a)} != {x.dtype}:
        raise ValueError(f"x is {x.dtype} and the model {rows.dtype}: all must have one dtype")
    if p.norm and B * C * x.dtype.itemsize + 2048 > size.smem:  # only float32's longest rows
        halves = (_multiplied(p, half, None, rows, layer, dtype, target, interpret) for half in (x[:8], x[8:]))
        return jnp.concatenate(list(halves))
    tiles, held = TILES, TILES
    while p.wide == 1 and tiles > 1 and p.outputs // (WARPS * tiles) < size.sms:
        tiles //= 2
    while held > 1 and held * C // LANES > HELD:
        held //= 2
    p = p._replace(tiles=tiles, held=min(tiles, held))
    kept = [mosaic.shared((B, part.size), x.dtype) for part in _parts(x) if p.norm and B >= WARPS]
    kept += [mosaic.shared((B, tiles, p.wide))] if p.wide > 1 else []
    given = [x, *([] if a is None else [a.reshape(B * p.wide, C)]), rows, layer.reshape(1)]
    return mosaic.kernel(
        mosaic.without(partial(_product, p=p, interpret=interpret), [1] if a is None else []),
        name="norm_linear" if p.norm else "linear_residual",
        out_type=mosaic.shape_of((B, p.outputs), dtype),
        grid=(p.outputs * p.wide // (WARPS * tiles),),
        grid_names=("block",),
        scratch=[*kept, mosaic.barrier()] if kept else [],
        approx_math=True,  # GELU's exponential
        auto_barriers=False,  # where a thread reads what another wrote, `meet` stands between
        sums_cross_warps=False,
        interpret=interpret,
    )(*given)


def _parts(x: Any) -> list[mosaic.Part]:
    """Return how four rows of C channels lie in registers, one in each warp."""
    return mosaic.row_parts(x.shape[1], 1, widest(x.dtype))


def _product(
    x_ref: Any, a_ref: Any, rows_ref: Any, layer_ref: Any, out_ref: Any, *scratch: Any, p: Product, interpret: bool
) -> None:
    """Multiply a block's rows of weights with all texts."""
    B, C = x_ref.shape
    layer, block = layer_ref[0], lax.axis_index("block")
    parts = _parts(x_ref)
    of_rows = (parts[0].layout if p.wide == 1 else mosaic.FOURS).reduce(1)  # of four numbers, each a warp's
    begin = block * (WARPS * p.tiles)  # of the rows of weights
    first = begin // p.wide  # of the outputs

    def vector(tensor: Tensor, place: Any) -> jax.Array:
        """Read four of a bias."""
        row = tensor.first + layer * tensor.of_layer + place // C
        return load(rows_ref.at[row, pl.ds(place % C, WARPS)], of_rows, f32)

    def tile(i: int) -> list[jax.Array]:
        here = pl.ds(p.weight.first + layer * p.weight.of_layer + begin + WARPS * i, WARPS)
        return [load(rows_ref.at[here, part.columns], part.layout) for part in parts]

    def finish(b: Any, place: Any, sums: jax.Array, bias: jax.Array | None) -> None:
        """Store four results of a text, rounded as XLA's operations round."""
        y = sums.astype(x_ref.dtype).astype(f32)
        if bias is not None:
            y = (y + bias).astype(x_ref.dtype).astype(f32)
        if p.gelu:
            y = gelu_of.forward(y, exact=x_ref.dtype == f32).astype(x_ref.dtype).astype(f32)
        here = pl.ds(place, WARPS)
        if p.norm is None:
            y = (load(x_ref.at[b, here], of_rows, f32) + y).astype(x_ref.dtype)
        store(out_ref.at[b, here], y.astype(out_ref.dtype))

    weights = [tile(i) for i in range(p.held)]  # under way while the rows are prepared
    places = [first + WARPS * i for i in range(p.tiles // p.wide)]
    biases = [None if p.bias is None else vector(p.bias, place) for place in places]
    rows = _operands(x_ref, a_ref, rows_ref, layer, scratch, p)
    for start in range(0, p.tiles, p.held):
        if start:
            weights = [tile(start + i) for i in range(p.held)]
        wide = [
            [mosaic.widened(w, part.layout, interpret) for w, part in zip(ws, parts, strict=True)] for ws in weights
        ]

        def multiply(b: Any, wide: list[list[jax.Array]] = wide, start: int = start) -> None:
            row = rows(b)
            for i, ws in enumerate(wide):
                sums = reduce(add, [(w * x).sum(1) for w, x in zip(ws, row, strict=True)])  # (4,)
                if p.wide == 1:
                    finish(b, places[start + i], sums, biases[start + i])
                else:
                    store(scratch[0].at[b, start + i], sums)

        _each(B, multiply)
    if p.wide > 1:  # the four warps' sums are of one row each
        mosaic.meet(scratch[-1])

        def add_up(b: Any) -> None:
            finish(b, first, load(scratch[0].at[b], mosaic.FOURS).sum(1), biases[0])

        _each(B, add_up)


def _each(count: int, do: Callable[[Any], None]) -> None:
    """Do something for each text; four at a time, so that one's latencies hide behind the others'."""
    if count >= WARPS:

        @pl.loop(0, count // WARPS)
        def _(k: Any) -> None:
            for i in range(WARPS):
                do(k * WARPS + i)

    for i in range(count // WARPS * WARPS, count):
        do(i)


def _operands(
    x_ref: Any, a_ref: Any, rows_ref: Any, layer: Any, scratch: Any, p: Product
) -> Callable[[Any], list[jax.Array]]:
    """Return a function of a text: what its weights are multiplied with, in float32, (4, part) of each part.

    Without a layernorm that is read where it is wanted. Up to three normalised rows stay in registers, in every warp;
    more are normalised each by one warp and meet in shared memory.
    """
    B, C = x_ref.shape
    parts = _parts(x_ref)

    def repeated(refs: list[Any]) -> list[jax.Array]:
        """Read a row, of which each part has a Ref, for all four warps."""
        return [
            lax.broadcast_in_dim(load(ref, part.layout.reduce(0), f32), (WARPS, part.size), (1,))
            for ref, part in zip(refs, parts, strict=True)
        ]

    def row(ref: Any, b: Any) -> list[jax.Array]:
        return repeated([ref.at[b, part.columns] for part in parts])

    def read(b: Any) -> list[jax.Array]:
        if p.wide == 1:
            return row(a_ref, b)
        return [load(a_ref.at[pl.ds(b * WARPS, WARPS), part.columns], part.layout, f32) for part in parts]

    if p.norm is None:
        return read
    w, b = (row(rows_ref, tensor.first + layer * tensor.of_layer) for tensor in p.norm)

    def normalised(x: list[jax.Array]) -> list[jax.Array]:
        mean = reduce(add, [values.sum(1) for values in x]) / C  # (4,)
        centred = [values - along(mean, values, 0) for values in x]
        rstd = lax.rsqrt(reduce(add, [(values * values).sum(1) for values in centred]) / C + EPS)
        return [
            (values * along(rstd, values, 0) * w + b).astype(x_ref.dtype)
            for values, w, b in zip(centred, w, b, strict=True)
        ]

    if B < WARPS:
        held = [normalised(row(x_ref, text)) for text in range(B)]
        return lambda text: [values.astype(f32) for values in held[text]]

    *kept, barrier = scratch
    tiles = -(-B // WARPS)
    together = max(n for n in (1, 2, 4) if tiles % n == 0 and (n == 1 or n * C // LANES <= ROWS_HELD))

    @pl.loop(0, tiles // together)
    def _(k: Any) -> None:
        # The last tile begins early enough to end with the last row; some rows are normalised twice then.
        places = [pl.ds(jnp.minimum((k * together + i) * WARPS, B - WARPS), WARPS) for i in range(together)]
        loaded = [[load(x_ref.at[place, part.columns], part.layout) for part in parts] for place in places]
        for place, x in zip(places, loaded, strict=True):
            for ref, values in zip(kept, normalised([values.astype(f32) for values in x]), strict=True):
                store(ref.at[place], values)

    mosaic.meet(barrier)
    return lambda text: repeated([ref.at[text] for ref in kept])


# ----- attention ----------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames=("target", "interpret"))
def attention_step(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    position: jax.Array,
    *,
    target: str = "sm_90",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return causal attention of one position (B, C), and the caches with its keys and values.

    qkv (B, 3 C) bf16, fp16 or fp32; keys and values (L, B NH, S, HS) in its dtype, of all layers, in place where the
    caller donates them; layer and position, below S, int32 scalars. What the cache holds from the position on may be
    any finite number. Scores are scaled by 1 / sqrt(HS); weights stay in float32.

    Compulsory bytes: 2 B C (position + 1) itemsize, and of qkv, out and what is put into the cache 6 B C itemsize. For
    d12, one text, position 1023 and bf16 3.2 MB. One block of threads does a head of a text, so one text keeps NH
    multiprocessors busy: a head's 256 KB take one of an H200 no less than 2.3 us, at 64 bytes a cycle.
    Raises ValueError for heads that are no multiple of 16 up to 128, and S that 128 does not divide.
    """
    (L, heads, S, HS), (B, Q) = keys.shape, qkv.shape
    if B == 0 or heads % B or Q != 3 * heads // B * HS or values.shape != keys.shape or S % THREADS:
        raise ValueError(
            f"qkv {qkv.shape}, keys {keys.shape}, values {values.shape}: expected (B, 3 NH HS) and twice "
            f"(L, B NH, S, HS), S a multiple of {THREADS}"
        )
    if HS not in HEAD_SIZES or {keys.dtype, values.dtype} != {qkv.dtype}:
        raise ValueError(f"heads of {HS} channels, {qkv.dtype} and {keys.dtype}: HS 16, 32, … 128 and one dtype can be")
    warpgroups = sizes(target).decode_warpgroups
    _, at_once = _lanes(HS, qkv.dtype)
    call = mosaic.kernel(
        partial(_attend, NH=heads // B, interpret=interpret),
        name="attention_step",
        out_type=mosaic.shape_of((B, Q // 3), qkv.dtype),
        grid=(heads,),
        grid_names=("head",),
        scratch=[
            mosaic.shared((2, warpgroups * at_once)), mosaic.shared((warpgroups * at_once, HS)),
            mosaic.barrier(warpgroups),
        ],
        approx_math=True,  # ex2.approx is right to 2 units in the last place of fp32
        auto_barriers=False,  # where a thread reads what another wrote, `meet` stands between
        sums_cross_warps=False,
        warpgroups=warpgroups,
        interpret=interpret,
    )  # fmt: skip
    out, (keys, values) = mosaic.in_place(call, (qkv, layer.reshape(1), position.reshape(1)), (keys, values))
    return out, keys, values


def _lanes(HS: int, dtype: Any) -> tuple[Any, int]:
    """Return the layout of keys or values (positions, HS), and how many positions a warpgroup holds with one access.

    Four lanes or more share a position; a sum over it stays within them.
    """
    vector = widest(dtype)
    while HS % (4 * vector):
        vector //= 2
    lanes = math.gcd(HS // vector, LANES // 2)
    return mosaic.cell_layout(lanes, vector), WARPS * LANES // lanes


def _attend(
    qkv_ref: Any, layer_ref: Any, position_ref: Any, keys_ref: Any, values_ref: Any, out_ref: Any,
    states: Any, sums: Any, barrier: Any, *, NH: int, interpret: bool,
) -> None:  # fmt: skip
    """Do one head of one text: each warpgroup its share of the positions, then the first adds up.

    Every place of a warpgroup's tile has a softmax of its own: maximum, total and weighted values of each
    `at_once`th position. They meet once, at the end. The position itself begins the first one: it comes from registers.
    """
    _, _, _, HS = keys_ref.shape
    layout, at_once = _lanes(HS, qkv_ref.dtype)
    tile = at_once  # positions whose keys and values are on their way together, 64 registers
    while tile < THREADS and 2 * tile * HS * qkv_ref.dtype.itemsize <= 2**14:
        tile *= 2
    row, group, groups = lax.axis_index("head"), lax.axis_index("warpgroup"), lax.axis_size("warpgroup")
    layer, position = layer_ref[0], position_ref[0]
    scale = LOG2E / math.sqrt(HS)
    wide = partial(mosaic.widened, layout=layout, interpret=interpret)
    here = (lax.rem(row, NH) * HS, lax.div(row, NH))
    q, k, v = (load(qkv_ref.at[here[1], pl.ds(i * NH * HS + here[0], HS)], layout.reduce(0)) for i in range(3))
    shape = at_once, HS
    slot = mosaic.iota((at_once,), 0, layout.reduce(1))
    q, own_k, own_v = (lax.broadcast_in_dim(each.astype(f32), shape, (1,)) for each in (q, k, v))  # (at_once, HS)
    begins = (slot == 0) & (group == 0)
    top = jnp.where(begins, (q * own_k).sum(1) * scale, LOWEST)
    total = jnp.where(begins, 1.0, 0.0)
    acc = own_v * along(total, own_v, 0)

    def step(t: Any, state: Any) -> Any:
        top, total, acc = state
        start = (t * groups + group) * tile
        places = [pl.ds(start + i, at_once) for i in range(0, tile, at_once)]
        ks, vs = ([load(ref.at[layer, row, at], layout) for at in places] for ref in (keys_ref, values_ref))
        scores = [(q * wide(k)).sum(1) * scale for k in ks]
        scores = [
            jnp.where(start + i * at_once + slot < position, score, 1.5 * LOWEST) for i, score in enumerate(scores)
        ]
        new = reduce(jnp.maximum, scores, top)
        shrunk = jnp.exp2(top - new)
        weights = [jnp.exp2(score - new) for score in scores]
        acc = acc * along(shrunk, acc, 0)
        for weight, v in zip(weights, vs, strict=True):
            acc = acc + along(weight, acc, 0) * wide(v)
        return new, reduce(add, weights, total * shrunk), acc

    steps = pl.cdiv(jnp.maximum(position - group * tile, 0), groups * tile)
    top, total, acc = lax.fori_loop(0, steps, step, (top, total, acc))

    @pl.when(lax.rem(lax.div(position, tile), groups) == group)  # who alone may have read there
    def _() -> None:
        for ref, each in ((keys_ref, k), (values_ref, v)):
            store(ref.at[layer, row, position], each)

    own = pl.ds(group * at_once, at_once)
    store(states.at[0, own], top)
    store(states.at[1, own], total)
    store(sums.at[own], acc)
    mosaic.meet(barrier)

    @pl.when(group == 0)
    def _() -> None:
        found = load(sums, mosaic.COLUMNS)  # (rows, HS)
        top, total = (
            lax.broadcast_in_dim(load(states.at[i], mosaic.COLUMNS.reduce(1)), found.shape, (0,)) for i in range(2)
        )
        weights = jnp.exp2(top - along(top.max(0), found, 1))
        out = (found * weights).sum(0) / (total * weights).sum(0)
        store(out_ref.at[here[1], pl.ds(here[0], HS)], out.astype(out_ref.dtype))
