"""GPT-2 of which the first LAYERS layers run alone: a checkpoint can be read, and cut.

    forward     that of a model with so many layers, and with their tensors
    backward    its backward; the tensors of the others get 0, and are frozen

The stream of the last layer that runs goes to the last layernorm and the head, which expect that of layer L: how far is
a layer's stream from words already? Train the rest on, and see how few steps mend it. The others' tensors stay in the
files, so the same checkpoint can be cut elsewhere. The price is a copy of the weights that run, in each step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import Execution
from llmc_jax.models.gpt2 import decode, model
from llmc_jax.models.gpt2.family import FAMILY as GPT2
from llmc_jax.models.gpt2.program import PROGRAM
from llmc_jax.models.gradients import Gradients
from llmc_jax.models.layout import flat_size, tensor_specs, tensors_of
from llmc_jax.models.program import Decoder

LAYERS = 1


def cut(shape: ModelConfig) -> ModelConfig:
    """Return the shape of what runs."""
    return replace(shape, num_layers=min(LAYERS, shape.num_layers))


def cut_weights(flat: jax.Array, shape: ModelConfig) -> jax.Array:
    """Return the flat buffer of what runs from that of the whole model."""
    tensors, small = tensors_of(flat, shape), cut(shape)
    named = ((spec.tensor.layered, getattr(tensors, spec.name)) for spec in tensor_specs(small))
    found = [each[: small.num_layers] if layered else each for layered, each in named]
    joined = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(found)])
    return jnp.pad(joined, (0, flat_size(small) - joined.size))


def hidden(params: Any, tokens: jax.Array, shape: ModelConfig, execution: Execution) -> jax.Array:
    """Return lnf (B, T, C), which the head reads."""
    return PROGRAM.hidden(params, tokens, cut(shape), execution)


def loss(flat: jax.Array, tokens: jax.Array, targets: jax.Array, shape: ModelConfig, *how: Any) -> jax.Array:
    """Return the loss (`Program.loss`). JAX finds that what `cut_weights` leaves out has the gradient 0."""
    return model.loss_fn(cut_weights(flat, shape), tokens, targets, cut(shape), *how)


def loss_and_gradients(
    flat: jax.Array, tokens: jax.Array, targets: jax.Array, shape: ModelConfig, execution: Execution, weight: Any,
    on_block: Callable[[Any], Any] = lambda found: found, waits: bool = False,
) -> tuple[jax.Array, Gradients]:  # fmt: skip
    """Return the loss and its gradients by tensor (`Program.loss_and_gradients`)."""
    small, params = cut(shape), tensors_of(flat, shape)
    found, (own, blocks) = model.loss_and_gradients(
        cut_weights(flat, shape), tokens, targets, small, execution, weight, on_block, waits
    )
    rest = (model.block_params(params, layer) for layer in range(small.num_layers, shape.num_layers))
    return found, Gradients(own, (*blocks, *(on_block(jax.tree.map(jnp.zeros_like, each)) for each in rest)))


def prefill(
    params: Any, tokens: jax.Array, length: jax.Array, size: int, shape: ModelConfig, execution: Execution
) -> tuple[jax.Array, Any]:
    """Return the logits after each text, and a cache of the layers that run (`Decoder.prefill`)."""
    return decode.prefill(params, tokens, length, size, cut(shape), execution)


DECODER = Decoder(
    lambda shape, *size: decode.empty_cache(cut(shape), *size),
    prefill,
    decode.decode,  # it runs as many layers as the cache has
    lambda shape, *size: decode.cache_bytes(cut(shape), *size),
)


def frozen(shape: ModelConfig) -> tuple[str, ...]:
    """Return the tensors of the layers that do not run."""
    names = [tensor.name for tensor in GPT2.tensors(shape) if tensor.layered]
    return tuple(f"{name} {layer}" for layer in range(LAYERS, shape.num_layers) for name in names)


OWN = PROGRAM._replace(
    hidden=hidden, loss=loss, loss_and_gradients=loss_and_gradients, decoder=DECODER, attention_weights=None
)
FAMILY = GPT2._replace(name="only-n-layers", program=lambda: OWN, frozen=frozen)
