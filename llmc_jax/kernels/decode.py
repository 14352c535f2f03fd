"""GPT-2 one token after another by handwritten kernels: models/gpt2/decode.py's `decode` once more, five a block.

    norm_linear       layernorm of the stream, then qkv
    attention_step    the cache, and what the position puts into it
    linear_residual   attproj, added to the stream
    norm_linear       layernorm, fc, GELU
    linear_residual   fcproj, added to the stream

The kernels are in pallas_kernels/decode.py. Leaves out the prefill, which is a model's own, and models that vary GPT-2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import layer_scope, scope
from llmc_jax.models.gpt2 import decode as by_xla
from llmc_jax.models.layout import num_layers, tensor_specs
from llmc_jax.models.packed import Packed
from pallas_kernels import decode as kernels
from pallas_kernels.decode import Tensor
from pallas_kernels.mosaic import THREADS


class Cache(NamedTuple):
    """Keys and values of all layers: one array each, (L, B NH, S, HS), which kernels change in place."""

    keys: jax.Array
    values: jax.Array


def stacked(cache: by_xla.Cache) -> Cache:
    """Return a cache as the kernels have it: layers in one array, of a multiple of 128 positions."""
    behind = ((0, 0), (0, 0), (0, -cache.keys[0].shape[1] % THREADS), (0, 0))
    return Cache(*(jnp.pad(jnp.stack(layers), behind) for layers in (cache.keys, cache.values)))


def decode(
    weights: Packed, tokens: jax.Array, position: jax.Array, cache: Cache, shape: ModelConfig
) -> tuple[jax.Array, Cache]:
    """Return the logits (B, V) float32 of the token after `tokens` (B,) int32 at `position`, and the cache with these.

    Any B. The model must have no `decoding_refusal`.
    """
    rows, C = weights.rows, shape.channels
    of = {
        spec.name: Tensor(spec.offset // C, spec.size // num_layers(shape) // C if spec.tensor.layered else 0)
        for spec in tensor_specs(shape)
    }
    of["headw"] = of["wte"]
    how: dict[str, Any] = {"target": weights.target, "interpret": weights.interpret}

    def normed(x: jax.Array, name: str, norm: str, layer: int, outputs: int, **more: Any) -> jax.Array:
        bias, places = of.get(f"{name}b"), (of[f"{norm}w"], of[f"{norm}b"])
        static = {"norm": places, "weight": of[f"{name}w"], "bias": bias, "outputs": outputs, **more, **how}
        return _few(partial(kernels.norm_linear, **static), rows, layer, x)

    def added(x: jax.Array, a: jax.Array, name: str, layer: int) -> jax.Array:
        static = {"weight": of[f"{name}w"], "bias": of[f"{name}b"], **how}
        return _few(partial(kernels.linear_residual, **static), rows, layer, x, a)

    keys, values = cache
    with scope("embedding"):
        x = rows[of["wte"].first + tokens] + rows[of["wpe"].first + position]  # (B, C)
    for layer in range(num_layers(shape)):
        with layer_scope(layer):
            qkv = normed(x, "qkv", "ln1", layer, 3 * C)
            atty, keys, values = kernels.attention_step(qkv, keys, values, jnp.int32(layer), position, **how)
            x = added(x, atty, "attproj", layer)
            fch_gelu = normed(x, "fc", "ln2", layer, 4 * C, gelu=True)  # (B, 4C)
            x = added(x, fch_gelu, "fcproj", layer)
    with scope("head"):
        logits = normed(x, "head", "lnf", 0, shape.padded_vocab_size, out_dtype=jnp.float32)  # (B, Vp)
    return logits[:, : shape.vocab_size], Cache(keys, values)


def _few(kernel: Callable[..., jax.Array], rows: jax.Array, layer: int, *texts: jax.Array) -> jax.Array:
    """Call a kernel with arrays (B, …), 16 texts at a time."""
    starts = range(0, len(texts[0]), kernels.TEXTS)
    few = ([each[start : start + kernels.TEXTS] for each in texts] for start in starts)
    found = [kernel(*each, rows, jnp.int32(layer)) for each in few]
    return found[0] if len(found) == 1 else jnp.concatenate(found)
