"""The embedding's backward on the GPU: sums of the rows of equal tokens in a fixed order, without atomics.

XLA sorts the token ids, so that the rows of one token are neighbours in the order: a run. The order is cut into windows
of 32 rows, one program each. A run inside a window is added to dwte at once. One that crosses a border leaves a partial
sum in each window that it touches, and a second kernel adds these, in order. Every row of dwte is thus written by one
program, once. Leaves out the forward, a look-up that XLA fuses with the addition.

Source of the idea to sort instead of atomics: llm.c llmc/encoder.cuh, `encoder_backward`; there the CPU sorts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic
from pallas_kernels.mosaic import THREADS, widest
from pallas_kernels.tuning import sizes

WIDEST = 1024  # columns that one program sums
AHEAD = 8  # rows whose loads are under way together
KEEP, DIRECT, DROP, HEAD, TAIL = range(5)  # what is done with the running sum after a row


class Windows(NamedTuple):
    """The tokens in the order of their ids, and what is to be done at each place of it; (n,) int32."""

    order: jax.Array  # which token stands there
    ids: jax.Array  # its id
    action: jax.Array  # KEEP: the run goes on; DIRECT: add its sum to dwte; HEAD, TAIL: store a partial sum; DROP


@partial(jax.jit, static_argnames=("target", "interpret"))
def embedding_backward(
    dout: jax.Array, tokens: jax.Array, dwte: jax.Array, *, target: str = "sm_90", interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Add the tokens' rows to dwte and sum the positions: the embedding's gradients, the same bits every time.

    dout (B, T, C) bf16, fp16 or fp32; tokens (B, T) int32; dwte (Vp, C), any of those dtypes, what the output head
    has contributed. Returns dwte (Vp, C), in place where the caller donates it, and dwpe (T, C) in dout's dtype: sums
    in fp32, each rounded once. A token id outside 0..Vp-1 adds nothing.

    Compulsory bytes: B T C itemsize(dout) + 2 D C itemsize(dwte) + T C itemsize(dout) + 4 B T with D distinct tokens;
    this reads dout twice, once in the tokens' order and once in the positions', and partial sums on top: at most
    16 C for each window of 32 tokens, an eighth of a bf16 dout for each direction. For d12, B=64, T=1024 that is 0.2 GB
    and 0.05 GB, so about 60 us on a card of 4.8 TB/s; the sort of 65,536 ids comes before it.
    Alignment: C a multiple of 128; any other is padded, which copies dout and dwte.
    """
    B, T, C = dout.shape
    if tokens.shape != (B, T) or dwte.ndim != 2 or dwte.shape[1] != C or tokens.dtype != jnp.int32:
        raise ValueError(
            f"dout {dout.shape}, tokens {tokens.shape} {tokens.dtype}, dwte {dwte.shape}: "
            "expected (B, T, C), (B, T) int32 and (Vp, C)"
        )
    if B * T == 0:
        return dwte, jnp.zeros((T, C), dout.dtype)
    padding = -C % THREADS
    if padding:
        dout = jnp.pad(dout, ((0, 0), (0, 0), (0, padding)))
        dwte = jnp.pad(dwte, ((0, 0), (0, padding)))
    rows = sizes(target).embedding_rows
    windows = _windows(tokens.reshape(-1), dwte.shape[0], rows)
    partials, [dwte] = _sum_windows(dout.reshape(B * T, -1), windows, dwte, rows, interpret)
    dwte = _add_partials(partials, windows, dwte, rows, interpret)
    return dwte[:, :C], _sum_batch(dout, interpret)[:, :C]


def _windows(ids: jax.Array, padded_vocab: int, rows: int) -> Windows:
    """Return the plan for the tokens ids (n,), in windows of `rows`."""
    n = ids.size
    place = lax.iota(jnp.int32, n)
    ids, order = lax.sort((ids, place), num_keys=1, is_stable=True)
    changes = ids[1:] != ids[:-1]
    run_ends = jnp.concatenate([changes, jnp.ones(1, bool)])
    start = place // rows * rows  # of the window
    window_ends = (place == start + rows - 1) | (place == n - 1)
    began_here = (start == 0) | (ids != ids[jnp.maximum(start - 1, 0)])  # the run, in this window
    action = jnp.where(began_here, jnp.where(run_ends, DIRECT, TAIL), HEAD)
    known = (ids >= 0) & (ids < padded_vocab)
    action = jnp.where(run_ends | window_ends, jnp.where(known, action, DROP), KEEP)
    return Windows(order, ids, action.astype(jnp.int32))


def _columns(width: int, vector: int) -> tuple[int, Any]:
    """Return how many columns of `width` (a multiple of 128) a program takes, and their layout: the widest accesses."""
    while width % (THREADS * vector):
        vector //= 2
    columns = max(c for c in range(THREADS * vector, WIDEST + 1, THREADS * vector) if width % c == 0)
    return columns, mosaic.flat_layout(columns, vector)


def _sum_windows(
    dout: jax.Array, windows: Windows, dwte: jax.Array, rows: int, interpret: bool
) -> tuple[jax.Array, list[jax.Array]]:
    """Add the runs inside windows to dwte; return partial sums (windows, 2, C) fp32 of the others: HEAD, TAIL."""
    n, C = dout.shape
    columns, layout = _columns(C, widest(dout.dtype))
    count = pl.cdiv(n, rows)

    def body(dout_ref: Any, order_ref: Any, ids_ref: Any, action_ref: Any, dwte_ref: Any, partials_ref: Any) -> None:
        window = lax.axis_index("window")
        here = pl.ds(lax.axis_index("columns") * columns, columns)

        def finish(place: Any, total: jax.Array) -> jax.Array:
            action = action_ref[place]

            @pl.when(action == DIRECT)
            def _() -> None:
                token = ids_ref[place]
                sum_ = mosaic.load(dwte_ref.at[token, here], layout, mosaic.f32) + total
                mosaic.store(dwte_ref.at[token, here], sum_.astype(dwte_ref.dtype))

            @pl.when(action >= HEAD)
            def _() -> None:
                mosaic.store(partials_ref.at[window, action - HEAD, here], total)

            return jnp.where(jnp.broadcast_to(action == KEEP, (columns,)), total, 0.0)

        def some(first: Any, number: int, total: jax.Array) -> jax.Array:
            """Sum `number` rows from a place on; their loads do not wait for one another."""
            loaded = [mosaic.load(dout_ref.at[order_ref[first + k], here], layout) for k in range(number)]
            for k, row in enumerate(loaded):
                total = finish(first + k, total + row.astype(jnp.float32))
            return total

        def go(number: int, begin: Any, end: Any, total: jax.Array) -> jax.Array:
            steps = (end - begin) // number
            return lax.fori_loop(0, steps, lambda k, total: some(begin + k * number, number, total), total)

        begin, end = window * rows, jnp.minimum(window * rows + rows, n)
        even = begin + (end - begin) // AHEAD * AHEAD
        total = go(AHEAD, begin, even, mosaic.zeros((columns,), layout))
        go(1, even, end, total)

    call = mosaic.kernel(
        body,
        name="embedding_windows",
        out_type=(),
        grid=(C // columns, count),
        grid_names=("columns", "window"),
        auto_barriers=False,  # a thread reads and writes its own columns alone
        interpret=interpret,
    )
    partials = mosaic.empty((count, 2, C), jnp.float32, interpret=interpret)
    inputs = (dout, windows.order, windows.ids, windows.action)
    _, (dwte, partials) = mosaic.in_place(call, inputs, (dwte, partials))
    return partials, [dwte]


def _add_partials(partials: jax.Array, windows: Windows, dwte: jax.Array, rows: int, interpret: bool) -> jax.Array:
    """Add to dwte the runs that cross borders: the TAIL of the window where one begins, and the HEADs that follow."""
    count, _, C = partials.shape
    n = windows.ids.size
    columns, layout = _columns(C, widest(dwte.dtype))

    def body(partials_ref: Any, ids_ref: Any, action_ref: Any, dwte_ref: Any) -> None:
        window = lax.axis_index("window")
        here = pl.ds(lax.axis_index("columns") * columns, columns)
        last = jnp.minimum(window * rows + rows, n) - 1

        @pl.when(action_ref[last] == TAIL)
        def _() -> None:
            token = ids_ref[last]

            def goes_on(carry: tuple[Any, jax.Array]) -> Any:
                return (carry[0] < count) & (ids_ref[jnp.minimum(carry[0] * rows, n - 1)] == token)

            def add(carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
                return carry[0] + 1, carry[1] + mosaic.load(partials_ref.at[carry[0], 0, here], layout)

            total = mosaic.load(partials_ref.at[window, TAIL - HEAD, here], layout)
            _, total = lax.while_loop(goes_on, add, (window + 1, total))
            sum_ = mosaic.load(dwte_ref.at[token, here], layout, mosaic.f32) + total
            mosaic.store(dwte_ref.at[token, here], sum_.astype(dwte_ref.dtype))

    call = mosaic.kernel(
        body,
        name="embedding_partials",
        out_type=(),
        grid=(C // columns, count),
        grid_names=("columns", "window"),
        auto_barriers=False,
        interpret=interpret,
    )
    _, [dwte] = mosaic.in_place(call, (partials, windows.ids, windows.action), (dwte,))
    return dwte


def _sum_batch(dout: jax.Array, interpret: bool) -> jax.Array:
    """Return dwpe (T, C): dout (B, T, C) summed over B, one row after the other."""
    B, T, C = dout.shape
    columns, layout = _columns(T * C, widest(dout.dtype))

    def body(dout_ref: Any, dwpe_ref: Any) -> None:
        here = pl.ds(lax.axis_index("columns") * columns, columns)

        def some(first: Any, number: int, total: jax.Array) -> jax.Array:
            for row in [mosaic.load(dout_ref.at[first + k, here], layout) for k in range(number)]:
                total = total + row.astype(jnp.float32)
            return total

        total = mosaic.zeros((columns,), layout)
        total = lax.fori_loop(0, B // AHEAD, lambda k, total: some(k * AHEAD, AHEAD, total), total)
        total = some(B // AHEAD * AHEAD, B % AHEAD, total)
        mosaic.store(dwpe_ref.at[here], total.astype(dwpe_ref.dtype))

    call = mosaic.kernel(
        body,
        name="embedding_positions",
        out_type=mosaic.shape_of((T * C,), dout.dtype),
        grid=(T * C // columns,),
        grid_names=("columns",),
        auto_barriers=False,
        interpret=interpret,
    )
    return call(dout.reshape(B, T * C)).reshape(T, C)
