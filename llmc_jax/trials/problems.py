"""The operations as problems: random inputs of a shape, and the answer in float64.

`sizes` of a problem, by function:

    layernorm_…, residual_layernorm_…   rows, C               gelu_…                    rows, columns
    softmax_…                           B, NH, T              classifier                rows, V, Vp
    embedding_backward                  B, T, C, Vp           adamw_update, global_norm elements
    attention and its like              B, T, NH, HS

Of attention, each function that --attention may compute, forward and backward are one problem. Inputs are drawn anew
for each problem; nothing is zero.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax import kernels
from llmc_jax.config.model import RELU, ModelShape
from llmc_jax.kernels.functions import PLAIN, TWINS
from llmc_jax.models.layout import flat_size, num_parameters, tensor_specs
from llmc_jax.ops import attention as jnp_attention
from llmc_jax.ops import softmax as jnp_softmax
from llmc_jax.ops.head import picked_logits
from llmc_jax.training.rules.adamw import AdamWNumbers, adamw_update
from llmc_jax.training.state import DTYPES

SCORES = 2**27  # of attention by blocks, that exist at a time
SCALE = 0.125  # of the softmax's scores: heads of 64 channels
NUMBERS = AdamWNumbers(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
WAYS = ("forward", "backward")
Function = Callable[..., Any]


class Problem(NamedTuple):
    """Arrays, and how a function is called on them."""

    function: str
    arrays: tuple[jax.Array, ...]
    bind: Callable[[Function], Function]  # of an implementation: a function of the arrays, which returns a tuple
    cut: tuple[int, ...] = ()  # arrays of as many rows, or sequences, each of which has its own part of the answer
    sums: tuple[tuple[int, int], ...] = ()  # outputs that are sums over another's rows, before or after its rounding
    wide: int = 0  # columns of the largest output, where that is larger than every array


def _tuple(result: Any) -> tuple[jax.Array, ...]:
    return tuple(part for part in (result if isinstance(result, tuple) else (result,)) if part is not None)


def _plain(function: Function) -> Function:
    return lambda *arrays: _tuple(function(*arrays))


def _before(last: Any) -> Callable[[Function], Function]:
    """Return what binds a function that takes something else behind the arrays."""
    return lambda function: lambda *arrays: _tuple(function(*arrays, last))


def skewed_tokens(shape: tuple[int, ...], vocab_size: int, seed: int) -> np.ndarray:
    """Return tokens int32 whose frequencies fall as 1/rank, as those of text do."""
    rng = np.random.default_rng(seed)
    share = np.cumsum(1.0 / np.arange(1, vocab_size + 1))
    ranks = np.searchsorted(share / share[-1], rng.random(shape), side="right")
    return rng.permutation(vocab_size)[np.minimum(ranks, vocab_size - 1)].astype(np.int32)


def problem(function: str, dtype: str, sizes: Sequence[int], seed: int, **options: Any) -> Problem:
    """Return a problem with fresh random inputs. options: of AdamW, rounding and master_weights; of the head, far."""
    kind, keys = DTYPES[dtype], iter(jax.random.split(jax.random.key(seed), 16))

    def normal(*shape: int, dtype: Any = kind, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale + mean).astype(dtype)

    if "layernorm" in function:
        return _layernorm(function, normal, *sizes)
    if function.startswith("gelu"):
        x = normal(*sizes, scale=2.0)
        arrays = (x,) if function == "gelu_forward" else (normal(*sizes), x)
        return Problem(function, arrays, _plain, cut=(0, 1)[: len(arrays)])
    if function.startswith("softmax"):
        return _softmax(function, normal, *sizes)
    if function == "classifier":
        return _classifier(normal, *sizes, seed=seed)
    if function in TWINS:
        return _product(function, normal, *sizes, seed=seed, far=options.get("far", True))
    if function == "embedding_backward":
        return _embedding(normal, *sizes, seed=seed)
    if function == "adamw_update":
        return _adamw(normal, kind, sizes[0], **options)
    if function == "global_norm":
        return Problem(function, (normal(sizes[0], scale=0.1),), _plain)
    return _attention(function, normal, *sizes)


def _layernorm(function: str, normal: Function, n: int, C: int) -> Problem:
    x = normal(n, C, scale=2.0, mean=0.5)
    w, b = normal(C, scale=0.2, mean=1.0), normal(C, scale=0.2)
    if function == "layernorm_forward":
        return Problem(function, (x, w, b), _plain, cut=(0,))
    if function == "residual_layernorm_forward":
        return Problem(function, (x, normal(n, C), w, b), _plain, cut=(0, 1))
    _, mean, rstd = jax.jit(kernels.XLA.layernorm_forward)(x, w, b)
    arrays = (normal(n, C), x, w, mean, rstd)
    sums = ((3, 0),)  # dbias, of dx
    if function == "layernorm_backward":
        return Problem(function, arrays, _plain, cut=(0, 1, 3, 4), sums=sums)
    return Problem(function, (normal(n, C), *arrays), _plain, cut=(0, 1, 2, 4, 5), sums=sums)


def _softmax(function: str, normal: Function, B: int, NH: int, T: int) -> Problem:
    scores = normal(B, NH, T, T, scale=8.0)

    if function == "softmax_forward":
        return Problem(function, (scores,), _before(SCALE), cut=(0,))
    att = jax.jit(jnp_softmax.softmax_forward, static_argnums=1)(scores, SCALE)
    return Problem(function, (normal(B, NH, T, T), att), _before(SCALE), cut=(0, 1))


def _classifier(normal: Function, n: int, V: int, Vp: int, *, seed: int) -> Problem:
    logits, dlosses = normal(n, Vp, scale=3.0), normal(n, dtype=jnp.float32, scale=0.2, mean=1.0)
    targets = jax.random.randint(jax.random.key(seed + 1), (n,), 0, V, jnp.int32).at[0].set(V - 1)

    return Problem("classifier", (logits, targets, dlosses), _before(V), cut=(0, 1, 2))


def _product(function: str, normal: Function, n: int, C: int, *columns: int, seed: int, far: bool) -> Problem:
    """Return a product that ends in something. columns: V and Vp of the head, F of an MLP.

    far: one row in a hundred is so far off that exponentials would overflow, and the head makes its product again.
    """
    x, wide = normal(n, C), columns[-1]
    if function == "linear_gelu_forward":
        return Problem(function, (x, normal(wide, C, scale=2 / math.sqrt(C)), normal(wide)), _plain, (0,), wide=wide)
    if function == "linear_gelu_backward":
        arrays = x, normal(C, wide, scale=1 / math.sqrt(C)), normal(n, wide, scale=2.0)
        return Problem(function, arrays, _plain, (0, 2), sums=((1, 0),))
    w, V = normal(wide, C, scale=2 / math.sqrt(C)), columns[0]
    targets = jax.random.randint(jax.random.key(seed + 1), (n,), 0, V, jnp.int32).at[0].set(V - 1)
    picked = picked_logits(x, w, targets) - jnp.where(far & (jnp.arange(n) % 100 == 99), 100.0, 0.0)

    return Problem(function, (x, w, targets, picked), _before(V), (0, 2, 3), wide=wide)


def _embedding(normal: Function, B: int, T: int, C: int, Vp: int, *, seed: int) -> Problem:
    tokens = skewed_tokens((B, T), max(1, Vp - 47), seed)
    dout, dwte = normal(B, T, C), normal(Vp, C, dtype=jnp.float32)
    return Problem("embedding_backward", (dout, jnp.asarray(tokens), dwte), _plain)


def _adamw(normal: Function, kind: Any, n: int, rounding: str = "nearest", master_weights: bool = True) -> Problem:
    params = normal(n, dtype=jnp.float32 if master_weights else kind, scale=0.02)
    m, v = normal(n, dtype=jnp.float32, scale=1e-3), jnp.square(normal(n, dtype=jnp.float32, scale=1e-3))
    gradient = normal(n, scale=1e-3)
    copy = params.astype(kind) if master_weights and kind != jnp.float32 else None
    arrays = (params, m, v, gradient) + (() if copy is None else (copy,))
    decay = ((0, n // 3), (n // 2 + 1, n - n // 7))

    def bind(function: Function) -> Function:
        def update(params: Any, m: Any, v: Any, gradient: Any, copy: Any = None) -> tuple[jax.Array, ...]:
            scalars = {"scale": 0.5, "learning_rate": 1e-3, "update": 3}
            arrays = {name: jnp.asarray(value, jnp.float32) for name, value in scalars.items()}
            seed = jnp.uint32(7) if rounding == "stochastic" else None
            updated = function(
                params, m, v, gradient, **arrays, apply=jnp.array(True), numbers=NUMBERS, decay=decay, copy=copy,
                rounding=rounding, seed=seed,
            )  # fmt: skip
            return _tuple(updated)

        return update

    return Problem("adamw_update", arrays, bind)


def _attention(function: str, normal: Function, B: int, T: int, NH: int, HS: int) -> Problem:
    dout, qkv = normal(B, T, NH * HS), normal(B, T, 3 * NH * HS)

    def bind(functions: Any) -> Function:
        """Return both in one. functions: the pair (forward, backward)."""

        def both(dout: jax.Array, qkv: jax.Array) -> tuple[jax.Array, ...]:
            out, saved = functions[0](qkv, NH)
            return out, *functions[1](dout, qkv, out, saved, NH)

        return both

    return Problem(function, (dout, qkv), bind, cut=(0, 1))


# ----- what they come to --------------------------------------------------------------------------------------------


def plain_twin(function: str) -> Any:
    """Return a function of `function`'s signature by XLA; of attention the pair forward, backward.

    That of softmax attention is by blocks of rows, without the T x T matrix.
    """
    if function == "attention":
        return by_blocks_forward, by_blocks_backward
    if "attention" in function:
        return tuple(partial(getattr(jnp_attention, f"attention_{way}"), spec=RELU) for way in WAYS)
    return getattr(jnp_softmax, function, None) or TWINS.get(function) or PLAIN[function]


def expected(given: Problem, wide: Any = jnp.float64) -> tuple[jax.Array, ...]:
    """Return what the outputs should be, in float64 (with 64 bits enabled) or float32, before they are rounded.

    The sum of residual_layernorm_forward is rounded before it is normalised: that is what the operation says.
    """

    def widened(*arrays: jax.Array) -> list[jax.Array]:
        return [each.astype(wide) if jnp.issubdtype(each.dtype, jnp.floating) else each for each in arrays]

    arrays = given.arrays
    if given.function == "residual_layernorm_forward":
        x, f, w, b = arrays
        # Without the barrier XLA may leave the rounding out, on the way from 32 bits by 16 to 64.
        total = jax.lax.optimization_barrier((x.astype(jnp.float32) + f.astype(jnp.float32)).astype(x.dtype))
        return total, *kernels.XLA.layernorm_forward(*widened(total, w, b))
    if given.function == "adamw_update":
        params, m, v, gradient, *copy = arrays
        nearest = given.bind(lambda *arrays, rounding, seed, **named: adamw_update(*arrays, **named))
        updated = nearest(*widened(params, m, v, gradient))
        return *updated, *(updated[:1] if copy else ())
    return given.bind(plain_twin(given.function))(*widened(*arrays))


def seed_of(text: str) -> int:
    """Return a seed that depends on the text alone."""
    return math.prod(byte + 3 for byte in text.encode()) % (2**31 - 1)


def random_weights(model: ModelShape) -> jax.Array:
    """Return random weights (flat_size,) float32: normalisations near one, all else small and not zero."""
    used = jnp.arange(flat_size(model)) < num_parameters(model)
    values = jnp.where(used, 0.02 * jax.random.normal(jax.random.key(0), used.shape, jnp.float32), 0.0)
    for spec in tensor_specs(model):
        if spec.tensor.start == "one":
            values = values.at[spec.offset : spec.offset + spec.size].add(1.0)
    return values


# ----- attention without the T x T matrix: ops/attention.py by blocks of query rows ----------------------------------


def by_blocks_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, None]:
    """Compute causal attention from packed qkv (B, T, 3C), by blocks of query rows, in at least float32.

    Returns out (B, T, C), and nothing that is kept.
    """
    return _attended(_wide(qkv), num_heads).astype(qkv.dtype), None


def by_blocks_backward(
    dout: jax.Array, qkv: jax.Array, _out: jax.Array, _saved: None, num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `by_blocks_forward` for qkv (B, T, 3C), and for the bias before it (3C,)."""
    _, pulled_back = jax.vjp(lambda qkv: _attended(qkv, num_heads), _wide(qkv))
    (dqkv,) = pulled_back(_wide(dout))
    return dqkv.astype(qkv.dtype), jnp.sum(dqkv, axis=(0, 1)).astype(qkv.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _attended(qkv: jax.Array, num_heads: int) -> jax.Array:
    """Return out (B, T, C), computed in as few blocks of rows as hold SCORES scores at most."""
    B, T, C3 = qkv.shape
    q, k, v = qkv.reshape(B, T, 3, num_heads, -1).transpose(2, 0, 3, 1, 4)  # (B, NH, T, HS) each
    HS = q.shape[-1]
    most = max(1, SCORES // (B * num_heads * T))
    R = max(rows for rows in range(1, min(T, most) + 1) if T % rows == 0)

    @jax.checkpoint  # the backward computes a block's weights again
    def block(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, start = rows
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(HS)
        past = jnp.arange(T) <= start + jnp.arange(R)[:, None]
        return jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1) @ v  # (B, NH, R, HS)

    blocks = q.reshape(B, num_heads, T // R, R, HS).transpose(2, 0, 1, 3, 4)
    out = jax.lax.map(block, (blocks, jnp.arange(0, T, R)))  # (blocks, B, NH, R, HS)
    return out.transpose(1, 0, 3, 2, 4).reshape(B, T, C3 // 3)
