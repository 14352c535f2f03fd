"""GPT-2: the forward pass, the backward pass written out by hand, and the loss that carries both.

    tokens ─ embedding ─► x                                           x = wte[token] + wpe[position]
    L times:   x ─┬─ layernorm ─ qkv ─ attention ─ projection ─(+)─► x     the stream goes round each block's
                  └─────────────────────────────────────────────┘          two halves by a residual connection
               x ─┬─ layernorm ─ fc ─ gelu ─ projection ───────(+)─► x
                  └─────────────────────────────────────────────┘
    x ─ layernorm ─ head (wte again) ─► logits ─ classifier ─► loss

`forward` keeps what `backward` needs; `backward` walks the same operations in reverse order and adds up the gradients
where a value was used twice. Each operation's own derivation stands in ops/. The layers are unrolled rather than
scanned: on the CPU a scan costs a copy of every layer's weights, activations and gradients (benchmarks/README.md).

    B batch, T sequence length, C channels, L layers, NH heads, HS head size, V vocabulary, Vp padded vocabulary
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax import params as flat_params
from llmc_jax.config import ModelConfig
from llmc_jax.ops.attention import attention_backward, attention_forward
from llmc_jax.ops.classifier import classifier_backward, classifier_forward
from llmc_jax.ops.embedding import embedding_backward, embedding_forward
from llmc_jax.ops.gelu import gelu_backward, gelu_forward
from llmc_jax.ops.layernorm import layernorm_backward, layernorm_forward
from llmc_jax.ops.linear import bias_backward, linear_backward, linear_forward
from llmc_jax.ops.residual import residual_backward, residual_forward
from llmc_jax.params import Params


class BlockParams(NamedTuple):
    """One layer's slice of the 12 tensors that have a layer axis; also the shape of one layer's gradients."""

    ln1w: Any  # (C,)
    ln1b: Any  # (C,)
    qkvw: Any  # (3C, C)
    qkvb: Any  # (3C,)
    attprojw: Any  # (C, C)
    attprojb: Any  # (C,)
    ln2w: Any  # (C,)
    ln2b: Any  # (C,)
    fcw: Any  # (4C, C)
    fcb: Any  # (4C,)
    fcprojw: Any  # (C, 4C)
    fcprojb: Any  # (C,)


class BlockActivations(NamedTuple):
    """What one block's backward needs of its forward. None: recomputed in the backward to save memory."""

    residual1: jax.Array  # (B, T, C)  the block's input
    ln1: jax.Array | None  # (B, T, C)  None from recompute level 2
    ln1_mean: jax.Array  # (B, T)
    ln1_rstd: jax.Array  # (B, T)
    qkv: jax.Array  # (B, T, 3C)
    att: jax.Array  # (B, NH, T, T)
    atty: jax.Array  # (B, T, C)
    residual2: jax.Array  # (B, T, C)  after attention
    ln2: jax.Array | None  # (B, T, C)  None from recompute level 2
    ln2_mean: jax.Array  # (B, T)
    ln2_rstd: jax.Array  # (B, T)
    fch: jax.Array  # (B, T, 4C)
    fch_gelu: jax.Array | None  # (B, T, 4C)  None from recompute level 1


class Activations(NamedTuple):
    """What the model's backward needs of its forward."""

    blocks: tuple[BlockActivations, ...]  # L of them; a tuple, because stacking them would copy them
    residual: jax.Array  # (B, T, C)  the last block's output
    lnf: jax.Array  # (B, T, C)
    lnf_mean: jax.Array  # (B, T)
    lnf_rstd: jax.Array  # (B, T)


def block_params(params: Params, layer: int) -> BlockParams:
    """The slices of one layer."""
    return BlockParams(*(getattr(params, name)[layer] for name in BlockParams._fields))


def block_forward(x: jax.Array, p: BlockParams, num_heads: int, recompute: int) -> tuple[jax.Array, BlockActivations]:
    """One transformer block: x (B, T, C) to its output (B, T, C), and what the backward needs."""
    ln1, ln1_mean, ln1_rstd = layernorm_forward(x, p.ln1w, p.ln1b)
    qkv = linear_forward(ln1, p.qkvw, p.qkvb)  # (B, T, 3C)
    atty, att = attention_forward(qkv, num_heads)  # (B, T, C), (B, NH, T, T)
    residual2 = residual_forward(x, linear_forward(atty, p.attprojw, p.attprojb))  # (B, T, C)

    ln2, ln2_mean, ln2_rstd = layernorm_forward(residual2, p.ln2w, p.ln2b)
    fch = linear_forward(ln2, p.fcw, p.fcb)  # (B, T, 4C)
    fch_gelu = gelu_forward(fch)
    residual3 = residual_forward(residual2, linear_forward(fch_gelu, p.fcprojw, p.fcprojb))  # (B, T, C)

    return residual3, BlockActivations(
        residual1=x,
        ln1=ln1 if recompute < 2 else None,
        ln1_mean=ln1_mean,
        ln1_rstd=ln1_rstd,
        qkv=qkv,
        att=att,
        atty=atty,
        residual2=residual2,
        ln2=ln2 if recompute < 2 else None,
        ln2_mean=ln2_mean,
        ln2_rstd=ln2_rstd,
        fch=fch,
        fch_gelu=fch_gelu if recompute < 1 else None,
    )


def block_backward(dresidual3: jax.Array, p: BlockParams, a: BlockActivations) -> tuple[jax.Array, BlockParams]:
    """One block backwards: from the gradient of its output to that of its input, and its parameters' gradients."""
    if a.fch_gelu is None:
        # Without the barrier XLA sees that the forward computed the same values, and keeps those instead.
        a, dresidual3 = jax.lax.optimization_barrier((a, dresidual3))
    fch_gelu = a.fch_gelu if a.fch_gelu is not None else gelu_forward(a.fch)
    ln1 = a.ln1 if a.ln1 is not None else layernorm_forward(a.residual1, p.ln1w, p.ln1b)[0]
    ln2 = a.ln2 if a.ln2 is not None else layernorm_forward(a.residual2, p.ln2w, p.ln2b)[0]

    # The MLP. The stream's gradient goes down both sides of the residual and comes together before layernorm 2.
    dresidual2, dfcproj = residual_backward(dresidual3)
    dfch_gelu, dfcprojw = linear_backward(dfcproj, fch_gelu, p.fcprojw)
    dfcprojb = bias_backward(dfcproj)
    dfch = gelu_backward(dfch_gelu, a.fch)
    dln2, dfcw = linear_backward(dfch, ln2, p.fcw)
    dfcb = bias_backward(dfch)
    dx, dln2w, dln2b = layernorm_backward(dln2, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd)
    dresidual2 = dresidual2 + dx

    # Attention, the same way.
    dresidual1, dattproj = residual_backward(dresidual2)
    datty, dattprojw = linear_backward(dattproj, a.atty, p.attprojw)
    dattprojb = bias_backward(dattproj)
    dqkv = attention_backward(datty, a.qkv, a.atty, a.att)
    dln1, dqkvw = linear_backward(dqkv, ln1, p.qkvw)
    dqkvb = bias_backward(dqkv)
    dx, dln1w, dln1b = layernorm_backward(dln1, a.residual1, p.ln1w, a.ln1_mean, a.ln1_rstd)
    dresidual1 = dresidual1 + dx

    return dresidual1, BlockParams(
        ln1w=dln1w, ln1b=dln1b, qkvw=dqkvw, qkvb=dqkvb, attprojw=dattprojw, attprojb=dattprojb,
        ln2w=dln2w, ln2b=dln2b, fcw=dfcw, fcb=dfcb, fcprojw=dfcprojw, fcprojb=dfcprojb,
    )  # fmt: skip


def forward_stream(
    params: Params, tokens: jax.Array, config: ModelConfig, recompute: int = 0
) -> tuple[jax.Array, Activations]:
    """Everything before the output head: lnf (B, T, C) of tokens (B, T) int32, T <= maxT, and the activations.

    recompute: 0 keeps every activation, 1 drops GELU's outputs, 2 the layernorms' too (llm.c's -r); the backward
    computes them again, with the same result up to rounding.
    """
    x = embedding_forward(tokens, params.wte, params.wpe)  # (B, T, C)
    blocks = []
    for layer in range(config.num_layers):
        x, activations = block_forward(x, block_params(params, layer), config.num_heads, recompute)
        blocks.append(activations)
    lnf, lnf_mean, lnf_rstd = layernorm_forward(x, params.lnfw, params.lnfb)
    return lnf, Activations(tuple(blocks), x, lnf, lnf_mean, lnf_rstd)


def forward(
    params: Params, tokens: jax.Array, config: ModelConfig, recompute: int = 0
) -> tuple[jax.Array, Activations]:
    """Logits (B, T, Vp) of tokens (B, T) int32, T <= maxT, and what `backward` needs.

    Columns V..Vp-1 of the logits are padding and mean nothing. recompute as in `forward_stream`.
    Source: llm.c train_gpt2.c, `gpt2_forward`.
    """
    lnf, activations = forward_stream(params, tokens, config, recompute)
    return linear_forward(lnf, params.wte, None), activations  # (B, T, Vp)


def backward(
    dlogits: jax.Array, params: Params, tokens: jax.Array, activations: Activations, config: ModelConfig
) -> Params:
    """Gradients of the 16 tensors from the gradient of the logits (B, T, Vp).

    The tensors with a layer axis come as tuples of L arrays, ready for `flatten_gradients`.
    Source: llm.c train_gpt2.c, `gpt2_backward`.
    """
    dlnf, dwte = linear_backward(dlogits, activations.lnf, params.wte)  # (B, T, C), (Vp, C)
    dx, dlnfw, dlnfb = layernorm_backward(
        dlnf, activations.residual, params.lnfw, activations.lnf_mean, activations.lnf_rstd
    )
    layers: list[BlockParams] = []
    for layer in reversed(range(config.num_layers)):
        dx, gradients = block_backward(dx, block_params(params, layer), activations.blocks[layer])
        layers.append(gradients)
    dwte, dwpe = embedding_backward(dx, tokens, dwte)  # wte is used twice: the head's gradient and the embedding's
    unused_positions = jnp.zeros((config.max_seq_len - dwpe.shape[0], config.channels), dwpe.dtype)
    by_tensor = BlockParams(*zip(*reversed(layers), strict=True))
    return Params(wte=dwte, wpe=(dwpe, unused_positions), lnfw=dlnfw, lnfb=dlnfb, **by_tensor._asdict())


def flatten_gradients(gradients: Params, config: ModelConfig) -> jax.Array:
    """The flat gradient (flat_size,) of what `backward` returned: one concatenation, in the order of the file."""
    pieces = [jnp.ravel(piece) for piece in jax.tree.leaves(gradients)]
    padding = flat_params.flat_size(config) - flat_params.num_parameters(config)
    return jnp.concatenate([*pieces, jnp.zeros(padding, pieces[0].dtype)])


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def loss_fn(
    flat: jax.Array, tokens: jax.Array, targets: jax.Array, config: ModelConfig, recompute: int = 0
) -> jax.Array:
    """Mean cross-entropy in nats of targets (B, T) given tokens (B, T); flat (flat_size,) holds the parameters.

    `jax.grad(loss_fn)` runs the backward written here, not JAX's own.
    """
    logits, _ = forward(flat_params.views(flat, config), tokens, config, recompute)
    losses, _ = classifier_forward(logits, targets, config.vocab_size)  # (B, T)
    return jnp.mean(losses)


def _loss_forward(
    flat: jax.Array, tokens: jax.Array, targets: jax.Array, config: ModelConfig, recompute: int
) -> tuple[jax.Array, tuple[Any, ...]]:
    params = flat_params.views(flat, config)
    logits, activations = forward(params, tokens, config, recompute)
    losses, logsumexp = classifier_forward(logits, targets, config.vocab_size)  # (B, T) each
    return jnp.mean(losses), (params, tokens, targets, activations, logits, logsumexp)


def _loss_backward(
    config: ModelConfig, recompute: int, saved: tuple[Any, ...], dloss: jax.Array
) -> tuple[jax.Array, None, None]:
    params, tokens, targets, activations, logits, logsumexp = saved
    dlosses = jnp.full(targets.shape, dloss / targets.size, logsumexp.dtype)  # (B, T) each counts alike in the mean
    dlogits = classifier_backward(dlosses, logits, targets, logsumexp, config.vocab_size)  # (B, T, Vp)
    gradients = backward(dlogits, params, tokens, activations, config)
    return flatten_gradients(gradients, config), None, None


loss_fn.defvjp(_loss_forward, _loss_backward)
