"""The functions that compute a model: the record that a family gives, and what follows from it for every model.

GPT-2's is in gpt2/program.py. A family may write its backward by hand, or leave it to JAX (automatic.py); its decoder
too (decode.py). Leaves out what knows no JAX (family.py).

    B batch, T sequence length, C channels of what the head reads, V vocabulary, Vp rows of the head's weights
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import CAUSAL, ModelShape, attention_of
from llmc_jax.models.execution import PLAIN, Execution, pinned, scope
from llmc_jax.models.family import family_of
from llmc_jax.models.gradients import Gradients
from llmc_jax.models.layout import separate, tensors_of
from llmc_jax.ops.attention import document_starts
from llmc_jax.ops.head import head_losses
from llmc_jax.ops.linear import bias_backward, linear_forward
from llmc_jax.ops.table import PARTS, XLA, Operations, without_replaced

separated = jax.jit(separate, static_argnames="config")  # a flat buffer's weights, as a decoder is given them


class Block(NamedTuple):
    """One layer: called by the forward, the backward, what is computed again, and decoding.

    The stream x (B, T, C) goes from block to block with what is still to be added to it, `pending` (B, T, C), None
    before the first. p: the layer's tensors. a: what the forward found, as `kept` leaves it.
    """

    parameters: type  # a NamedTuple of the tensors with a layer axis, in their order; of their gradients too
    forward: Callable[..., tuple[jax.Array, jax.Array, Any]]  # (x, pending, p, shape, execution) -> x, pending, a
    # (dx, dbias, p, a, shape, execution) -> dx, dbias, gradients. dbias (C,): the gradient of the bias that was added
    # last to `pending`, which is the sum of dx over all rows.
    backward: Callable[..., tuple[jax.Array, jax.Array, Any]]
    kept: Callable[[Any, int, Execution], Any]  # of what a layer's forward found, what the backward is given
    # (x, pending, p, attention, position, shape, op) -> x, pending, keys, values: one position of each text, x (B, C)
    step: Callable[..., tuple[jax.Array, jax.Array, jax.Array, jax.Array]]


class Decoder(NamedTuple):
    """One token after another. A cache is a tree of arrays, whose first axis counts texts, or texts times heads."""

    empty: Callable[..., Any]  # (shape, texts, size, dtype) -> a cache of up to `size` positions
    prefill: Callable[..., tuple[jax.Array, Any]]  # (params, tokens, length, size, shape, execution) -> logits, cache
    decode: Callable[..., tuple[jax.Array, Any]]  # (params, tokens, position, cache, shape) -> the same
    bytes: Callable[..., int]  # (shape, texts, size, element) -> of such a cache


class Program(NamedTuple):
    """The functions that compute a model. Those of the flat buffer take it in the dtype that the model computes in."""

    # (params, tokens (B, T), shape, execution) -> (B, T, C), which the head reads. It takes the layers of a tensor one
    # by one, `params.w[layer]`: they are an array of L, or a tuple where it generates or the state is split.
    hidden: Callable[..., jax.Array]
    # (flat, tokens, targets, shape, execution, weight) -> weight times the mean loss; JAX may differentiate it for flat
    # None: of `hidden`, differentiated by JAX, which then makes the gradients below too
    loss: Callable[..., jax.Array] | None = None
    # the same, then on_block, waits as gpt2/model.py's -> the loss, and Gradients. Several devices may give the tensors
    # in the place of flat, of those with a layer axis a tuple of L: `tensors_of` takes either.
    loss_and_gradients: Callable[..., tuple[jax.Array, Gradients]] | None = None
    block: Block | None = None  # of a model that is made of GPT-2's forward and backward
    decoder: Decoder | None = None  # None: the whole text is computed again for each token
    operations: Callable[[Operations], Operations] = lambda op: op  # with its own in the place of some
    # (params, tokens (1, T), shape, execution, layer) -> (NH, T, T): what each head takes of each position
    attention_weights: Callable[..., jax.Array] | None = None


@cache
def program_of(shape: ModelShape) -> Program:
    """Return what computes a model. Raises InputError as `family_of`."""
    return family_of(shape).program()


def running(shape: ModelShape, execution: Execution, tokens: jax.Array | None = None) -> tuple[Program, Execution]:
    """Return what computes a model, and how: with the operations that its family has in the place of others.

    Attention is bound to what the shape says of it. tokens (B, T): by which its rows know their document.
    """
    program, spec = program_of(shape), attention_of(shape)
    op = without_replaced(program.operations(execution.op), execution.op)
    if spec != CAUSAL:
        starts = None if spec.documents < 0 or tokens is None else document_starts(tokens, spec.documents)
        forward, backward = (
            partial(each, spec=spec, starts=starts) for each in (op.attention_forward, op.attention_backward)
        )
        op = op._replace(attention_forward=forward, attention_backward=backward)
    return program, execution._replace(op=op)


def replaced(shape: ModelShape) -> tuple[str, ...]:
    """Return the products of ours, of `Operations`, that a model does without: its family has a part of its own."""
    from llmc_jax.models.gpt2.program import PROGRAM

    program, stand_ins = program_of(shape), XLA._replace(**dict.fromkeys(PARTS, program_of))
    op, block, own = without_replaced(program.operations(stand_ins), stand_ins), program.block, PROGRAM.block
    absent = {name for name in PARTS if getattr(op, name) is None}
    if block is None or own is None or block.forward is not own.forward:
        absent.add("linear_gelu_forward")
    if block is None or own is None or block.backward is not own.backward or program.loss is None:
        absent.add("linear_gelu_backward")
    return tuple(sorted(absent))


def mean_of(losses: jax.Array, shape: ModelShape, T: int) -> jax.Array:
    """Return the mean of losses (B T,), of the rows that do not see their target."""
    rows = attention_of(shape).counted(T)
    return jnp.mean(losses if len(rows) == T else losses.reshape(-1, T)[:, rows.start : rows.stop])


def weight_of_rows(shape: ModelShape, tokens: jax.Array, weight: jax.Array | float, dtype: Any) -> jax.Array:
    """Return what each of tokens (B, T) has of a weight in `mean_of`, (B T,): 0 where a row sees its target."""
    T = tokens.shape[1]
    rows = attention_of(shape).counted(T)
    equal = jnp.full((tokens.size,), weight / (tokens.size // T * len(rows)), dtype)
    if len(rows) == T:
        return equal
    counts = (jnp.arange(T) >= rows.start) & (jnp.arange(T) < rows.stop)
    return jnp.where(jnp.tile(counts, tokens.shape[0]), equal, 0)


def decoder_of(shape: ModelShape) -> Decoder:
    """Return what decodes a model's tokens one after another."""
    if (found := program_of(shape).decoder) is not None:
        return found
    from llmc_jax.models import recompute

    return recompute.DECODER


def head_of(params: Any, shape: ModelShape) -> jax.Array:
    """Return the weights (Vp, C) of the output head."""
    found: jax.Array = getattr(params, family_of(shape).head)
    return found


def with_norm(op: Operations, forward: Callable[..., Any], backward: Callable[..., Any]) -> Operations:
    """Return operations with another normalisation in the place of layernorm, alone and behind an addition.

    forward(x, w, b) -> out and two statistics; backward(dout, x, w, *statistics) -> dx, dw, db, dbias, as layernorm's.
    """

    def residual_forward(x: jax.Array, f: jax.Array, w: jax.Array, b: jax.Array) -> tuple[Any, ...]:
        residual = pinned(x + f)
        return residual, *forward(residual, w, b)

    def residual_backward(dresidual: jax.Array, dout: jax.Array, *saved: Any) -> tuple[Any, ...]:
        dx, dw, db, _ = backward(dout, *saved)
        dx = dresidual + dx
        return dx, dw, db, bias_backward(dx)

    return op._replace(
        layernorm_forward=forward, layernorm_backward=backward,
        residual_layernorm_forward=residual_forward, residual_layernorm_backward=residual_backward,
    )  # fmt: skip


# ----- what follows for every model -----------------------------------------------------------------------------------


def hidden(params: Any, tokens: jax.Array, shape: ModelShape, execution: Execution = PLAIN) -> jax.Array:
    """Return what the output head reads, (B, T, C), of tokens (B, T) int32."""
    return program_of(shape).hidden(params, tokens, shape, execution)


def logits(params: Any, tokens: jax.Array, shape: ModelShape, execution: Execution = PLAIN) -> jax.Array:
    """Return the logits (B, T, Vp) of tokens (B, T) int32; columns V..Vp-1 are padding and mean nothing."""
    rows = hidden(params, tokens, shape, execution)
    with scope("forward"), scope("head"):
        return linear_forward(rows, head_of(params, shape), None)


def token_losses(
    flat: jax.Array, tokens: jax.Array, targets: jax.Array, shape: ModelShape, execution: Execution = PLAIN
) -> jax.Array:
    """Return the cross-entropy (B T,) in nats of each of targets (B, T) given tokens (B, T), keeping no residuals."""
    params = tensors_of(flat, shape)
    found = hidden(params, tokens, shape, execution)
    op = running(shape, execution)[1].op
    with scope("forward"):
        return head_losses(
            found.reshape(-1, found.shape[-1]), head_of(params, shape), targets.reshape(-1), shape.vocab_size,
            op.classifier_forward, execution.logit_rows, op.head_weights,
        )  # fmt: skip


def mean_loss(
    flat: jax.Array, tokens: jax.Array, targets: jax.Array, shape: ModelShape, execution: Execution = PLAIN
) -> jax.Array:
    """Return the mean of `token_losses`."""
    losses = token_losses(flat, tokens, targets, shape, execution)
    with scope("forward"):
        return mean_of(losses, shape, targets.shape[1])


def loss_fn(
    flat: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
    shape: ModelShape,
    execution: Execution = PLAIN,
    weight: jax.Array | float = 1.0,
) -> jax.Array:
    """Return weight times the mean loss, whose gradient for flat is the model's own (`Program.loss`)."""
    from llmc_jax.models import automatic

    found = program_of(shape).loss or automatic.loss
    return found(flat, tokens, targets, shape, execution, weight)


def loss_and_gradients(
    flat: jax.Array, tokens: jax.Array, targets: jax.Array, shape: ModelShape, *how: Any
) -> tuple[jax.Array, Gradients]:
    """Return what `loss_fn` returns, and its gradients before they are one buffer (`Program.loss_and_gradients`)."""
    from llmc_jax.models import automatic

    program = program_of(shape)
    found = (program.loss and program.loss_and_gradients) or automatic.loss_and_gradients
    return found(flat, tokens, targets, shape, *how)
