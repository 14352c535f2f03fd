"""GPT-2 with linear attention: no T x T matrix, but a running sum over the positions so far.

    forward     softmax's weight exp(q k) becomes phi(q) phi(k), phi(x) = elu(x) + 1 > 0 for each channel:
                    out_t = sum_{u<=t} (phi(q_t) phi(k_u)) v_u  /  sum_{u<=t} phi(q_t) phi(k_u)
                phi(q_t) does not depend on u and comes before the sum. With v'_u = (v_u, 1), whose last channel counts
                the weights, the numerator and the denominator are one sweep:
                    out'_t = phi(q_t) S_t,    S_t = sum_{u<=t} phi(k_u)^T v'_u        an HS x (HS + 1) matrix
                    out_t  = out'_t[:HS] / out'_t[HS]

    backward    with n the numerator, d the denominator:  dn_t = dout_t / d_t,  dd_t = -(dout_t out_t) / d_t
                The three factors of out' = sum_{u<=t} (phi(q_t) phi(k_u)) v'_u then are sweeps as well, those of what
                stands at u in the other direction:
                    dphi(q_t) = sum_{u<=t} (dout'_t v'_u) phi(k_u)
                    dphi(k_u) = sum_{t>=u} (v'_u dout'_t) phi(q_t)
                    dv'_u     = sum_{t>=u} (phi(k_u) phi(q_t)) dout'_t
                and phi'(x) = 1 where x > 0, exp(x) elsewhere.

The work is T HS^2 for a head where softmax has T^2 HS, and a text costs HS (HS + 1) numbers however long it is. But the
sweep goes position by position, which leaves most of a GPU idle at GPT-2's T. And a sum of HS^2 numbers cannot hold
which of many tokens was meant, so expect a higher loss. Performer is the same with random features for phi, whose
product approximates exp(q k) itself.
Source: Katharopoulos et al., Transformers are RNNs (2020); Choromanski et al., Rethinking Attention (2021).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import Execution
from llmc_jax.models.gpt2 import decode, model
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.operations import TABLES
from llmc_jax.models.gpt2.program import BLOCK, PROGRAM
from llmc_jax.models.program import Decoder, head_of
from llmc_jax.models.tensors import Operation
from llmc_jax.ops.linear import bias_backward


def phi(x: jax.Array) -> jax.Array:
    """Return elu(x) + 1."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def sweep(query: jax.Array, key: jax.Array, value: jax.Array, reverse: bool = False) -> jax.Array:
    """Return of each row t sum_{u<=t} (query_t key_u) value_u, (T, B, NH, O); of u >= t if reverse.

    query and key (T, B, NH, I), value (T, B, NH, O).
    """

    def row(state: jax.Array, given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v = given
        state = state + k[..., :, None] * v[..., None, :]  # (B, NH, I, O)
        return state, jnp.einsum("bni,bnio->bno", q, state)

    start = jnp.zeros((*key.shape[1:], value.shape[-1]), key.dtype)
    return jax.lax.scan(row, start, (query, key, value), reverse=reverse)[1]


def split(x: jax.Array, parts: int, num_heads: int) -> list[jax.Array]:
    """Return (B, T, parts C) as so many (T, B, NH, HS) in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)).swapaxes(0, 1)
    return [each.reshape(*each.shape[:2], num_heads, -1) for each in jnp.split(wide, parts, axis=-1)]


def joined(parts: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Return what `split` takes, from what it returns."""
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in parts], axis=-1).swapaxes(0, 1).astype(dtype)


def with_one(v: jax.Array) -> jax.Array:
    """Return v', v with a channel more, which is 1."""
    return jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)


def attention_forward(qkv: jax.Array, num_heads: int, **how: Any) -> tuple[jax.Array, tuple[()]]:
    """Return out (B, T, C) of packed qkv (B, T, 3C). Nothing is kept: the backward computes the denominators again.

    how: what attention sees, if it is not GPT-2's. Raises InputError.
    """
    if how:
        raise InputError(f"linear attention sees all positions so far, and nothing else: not {how['spec'].words}")
    q, k, v = split(qkv, 3, num_heads)
    out = sweep(phi(q), phi(k), with_one(v))
    return joined([out[..., :-1] / out[..., -1:]], qkv.dtype), ()


def attention_backward(
    dout: jax.Array, qkv: jax.Array, out: jax.Array, saved: tuple[()], num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Return dqkv (B, T, 3C), and its sum over all rows (3C,)."""
    q, k, v = split(qkv, 3, num_heads)
    q, k, v = phi(q), phi(k), with_one(v)
    (dn,), (out,) = split(dout, 1, num_heads), split(out, 1, num_heads)
    dn = dn / jnp.sum(q * jnp.cumsum(k, axis=0), axis=-1, keepdims=True)
    dsum = jnp.concatenate([dn, -jnp.sum(dn * out, axis=-1, keepdims=True)], axis=-1)  # of out': dn and dd
    dq, dk = sweep(dsum, v, k), sweep(v, dsum, q, reverse=True)
    dv = sweep(k, q, dsum, reverse=True)[..., :-1]
    dqkv = joined([dq * jnp.minimum(q, 1), dk * jnp.minimum(k, 1), dv], qkv.dtype)  # phi' is the lesser of phi and 1
    return dqkv, bias_backward(dqkv)


# ----- token after token: a state in the place of keys and values -----------------------------------------------------


def empty(shape: ModelConfig, texts: int, size: int, dtype: Any) -> decode.Cache:
    """Return S (B, NH, HS, HS) and the sum of phi(k) (B, NH, HS) of each layer, of no position yet: zeros."""
    sums = texts, shape.num_heads, shape.head_size
    wide, layers = jnp.promote_types(dtype, jnp.float32), range(shape.num_layers)
    states = tuple(jnp.zeros((*sums, shape.head_size), wide) for _ in layers)
    return decode.Cache(states, tuple(jnp.zeros(sums, wide) for _ in layers))


def cache_bytes(shape: ModelConfig, texts: int, size: int, element: int) -> int:
    """Return the bytes of `empty`."""
    return max(element, 4) * shape.num_layers * texts * shape.channels * (shape.head_size + 1)


def prefill(
    params: Any, tokens: jax.Array, length: jax.Array, size: int, shape: ModelConfig, execution: Execution
) -> tuple[jax.Array, decode.Cache]:
    """Return the logits (B, V) after the first `length` of tokens (B, P), and the state of each layer there."""
    lnf, activations = model.forward_stream(params, tokens, shape, execution)
    states = []
    for a in activations.blocks:
        _, k, v = split(a.qkv, 3, shape.num_heads)
        k = jnp.where(jnp.arange(len(k))[:, None, None, None] < length, phi(k), 0)
        states.append((jnp.einsum("tbni,tbno->bnio", k, v), jnp.sum(k, axis=0)))
    last = jax.lax.dynamic_index_in_dim(lnf, length - 1, axis=1, keepdims=False)
    return decode.head(last, head_of(params, shape), shape), decode.Cache(*zip(*states, strict=True))


def step(x: jax.Array, pending: jax.Array | None, p: Any, attention: partial[Any], *how: Any) -> Any:
    """Compute one block of one position (`Block.step`). attention: softmax's, whose cache holds the state here."""
    state, total, num_heads = (attention.keywords[name] for name in ("keys", "values", "num_heads"))

    def of_state(qkv: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v = (each[0] for each in split(qkv[:, None], 3, num_heads))  # (B, NH, HS) each
        now, sums = state + phi(k)[..., :, None] * v[..., None, :], total + phi(k)
        out = jnp.einsum("bni,bnio->bno", phi(q), now) / jnp.sum(phi(q) * sums, axis=-1, keepdims=True)
        return joined([out[None]], qkv.dtype)[:, 0], now, sums

    return BLOCK.step(x, pending, p, of_state, *how)


OWN = PROGRAM._replace(
    operations=lambda op: op._replace(attention_forward=attention_forward, attention_backward=attention_backward),
    block=BLOCK._replace(step=step),
    decoder=Decoder(empty, prefill, decode.decode, cache_bytes),
    attention_weights=None,
)
# There is no att. What the sums over positions cost is not counted: they are no products of matrices.
ATTENTION = Operation("attention", "sweep", ("qkv",), (), ("atty",))
BACKWARD = Operation("attention", "sweep", ("datty", "qkv", "atty"), (), ("dqkv", "dqkvb"))
OWN_TABLES = TABLES._replace(
    activations=tuple(each for each in TABLES.activations if each.name != "att"),
    block=tuple(ATTENTION if each.name == "attention" else each for each in TABLES.block),
    block_backward=tuple(BACKWARD if each.name == "attention" else each for each in TABLES.block_backward),
)
FAMILY = GPT2._replace(name="linear-attention", program=lambda: OWN, tables=lambda shape: OWN_TABLES)
