"""GPT-2: the forward pass, the backward pass written out by hand, and the loss that carries both.

    tokens ─ embedding ─► x                                           x = wte[token] + wpe[position]
    L times:   x ─┬─ layernorm ─ qkv ─ attention ─ projection ─(+)─► x     the stream goes round each block's
                  └─────────────────────────────────────────────┘          two halves by a residual connection
               x ─┬─ layernorm ─ fc ─ gelu ─ projection ───────(+)─► x
                  └─────────────────────────────────────────────┘
    x ─ layernorm ─ head (wte again) ─► logits ─ classifier ─► loss

`forward_stream` keeps what `backward` needs; that walks the same operations in reverse order and adds up the
gradients where a value was used twice. Each operation's own derivation stands in ops/; which implementation of it runs
is `Execution.op`'s affair. An addition to the stream (+) is made together with the layernorm that follows it, which
spares a GPU one reading of the stream. The layers are unrolled rather than scanned: on the CPU a scan costs a copy of
every layer's weights, activations and gradients (benchmarks/README.md).

    B batch, T sequence length, C channels, L layers, NH heads, HS head size, V vocabulary, Vp padded vocabulary
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelConfig
from llmc_jax.machine.compiling import by_onednn
from llmc_jax.models.execution import PLAIN, Execution, layer_scope, pinned, scope
from llmc_jax.models.family import family_of
from llmc_jax.models.gpt2.tensors import Params
from llmc_jax.models.gradients import Gradients, flatten_gradients
from llmc_jax.models.layout import tensors_of
from llmc_jax.models.program import Block, head_of, mean_loss, mean_of, running, weight_of_rows
from llmc_jax.ops.embedding import embedding_forward
from llmc_jax.ops.head import head_gradients
from llmc_jax.ops.table import Operations


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
    fcw: Any  # (F, C)
    fcb: Any  # (F,)
    fcprojw: Any  # (C, F)
    fcprojb: Any  # (C,)


class BlockActivations(NamedTuple):
    """What one block's backward needs of its forward. None: recomputed in the backward to save memory."""

    residual1: jax.Array  # (B, T, C)  the block's input
    ln1: jax.Array | None  # (B, T, C)  None from recompute level 2
    ln1_mean: jax.Array  # (B, T)
    ln1_rstd: jax.Array  # (B, T)
    qkv: jax.Array  # (B, T, 3C)
    att: Any  # what the implementation of attention keeps: its weights (B, NH, T, T), or a sum for each row
    atty: jax.Array  # (B, T, C)
    residual2: jax.Array  # (B, T, C)  after attention
    ln2: jax.Array | None  # (B, T, C)  None from recompute level 2
    ln2_mean: jax.Array  # (B, T)
    ln2_rstd: jax.Array  # (B, T)
    fch: jax.Array  # (B, T, F)
    fch_gelu: jax.Array | None  # (B, T, F)  None from recompute level 1


class Activations(NamedTuple):
    """What the model's backward needs of its forward."""

    # L of them, a tuple, because stacking them would copy them. Where whole blocks are recomputed, the stream (B, T, C)
    # before every N-th block stands there instead, and None for the others.
    blocks: tuple[BlockActivations | jax.Array | None, ...]
    residual: jax.Array  # (B, T, C)  the last block's output
    lnf_mean: jax.Array  # (B, T)
    lnf_rstd: jax.Array  # (B, T)


def block_params(params: Params, layer: int, kind: Any = BlockParams) -> Any:
    """Return the slices of one layer. kind: the NamedTuple of them."""
    return kind(*(getattr(params, name)[layer] for name in kind._fields))


def block_forward(
    x: jax.Array, pending: jax.Array | None, p: BlockParams, config: ModelConfig, execution: Execution
) -> tuple[jax.Array, jax.Array, BlockActivations]:
    """Compute one transformer block, from the stream x (B, T, C) and what is to be added to it, pending (B, T, C).

    Returns the same two for the next block, and every activation.
    """
    op = execution.op
    with scope("ln1"):
        if pending is None:  # the first block: the embedding has made the whole stream
            residual1 = x
            ln1, ln1_mean, ln1_rstd = pinned(op.layernorm_forward(x, p.ln1w, p.ln1b))
        else:
            residual1, ln1, ln1_mean, ln1_rstd = pinned(op.residual_layernorm_forward(x, pending, p.ln1w, p.ln1b))
    with scope("qkv"):
        qkv = pinned(op.linear_forward(ln1, p.qkvw, p.qkvb))  # (B, T, 3C)
    with scope("attention"):
        atty, att = pinned(op.attention_forward(qkv, config.num_heads))  # (B, T, C)
    with scope("attproj"):
        attproj = pinned(op.linear_forward(atty, p.attprojw, p.attprojb))  # (B, T, C)
    with scope("ln2"):
        residual2, ln2, ln2_mean, ln2_rstd = pinned(op.residual_layernorm_forward(residual1, attproj, p.ln2w, p.ln2b))
    if op.linear_gelu_forward is not None:
        with scope("fc"):
            fch, fch_gelu = pinned(op.linear_gelu_forward(ln2, p.fcw, p.fcb))  # (B, T, F) each
    else:
        with scope("fc"):
            fch = pinned(op.linear_forward(ln2, p.fcw, p.fcb))  # (B, T, F)
        with scope("gelu"):
            fch_gelu = pinned(op.gelu_forward(fch))  # (B, T, F)
    with scope("fcproj"):
        fcproj = pinned(op.linear_forward(fch_gelu, p.fcprojw, p.fcprojb))  # (B, T, C)
    return residual2, fcproj, BlockActivations(
        residual1=residual1, ln1=ln1, ln1_mean=ln1_mean, ln1_rstd=ln1_rstd, qkv=qkv, att=att, atty=atty,
        residual2=residual2, ln2=ln2, ln2_mean=ln2_mean, ln2_rstd=ln2_rstd, fch=fch, fch_gelu=fch_gelu,
    )  # fmt: skip


def kept(a: BlockActivations, layer: int, execution: Execution) -> BlockActivations | jax.Array | None:
    """Return what is kept of a block's activations for the backward."""
    if execution.recompute_blocks:
        return a.residual1 if layer % execution.recompute_blocks == 0 else None
    if execution.recompute >= 1:
        a = a._replace(fch_gelu=None)
    if execution.recompute >= 2:
        a = a._replace(ln1=None, ln2=None)
    return a


def recomputed(a: BlockActivations, p: BlockParams, op: Operations) -> BlockActivations:
    """Return the activations with what was dropped computed again."""
    if a.fch_gelu is None:
        with scope("gelu"):
            a = a._replace(fch_gelu=pinned(op.gelu_forward(a.fch)))
    if a.ln1 is None:
        with scope("ln1"):
            a = a._replace(ln1=pinned(op.layernorm_forward(a.residual1, p.ln1w, p.ln1b))[0])
    if a.ln2 is None:
        with scope("ln2"):
            a = a._replace(ln2=pinned(op.layernorm_forward(a.residual2, p.ln2w, p.ln2b))[0])
    return a


def block_backward(
    dresidual3: jax.Array,
    dfcprojb: jax.Array,
    p: BlockParams,
    a: BlockActivations,
    config: ModelConfig,
    execution: Execution,
) -> tuple[jax.Array, jax.Array, BlockParams]:
    """Go one block backwards: from the gradient of its output to that of its input, and its parameters' gradients.

    The gradient of a bias is the sum of the rows that come out of the operation above it, and that operation returns
    it too. For the block's last bias this is the layernorm of the block above, hence dfcprojb (C,) beside dresidual3
    (B, T, C). Returns dresidual1 (B, T, C), the same two for the block below, and the gradients.
    """
    op = execution.op
    # The barrier ties what is recomputed to the gradient that asks for it: otherwise XLA sees that the forward computed
    # the same values, and keeps those.
    a, dresidual3 = pinned((a, dresidual3))
    a = recomputed(a, p, op)
    assert a.ln1 is not None and a.ln2 is not None and a.fch_gelu is not None

    # The MLP. The stream's gradient goes down both sides of the residual: through the block's half as dfcproj, and
    # straight on, to be added to what comes out of layernorm 2.
    with scope("fcproj"):
        dfch_gelu, dfcprojw = op.linear_backward(dresidual3, a.fch_gelu, p.fcprojw)
    if op.linear_gelu_backward is not None:
        with scope("fcproj"):  # XLA drops dfch_gelu's product, which is unused
            dfch, dfcb = op.linear_gelu_backward(dresidual3, p.fcprojw, a.fch)
    else:
        with scope("gelu"):
            dfch, dfcb = op.gelu_backward(pinned(dfch_gelu), a.fch)
    with scope("fc"):
        dln2, dfcw = op.linear_backward(dfch, a.ln2, p.fcw)
    with scope("ln2"):
        dresidual2, dln2w, dln2b, dattprojb = op.residual_layernorm_backward(
            dresidual3, dln2, a.residual2, p.ln2w, a.ln2_mean, a.ln2_rstd
        )

    # Attention, the same way.
    with scope("attproj"):
        datty, dattprojw = op.linear_backward(dresidual2, a.atty, p.attprojw)
    with scope("attention"):
        dqkv, dqkvb = op.attention_backward(datty, a.qkv, a.atty, a.att, config.num_heads)
    with scope("qkv"):
        dln1, dqkvw = op.linear_backward(dqkv, a.ln1, p.qkvw)
    with scope("ln1"):
        dresidual1, dln1w, dln1b, dbias = op.residual_layernorm_backward(
            dresidual2, dln1, a.residual1, p.ln1w, a.ln1_mean, a.ln1_rstd
        )

    gradients = BlockParams(
        ln1w=dln1w, ln1b=dln1b, qkvw=dqkvw, qkvb=dqkvb, attprojw=dattprojw, attprojb=dattprojb,
        ln2w=dln2w, ln2b=dln2b, fcw=dfcw, fcb=dfcb, fcprojw=dfcprojw, fcprojb=dfcprojb,
    )  # fmt: skip
    # Tied together: otherwise XLA may put off all weights' gradients to the end, and keep what they are made of.
    return pinned((dresidual1, dbias, gradients))


def forward_stream(
    params: Params, tokens: jax.Array, config: ModelConfig, execution: Execution = PLAIN
) -> tuple[jax.Array, Activations]:
    """Compute all before the output head: lnf (B, T, C) of tokens (B, T) int32, T <= maxT, and the activations."""
    program, execution = running(config, execution, tokens)
    block, op = program.block, execution.op
    assert block is not None
    with scope("forward"):
        with scope("embedding"):
            x = pinned(embedding_forward(tokens, params.wte, params.wpe))  # (B, T, C)
        pending, blocks = None, []
        for layer in range(config.num_layers):
            with layer_scope(layer):
                p = block_params(params, layer, block.parameters)
                x, pending, a = block.forward(x, pending, p, config, execution)
                blocks.append(block.kept(a, layer, execution))
        with scope("lnf"):
            assert pending is not None  # there is at least one layer
            x, lnf, mean, rstd = pinned(op.residual_layernorm_forward(x, pending, params.lnfw, params.lnfb))
    return lnf, Activations(tuple(blocks), x, mean, rstd)


def forward(
    params: Params, tokens: jax.Array, config: ModelConfig, execution: Execution = PLAIN
) -> tuple[jax.Array, Activations]:
    """Return logits (B, T, Vp) of tokens (B, T) int32, T <= maxT, and what `backward` needs.

    Columns V..Vp-1 of the logits are padding and mean nothing. Source: llm.c train_gpt2.c, `gpt2_forward`.
    """
    lnf, activations = forward_stream(params, tokens, config, execution)
    op = running(config, execution)[1].op
    with scope("forward"), scope("head"):
        return op.linear_forward(lnf, head_of(params, config), None), activations  # (B, T, Vp)


def block_activations(
    activations: Activations,
    layers: range,
    params: Params,
    config: ModelConfig,
    block: Block,
    execution: Execution,
    dx: jax.Array,
) -> tuple[list[BlockActivations], jax.Array]:
    """Return the activations of some blocks: as kept, or computed again from the stream before the first of them.

    Also returns dx, tied to the recomputation so that it does not begin before its turn.
    """
    blocks = [activations.blocks[layer] for layer in layers]
    if not execution.recompute_blocks:
        return blocks, dx  # type: ignore[return-value]
    x, dx = pinned((blocks[0], dx))
    assert isinstance(x, jax.Array)
    pending, found = None, []
    for layer in layers:
        with layer_scope(layer):
            p = block_params(params, layer, block.parameters)
            x, pending, a = block.forward(x, pending, p, config, execution)
            found.append(a)
    return found, dx


def backward(
    dlnf: jax.Array,
    dhead: jax.Array,
    params: Params,
    tokens: jax.Array,
    activations: Activations,
    config: ModelConfig,
    execution: Execution = PLAIN,
    on_block: Callable[[BlockParams], Any] = lambda found: found,
    waits: bool = False,
) -> Gradients:
    """Return the parameters' gradients from dlnf (B, T, C) and dhead (Vp, C), that of the head's weights.

    on_block: what is made of a layer's gradients as soon as they exist, from the last layer to the first. waits: a
    layer is not begun before that has been done of the layer but one above it, so few whole gradients are alive.
    Source: llm.c train_gpt2.c, `gpt2_backward`.
    """
    program, execution = running(config, execution, tokens)
    block, op = program.block, execution.op
    assert block is not None
    stretch = execution.recompute_blocks or 1
    with scope("backward"):
        with scope("lnf"):
            dx, dlnfw, dlnfb, dbias = op.layernorm_backward(
                dlnf, activations.residual, params.lnfw, activations.lnf_mean, activations.lnf_rstd
            )
        if execution.recompute_blocks:  # the head, and so its logits, before a stretch of layers is computed again
            dx, _ = pinned((dx, dhead))
        gradients: list[Any] = []
        for start in reversed(range(0, config.num_layers, stretch)):
            layers = range(start, min(start + stretch, config.num_layers))
            blocks, dx = block_activations(activations, layers, params, config, block, execution, dx)
            for layer, a in reversed(list(zip(layers, blocks, strict=True))):
                with layer_scope(layer):
                    p = block_params(params, layer, block.parameters)
                    dx, dbias, found = block.backward(dx, dbias, p, a, config, execution)
                    gradients.append(on_block(found))
                    if waits and len(gradients) > 1:
                        dx, gradients[-2] = pinned((dx, gradients[-2]))
        head = family_of(config).head
        with scope("embedding"):  # where the head takes wte too, its gradient is a sum of two
            share = dhead if head == "wte" else jnp.zeros_like(params.wte, dhead.dtype)
            dwte, dwpe = op.embedding_backward(dx, tokens, share)
    own = {head: dhead, "wte": dwte, "wpe": dwpe, "lnfw": dlnfw, "lnfb": dlnfb}
    return Gradients(own, tuple(reversed(gradients)))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def loss_fn(
    flat: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
    execution: Execution = PLAIN,
    weight: jax.Array | float = 1.0,
) -> jax.Array:
    """Return weight times the mean cross-entropy in nats of targets (B, T) given tokens (B, T), in at least float32.

    flat (flat_size,) holds the parameters, in the dtype that the model computes in. `jax.grad(loss_fn)` runs the
    backward written here, not JAX's own, and gives the gradient (flat_size,) in flat's dtype. The weight goes in where
    the gradient begins, so that a large one keeps small 16-bit gradients from vanishing; it is not differentiated.
    """
    return weight * mean_loss(flat, tokens, targets, config, execution)


def _loss_forward(
    flat: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
    execution: Execution,
    weight: jax.Array | float,
) -> tuple[jax.Array, tuple[Any, ...]]:
    params = tensors_of(flat, config)
    lnf, activations = forward_stream(params, tokens, config, execution)
    execution = running(config, execution)[1]
    wide = jnp.promote_types(lnf.dtype, jnp.float32)
    dlosses = weight_of_rows(config, targets, weight, wide)  # (B T,) each counts alike in the mean
    # The classifier makes the logits' gradient of the logits, one over the other, so the head goes backwards at once.
    with scope("forward"):
        losses, dlnf, dhead = head_gradients(
            lnf.reshape(-1, config.channels), head_of(params, config), targets.reshape(-1), dlosses, config.vocab_size,
            execution.op.classifier, execution.logit_rows, execution.op.head_weights, execution.op.embedding_backward,
            by_onednn(execution.compiler_options),
        )  # fmt: skip
    return weight * mean_of(losses, config, targets.shape[1]), (
        params,
        tokens,
        activations,
        dlnf.reshape(lnf.shape),
        dhead,
    )


def _loss_backward(
    config: ModelConfig, execution: Execution, saved: tuple[Any, ...], dloss: jax.Array
) -> tuple[jax.Array, None, None, None]:
    params, tokens, activations, dlnf, dhead = saved
    # dloss is 1 where loss_fn itself is differentiated, and XLA drops the products with it.
    dlnf, dhead = (dlnf * dloss).astype(dlnf.dtype), (dhead * dloss).astype(dhead.dtype)
    gradients = backward(dlnf, dhead, params, tokens, activations, config, execution)
    return flatten_gradients(gradients, config, params.wte.dtype), None, None, None


loss_fn.defvjp(_loss_forward, _loss_backward)


def loss_and_gradients(
    flat: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
    config: ModelConfig,
    execution: Execution = PLAIN,
    weight: jax.Array | float = 1.0,
    on_block: Callable[[Any], Any] = lambda found: found,
    waits: bool = False,
) -> tuple[jax.Array, Gradients]:
    """Return what `loss_fn` returns, and its gradients before they are one buffer. The last two: as in `backward`."""
    loss, saved = _loss_forward(flat, tokens, targets, config, execution, weight)
    params, tokens, activations, dlnf, dhead = saved
    return loss, backward(dlnf, dhead, params, tokens, activations, config, execution, on_block, waits)
