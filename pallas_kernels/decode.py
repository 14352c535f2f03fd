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
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import gelu as gelu_of
from pallas_kernels import mosaic
from pallas_kernels.layernorm import EPS
from pallas_kernels.mosaic import LANES, LOG2E, THREADS, WARPS, along, f32, load, store, widest
from pallas_kernels.tuning import DECODED_CHANNELS, HEAD_SIZES, sizes

TEXTS = 16  # at most
WARPGROUPS = 4  # that share the positions of a head
DTYPES = mosaic.bf16, jnp.float16, f32
REGISTERS = 10_000  # bytes of texts, fewer than four, that stay in each warp's registers
LOWEST = -1e30  # a running maximum before the first score; a score that is not seen is half as high again
TILES = 4  # of four rows of weights, in a block
HELD = 100  # of its weights that a thread has in registers at a time, in float32 half as many
ROWS_HELD = 96  # numbers of the stream that a thread asks for at a time


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
    layernorm's weight and bias; weight (outputs, C), bias (outputs,) or None: where they lie. out_dtype: of the result,
    x's by default; it has been rounded to x's in any case, after the product, after the bias and after GELU.
    Compulsory bytes: itemsize (outputs C + outputs + 2 C + B (C + outputs)). For d12's qkv in bf16 3.5 MB, so 0.74 us
    at 4.8 TB/s. Raises ValueError for more than 16 texts, for C over 1600 or that 32 does not divide, and
    outputs that 16 does not.
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
    if C not in DECODED_CHANNELS or p.outputs % (WARPS * TILES) or rows.shape[1:] != (C,):
        raise ValueError(
            f"x {x.shape}, rows {rows.shape}, {p.outputs} outputs: C must be both last axes, a multiple of {LANES} up "
            f"to {DECODED_CHANNELS[-1]}, outputs a multiple of {WARPS * TILES}"
        )
    if {rows.dtype, x.dtype if a is None else a.dtype} != {x.dtype} or x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype} and the model {rows.dtype}: all must have one dtype, bf16, fp16 or fp32")
    room = REGISTERS if B < WARPS else size.smem - 2048
    if p.norm and B > 1 and B * C * x.dtype.itemsize > room:  # only float32's longest rows
        halves = (
            _multiplied(p, half, None, rows, layer, dtype, target, interpret) for half in (x[: B // 2], x[B // 2 :])
        )
        return jnp.concatenate(list(halves))
    tiles, held = TILES, TILES
    while p.wide == 1 and tiles > 1 and p.outputs // (WARPS * tiles) < size.sms:
        tiles //= 2
    while held > 1 and held * C * x.dtype.itemsize // (2 * LANES) > HELD:
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
        scratch=[*kept, mosaic.barrier()],
        approx_math=True,  # GELU's exponential
        auto_barriers=False,  # where a thread reads what another wrote, `meet` stands between
        sums_cross_warps=False,
        interpret=interpret,
    )(*given)


def _parts(x: Any) -> list[mosaic.Part]:
    """Return how four rows of C channels lie in registers, one in each warp."""
    return mosaic.row_parts(x.shape[1], 1, widest(x.dtype))


class Block(NamedTuple):
    """A block of threads: its Refs, and the rows of weights that it multiplies with all texts."""

    p: Product
    x: Any  # (B, C), the stream
    a: Any  # (B wide, C), of linear_residual
    rows: Any
    out: Any
    kept: Sequence[Any]  # SMEM: normalised texts by part, or what the four warps have summed of each wide row
    barrier: Any
    begin: Any  # the first of its rows of weights
    places: Sequence[Any]  # the first of each four of its outputs
    interpret: bool

    @property
    def texts(self) -> int:
        return int(self.x.shape[0])

    @property
    def parts(self) -> list[mosaic.Part]:
        return _parts(self.x)

    @property
    def of_four(self) -> Any:
        """Return the layout of four numbers, each a warp's."""
        return (self.parts[0].layout if self.p.wide == 1 else mosaic.FOURS).reduce(1)

    def row(self, ref: Any, number: Any) -> list[jax.Array]:
        """Read a row for all four warps."""
        return [load(ref.at[number, part.columns], part.layout.reduce(0)) for part in self.parts]

    def four(self, ref: Any, start: Any) -> list[jax.Array]:
        """Read a row for each warp."""
        return [load(ref.at[pl.ds(start, WARPS), part.columns], part.layout) for part in self.parts]

    def factor(self, text: Any) -> list[jax.Array]:
        """Read what a text's weights are multiplied with, of linear_residual."""
        return self.row(self.a, text) if self.p.wide == 1 else self.four(self.a, text * WARPS)

    def stream(self, text: Any) -> list[jax.Array]:
        """Read the numbers of a text to which the results are added, if there are such."""
        return [] if self.p.norm else [load(self.x.at[text, pl.ds(at, WARPS)], self.of_four, f32) for at in self.places]


def _product(x: Any, a: Any, rows: Any, layer_ref: Any, out: Any, *scratch: Any, p: Product, interpret: bool) -> None:
    """Multiply a block's rows of weights with all texts."""
    *kept, barrier = scratch
    begin = lax.axis_index("block") * (WARPS * p.tiles)
    places = [lax.div(begin, p.wide) + WARPS * i for i in range(p.tiles // p.wide)]
    block = Block(p, x, a, rows, out, kept, barrier, begin, places, interpret)
    # Whatever does not wait for something else is asked for first; no load can be put off behind the meeting.
    asked = _asked(block)
    added = [block.stream(text) for text in range(block.texts if block.texts < WARPS else 0)]
    layer = layer_ref[0]
    first = p.weight.first + layer * p.weight.of_layer + block.begin
    weights = [block.four(rows, first + WARPS * i) for i in range(p.held)]
    norm = [block.row(rows, tensor.first + layer * tensor.of_layer) for tensor in p.norm or ()]
    biases = _biases(block, layer)
    mosaic.meet(barrier)
    given = _given(block, asked, norm)
    for start in range(0, p.tiles, p.held):
        if start:
            weights = [block.four(rows, first + WARPS * (start + i)) for i in range(p.held)]
        _multiply(block, start, weights, given, biases, added)
    if p.wide > 1:  # the four warps' sums are of one row each
        mosaic.meet(barrier)
        added = added or [block.stream(text) for text in range(block.texts)]
        for text in range(block.texts):
            _finish(block, text, 0, load(kept[0].at[text], mosaic.FOURS).sum(1), biases, added[text])


def _together(block: Block) -> int:
    """Return how many tiles of four texts a warp asks for at a time."""
    tiles = pl.cdiv(block.texts, WARPS)
    return max(n for n in (1, 2, 4) if tiles % n == 0 and (n == 1 or n * block.x.shape[1] // LANES <= ROWS_HELD))


def _tile(block: Block, number: int) -> int:
    """Return the first text of a tile of four. The last ends with the last text, so it may share some with another."""
    return min(number * WARPS, block.texts - WARPS)


def _asked(block: Block) -> list[list[jax.Array]]:
    """Read what is prepared first: up to three texts, or a layernorm's first tiles of four."""
    if block.texts < WARPS:
        return [block.row(block.x, text) if block.p.norm else block.factor(text) for text in range(block.texts)]
    tiles = range(_together(block) if block.p.norm else 0)
    return [block.four(block.x, _tile(block, number)) for number in tiles]


def _biases(block: Block, layer: Any) -> list[jax.Array]:
    """Read the bias of each four outputs; nothing where there is none."""
    if (bias := block.p.bias) is None:
        return []
    start, C = bias.first + layer * bias.of_layer, block.x.shape[1]
    four = [(start + lax.div(at, C), pl.ds(lax.rem(at, C), WARPS)) for at in block.places]
    return [load(block.rows.at[place], block.of_four, f32) for place in four]


def _given(block: Block, asked: list[list[jax.Array]], norm: list[list[jax.Array]]) -> Callable[[Any], list[jax.Array]]:
    """Prepare the texts, and return what reads the row of a text that its weights are multiplied with."""
    dtype = block.x.dtype
    if block.texts < WARPS:
        held = [_normalised(x, norm, dtype) if norm else x for x in asked]
        return lambda text: held[text]
    if not norm:
        return block.factor
    tiles, together = pl.cdiv(block.texts, WARPS), _together(block)
    for number in range(0, tiles, together):
        starts = [_tile(block, number + i) for i in range(together)]
        loaded = asked if number == 0 else [block.four(block.x, start) for start in starts]
        for start, x in zip(starts, loaded, strict=True):
            ready = _normalised(x, norm, dtype)
            if start % WARPS:
                mosaic.meet(block.barrier)  # some of these rows have been written by other warps
            for ref, values in zip(block.kept, ready, strict=True):
                store(ref.at[pl.ds(start, WARPS)], values)
    mosaic.meet(block.barrier)
    parts = block.parts
    return lambda text: [load(r.at[text], part.layout.reduce(0)) for r, part in zip(block.kept, parts, strict=True)]


def _normalised(x: list[jax.Array], norm: list[list[jax.Array]], dtype: Any) -> list[jax.Array]:
    """Return the layernorm of four rows, each in one warp, in their dtype."""
    x, w, b = map(_in_float32, (x, *norm))
    C = sum(values.shape[1] for values in x)
    mean = reduce(add, [values.sum(1) for values in x]) / C  # (4,)
    centred = [values - along(mean, values, 0) for values in x]
    rstd = lax.rsqrt(reduce(add, [(values * values).sum(1) for values in centred]) / C + EPS)
    return [(values * along(rstd, values, 0) * w + b).astype(dtype) for values, w, b in zip(centred, w, b, strict=True)]


def _in_float32(values: list[jax.Array]) -> list[jax.Array]:
    """Return what was read of four rows, or of one for all warps, as (4, part) of each part."""
    wide = [each.astype(f32) for each in values]
    return [each if each.ndim == 2 else jnp.broadcast_to(each, (WARPS, each.size)) for each in wide]


def _multiply(
    block: Block, start: int, weights: list[list[jax.Array]], given: Callable[[Any], list[jax.Array]],
    biases: list[jax.Array], added: list[list[jax.Array]],
) -> None:  # fmt: skip
    """Multiply some tiles of weights, from number `start` on, with all texts."""
    parts, wide = block.parts, block.p.wide
    factors = [
        [mosaic.widened(w, part.layout, block.interpret) for w, part in zip(ws, parts, strict=True)] for ws in weights
    ]

    def multiply(texts: list[Any]) -> None:
        rows = [given(text) for text in texts]
        olds = [added[text] if added else block.stream(text) if wide == 1 else [] for text in texts]
        for text, row, old in zip(texts, rows, olds, strict=True):
            x = _in_float32(row)
            for i, ws in enumerate(factors, start):
                sums = reduce(add, [(w * part).sum(1) for w, part in zip(ws, x, strict=True)])  # (4,)
                if wide == 1:
                    _finish(block, text, i, sums, biases, old)
                else:
                    store(block.kept[0].at[text, i], sums)

    _each(block.texts, 2 if block.p.norm else 4, multiply)


def _finish(block: Block, text: Any, i: int, sums: jax.Array, biases: list[jax.Array], old: list[jax.Array]) -> None:
    """Store four results of a text, rounded as XLA's operations round."""
    dtype = block.x.dtype
    y = sums.astype(dtype).astype(f32)
    if biases:
        y = (y + biases[i]).astype(dtype).astype(f32)
    if block.p.gelu:
        y = gelu_of.forward(y, exact=dtype == f32).astype(dtype).astype(f32)
    if old:
        y = (old[i] + y).astype(dtype)
    store(block.out.at[text, pl.ds(block.places[i], WARPS)], y.astype(block.out.dtype))


def _each(count: int, together: int, do: Callable[[list[Any]], None]) -> None:
    """Do something for all texts, a few at a time, so that one's latencies hide behind the others'."""
    whole = count // together
    if whole > 1:
        pl.loop(0, whole)(lambda k: do([k * together + i for i in range(together)]))
    elif whole:
        do(list(range(together)))
    if rest := list(range(whole * together, count)):
        do(rest)


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
    (_, heads, S, HS), (B, Q) = keys.shape, qkv.shape
    if B == 0 or heads % B or 3 * heads // B * HS != Q or values.shape != keys.shape or S % THREADS:
        raise ValueError(
            f"qkv {qkv.shape}, keys {keys.shape}, values {values.shape}: expected (B, 3 NH HS) and twice "
            f"(L, B NH, S, HS), S a multiple of {THREADS}"
        )
    if HS not in HEAD_SIZES or {keys.dtype, values.dtype} != {qkv.dtype} or qkv.dtype not in DTYPES:
        raise ValueError(
            f"heads of {HS} channels, {qkv.dtype} and {keys.dtype}: HS 16, 32, … 128 and one dtype, bf16, fp16 or fp32"
        )
    _, at_once = _lanes(HS, qkv.dtype)
    call = mosaic.kernel(
        partial(_attend, NH=heads // B, interpret=interpret),
        name="attention_step",
        out_type=mosaic.shape_of((B, Q // 3), qkv.dtype),
        grid=(heads,),
        grid_names=("head",),
        scratch=[
            mosaic.shared((2, WARPGROUPS * at_once)), mosaic.shared((WARPGROUPS * at_once, HS)),
            mosaic.barrier(WARPGROUPS), mosaic.barrier(number=WARPGROUPS),
        ],
        approx_math=True,  # ex2.approx is right to 2 units in the last place of fp32
        auto_barriers=False,  # where a thread reads what another wrote, `meet` stands between
        sums_cross_warps=False,
        warpgroups=WARPGROUPS,
        interpret=interpret,
    )  # fmt: skip
    out, (keys, values) = mosaic.in_place(call, (qkv, layer.reshape(1), position.reshape(1)), (keys, values))
    return out, keys, values


def _lanes(HS: int, dtype: Any) -> tuple[Any, int]:
    """Return the layout of keys or values (positions, HS), and how many positions a warpgroup holds with one access.

    Four lanes or more share a position, in float32 eight; a sum over it stays within them.
    """
    vector = widest(dtype)
    while HS % (2 * jnp.dtype(dtype).itemsize * vector):
        vector //= 2
    lanes = math.gcd(HS // vector, LANES // 2)
    return mosaic.cell_layout(lanes, vector), WARPS * LANES // lanes


def _attend(
    qkv_ref: Any, layer_ref: Any, position_ref: Any, keys_ref: Any, values_ref: Any, out_ref: Any,
    states: Any, sums: Any, barrier: Any, loads: Any, *, NH: int, interpret: bool,
) -> None:  # fmt: skip
    """Do one head of one text: each warpgroup its share of the positions, then the first adds up.

    Every place of a warpgroup's tile has a softmax of its own: maximum, total and weighted values of each
    `at_once`th position. They meet once, at the end. The position itself comes from registers, last, to the first.
    """
    HS, dtype = keys_ref.shape[-1], qkv_ref.dtype
    layout, at_once = _lanes(HS, dtype)
    tile = at_once  # positions whose keys and values are on their way together, in registers beside q and the sums
    while tile < THREADS and tile * HS * dtype.itemsize // 128 + at_once * HS // 64 <= 80:
        tile *= 2
    row, group, groups = lax.axis_index("head"), lax.axis_index("warpgroup"), lax.axis_size("warpgroup")
    layer, position = layer_ref[0], position_ref[0]
    text, column = lax.div(row, NH), lax.rem(row, NH) * HS
    own = [load(qkv_ref.at[text, pl.ds(i * NH * HS + column, HS)], layout.reduce(0)) for i in range(3)]
    q, own_k, own_v = (jnp.broadcast_to(each, (at_once, HS)) for each in own)
    q = q.astype(f32)
    slot = mosaic.iota((at_once,), 0, layout.reduce(1))

    after = partial(_after, q, partial(mosaic.widened, layout=layout, interpret=interpret))

    def step(t: Any, state: Any) -> Any:
        start = (t * groups + group) * tile
        starts = range(0, tile, at_once)
        loaded = [
            [load(ref.at[layer, row, pl.ds(start + i, at_once)], layout) for i in starts]
            for ref in (keys_ref, values_ref)
        ]
        mosaic.meet(loads.at[group])  # no load can be put off behind it
        return after(state, loaded[0], loaded[1], [start + i + slot < position for i in starts])

    none = mosaic.full((at_once,), LOWEST, layout.reduce(1))
    nothing = none, mosaic.zeros((at_once,), layout.reduce(1)), mosaic.zeros((at_once, HS), layout)
    steps = pl.cdiv(jnp.maximum(position - group * tile, 0), groups * tile)
    state = lax.fori_loop(0, steps, step, nothing)
    top, total, acc = after(state, [own_k], [own_v], [(slot == 0) & (group == 0)])

    @pl.when(lax.rem(lax.div(position, tile), groups) == group)  # which alone may have read there
    def remember() -> None:
        for ref, each in ((keys_ref, own[1]), (values_ref, own[2])):
            store(ref.at[layer, row, position], each)

    here = pl.ds(group * at_once, at_once)
    for ref, each in ((states.at[0, here], top), (states.at[1, here], total), (sums.at[here], acc)):
        store(ref, each)
    mosaic.meet(barrier)

    @pl.when(group == 0)
    def finish() -> None:
        store(out_ref.at[text, pl.ds(column, HS)], _merged(states, sums).astype(dtype))


def _after(
    q: jax.Array, wide: Callable[[jax.Array], jax.Array], state: Any, keys: list[jax.Array], values: list[jax.Array],
    seen: list[jax.Array],
) -> Any:  # fmt: skip
    """Return the running softmax of each place, (top, total, weighted values), after some more positions for each.

    wide: makes keys and values float32. seen: at which places a position counts.
    """
    top, total, acc = state
    scores = [(q * wide(k)).sum(1) * (LOG2E / math.sqrt(q.shape[1])) for k in keys]
    scores = [jnp.where(see, score, 1.5 * LOWEST) for see, score in zip(seen, scores, strict=True)]
    new = reduce(jnp.maximum, scores, top)
    weights = [jnp.exp2(score - new) for score in scores]
    acc = acc * along(jnp.exp2(top - new), acc, 0)
    for weight, v in zip(weights, values, strict=True):
        acc = acc + along(weight, acc, 0) * wide(v)
    return new, reduce(add, weights, total * jnp.exp2(top - new)), acc


def _merged(states: Any, sums: Any) -> jax.Array:
    """Return a head's output (HS,) from the softmax of every place in SMEM: states (2, places), sums (places, HS)."""
    layout = mosaic.column_layout(16)

    def repeated(i: int, some: Any) -> jax.Array:
        values = load(states.at[i, some], layout.reduce(1))
        return lax.broadcast_in_dim(values, (16, sums.shape[1]), (0,))

    places = [pl.ds(i, 16) for i in range(0, states.shape[1], 16)]
    tops = [repeated(0, some) for some in places]
    top = along(reduce(jnp.maximum, tops).max(0), tops[0], 1)
    weights = [jnp.exp2(each - top) for each in tops]
    acc, total = (
        reduce(add, [weight * get(some) for weight, some in zip(weights, places, strict=True)]).sum(0)
        for get in (lambda some: load(sums.at[some], layout), partial(repeated, 1))
    )
    return acc / total
