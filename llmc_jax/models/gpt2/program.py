"""GPT-2's `Program`: a family that varies it replaces some of these."""

from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelConfig
from llmc_jax.models.execution import Execution
from llmc_jax.models.gpt2 import decode, model
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.program import Block, Decoder, Program
from llmc_jax.ops import attention
from llmc_jax.ops.attention import document_starts


def hidden(params: Params, tokens: jax.Array, config: ModelConfig, execution: Execution) -> jax.Array:
    """Return lnf (B, T, C), which the head reads."""
    return model.forward_stream(params, tokens, config, execution)[0]


def attention_weights(
    params: Params, tokens: jax.Array, config: ModelConfig, execution: Execution, layer: int
) -> jax.Array:
    """Return the weights (NH, T, T) float32 of one layer's attention to tokens (1, T)."""
    _, activations = model.forward_stream(params, tokens, config, execution)
    block: Any = activations.blocks[layer]  # a family's own may be no BlockActivations
    spec = config.attention
    starts = document_starts(tokens, spec.documents) if spec.documents >= 0 else None
    return attention.attention_weights(block.qkv, config.num_heads, spec, starts)[0].astype(jnp.float32)


BLOCK = Block(model.BlockParams, model.block_forward, model.block_backward, model.kept, decode.block_step)
DECODER = Decoder(decode.empty_cache, decode.prefill, decode.decode, decode.cache_bytes)
PROGRAM = Program(
    hidden=hidden,
    loss=model.loss_fn,
    loss_and_gradients=model.loss_and_gradients,
    block=BLOCK,
    decoder=DECODER,
    attention_weights=attention_weights,
)
