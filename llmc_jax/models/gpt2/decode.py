"""GPT-2 one token after another: what attention needs of the tokens before is kept, not computed again.

    prefill     the whole prompt at once, by `forward_stream`; each layer's keys and values go into a cache
    decode      one more token of each text: one row goes through the layers, attention reads the cache

A forward of T positions for every new token would do T times the work. With the cache a new token costs one reading of
all weights, and of the keys and values so far. The blocks stand here once more, for one row: the same operations in the
same order as in model.py's `block_forward`, without anything for a backward.

Positions are absolute (wpe), so a cache cannot slide: when the last position is used, the oldest tokens are dropped and
the others prefilled anew, at other positions. Leaves out what is drawn from the logits, and when that is (generate/).

    B texts, S positions that the cache has room for, C channels, L layers, NH heads, HS head size, V vocabulary
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import PLAIN, Execution, layer_scope, pinned, scope
from llmc_jax.models.gpt2.model import BlockParams, block_params, forward_stream
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.program import head_of, running
from llmc_jax.ops.attention import attention_step_forward, document_starts, keys_and_values
from llmc_jax.ops.linear import linear_rows_forward
from llmc_jax.ops.table import Operations


class Cache(NamedTuple):
    """The keys and values of the positions so far, of each layer. An array for each, so that it is changed in place."""

    keys: tuple[jax.Array, ...]  # L of (B KV, S, HS)
    values: tuple[jax.Array, ...]  # L of (B KV, S, HS)
    starts: jax.Array | None = None  # (B,) where the document of each text begins, if rows see no other


def empty_cache(config: ModelConfig, texts: int, size: int, dtype: jnp.dtype) -> Cache:
    """Return a cache for so many texts of up to `size` positions: zeros."""
    shape, documents = (texts * config.kv_heads, size, config.head_size), config.attention.documents >= 0
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return Cache(keys, values, jnp.zeros(texts, jnp.int32) if documents else None)


def cache_bytes(config: ModelConfig, texts: int, size: int, element: int) -> int:
    """Return the bytes of `empty_cache`. element: of one value."""
    return 2 * config.num_layers * texts * size * config.kv_heads * config.head_size * element


def prefill(
    params: Params, tokens: jax.Array, length: jax.Array, size: int, config: ModelConfig, execution: Execution
) -> tuple[jax.Array, Cache]:
    """Return the logits (B, V) in at least float32 of the token after each text, and the cache of the texts.

    tokens (B, P) int32, of which the first `length` count: what stands behind them reaches no earlier position, and
    the cache's places behind `length` are overwritten before they are read. size: S, at least P.
    """
    assert tokens.shape[1] <= size
    lnf, activations = forward_stream(params, tokens, config, execution)  # (B, P, C)
    with scope("cache"):
        spec, blocks = config.attention, activations.blocks
        of_layers = [keys_and_values(a.qkv, config.num_heads, size, spec) for a in blocks]  # type: ignore[union-attr]
        keys, values = zip(*of_layers, strict=True)
        starts = document_starts(tokens, spec.documents)[:, length - 1] if spec.documents >= 0 else None
    last = jax.lax.dynamic_index_in_dim(lnf, length - 1, axis=1, keepdims=False)  # (B, C)
    return head(last, head_of(params, config), config), Cache(keys, values, starts)


def decode(
    params: Params, tokens: jax.Array, position: jax.Array, cache: Cache, config: ModelConfig
) -> tuple[jax.Array, Cache]:
    """Return the logits (B, V) in at least float32 of the token after `tokens`, and the cache with these.

    tokens (B,) int32 stand at `position`, a scalar below S and maxT; the cache holds the positions before it."""
    program, execution = running(config, PLAIN)
    block, op = program.block, execution.op
    assert block is not None
    with scope("embedding"):
        x = pinned(params.wte[tokens] + params.wpe[position])  # (B, C)
    pending, keys, values, starts, spec = None, [], [], cache.starts, config.attention
    if starts is not None:
        starts = jnp.where(tokens == spec.documents, position, starts)
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        with layer_scope(layer):
            of_layer = partial(
                attention_step_forward, keys=k, values=v, position=position, num_heads=config.num_heads, spec=spec,
                starts=starts,
            )  # fmt: skip
            p = block_params(params, layer, block.parameters)
            x, pending, k, v = block.step(x, pending, p, of_layer, position, config, op)
        keys.append(k)
        values.append(v)
    with scope("lnf"):
        assert pending is not None  # there is at least one layer
        _, lnf, _, _ = pinned(op.residual_layernorm_forward(x, pending, params.lnfw, params.lnfb))
    return head(lnf, head_of(params, config), config), Cache(tuple(keys), tuple(values), starts)


def block_step(
    x: jax.Array,
    pending: jax.Array | None,
    p: BlockParams,
    attention: partial[tuple[jax.Array, jax.Array, jax.Array]],
    position: jax.Array,
    config: ModelConfig,
    op: Operations,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute one transformer block of one position, from the stream x (B, C) and what is to be added to it.

    attention(qkv (B, 3C)) gives atty (B, C), and the layer's keys and values with the position's own. Returns x and
    what is to be added for the next block, and the keys and values.
    """
    if pending is None:  # the first block: the embedding has made the whole stream
        ln1, _, _ = pinned(op.layernorm_forward(x, p.ln1w, p.ln1b))
    else:
        x, ln1, _, _ = pinned(op.residual_layernorm_forward(x, pending, p.ln1w, p.ln1b))
    qkv = pinned(linear_rows_forward(ln1, p.qkvw, p.qkvb))  # (B, 3C)
    atty, keys, values = attention(qkv)  # (B, C)
    attproj = pinned(linear_rows_forward(atty, p.attprojw, p.attprojb))  # (B, C)
    x, ln2, _, _ = pinned(op.residual_layernorm_forward(x, attproj, p.ln2w, p.ln2b))
    fch = pinned(linear_rows_forward(ln2, p.fcw, p.fcb))  # (B, F)
    fch_gelu = pinned(op.gelu_forward(fch))  # (B, F)
    fcproj = pinned(linear_rows_forward(fch_gelu, p.fcprojw, p.fcprojb))  # (B, C)
    return x, fcproj, keys, values


def head(lnf: jax.Array, weights: jax.Array, config: ModelConfig) -> jax.Array:
    """Return the logits (B, V) in at least float32 of lnf (B, C), from the head's weights (Vp, C)."""
    with scope("head"):
        logits = linear_rows_forward(lnf, weights, None)[:, : config.vocab_size]
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
