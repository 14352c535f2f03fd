"""The gradient of a model that has no backward of its own: JAX makes it, through the operations of the run.

A kernel has a backward that JAX cannot find by itself, so each operation here is a pair of both (`jax.custom_vjp`). JAX
keeps what it needs of the forward: nothing is computed again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from llmc_jax.config.model import ModelShape
from llmc_jax.models.execution import Execution, scope
from llmc_jax.models.gradients import Gradients
from llmc_jax.models.layout import num_layers, tensor_specs, tensors_of
from llmc_jax.models.program import head_of, mean_of, program_of, running, weight_of_rows
from llmc_jax.ops.embedding import embedding_forward
from llmc_jax.ops.head import head_gradients, head_losses
from llmc_jax.ops.table import Operations


class Differentiable(NamedTuple):
    """Operations that JAX can differentiate, whatever computes them. Shapes are those of ops/."""

    embedding: Callable[[Any, Any, Any], Any]  # tokens (B, T), wte (Vp, C), wpe (maxT, C) -> (B, T, C)
    layernorm: Callable[[Any, Any, Any], Any]  # x (..., C), w (C,), b (C,) -> (..., C)
    linear: Callable[[Any, Any, Any], Any]  # x (..., I), w (O, I), b (O,) or None -> (..., O)
    gelu: Callable[[Any], Any]  # x -> the same shape
    attention: Callable[[Any, int], Any]  # packed qkv (B, T, 3C), NH -> (B, T, C)


def differentiable(op: Operations) -> Differentiable:
    """Return the operations of a run as functions that JAX can differentiate."""

    def embedding_backward(saved: Any, dout: jax.Array) -> tuple[Any, ...]:
        tokens, wte, wpe = saved
        dwte, dwpe = op.embedding_backward(
            dout, tokens, jnp.zeros(wte.shape, jnp.promote_types(wte.dtype, jnp.float32))
        )
        return None, dwte.astype(wte.dtype), jnp.zeros_like(wpe).at[: tokens.shape[1]].set(dwpe)

    def layernorm_forward(x: jax.Array, w: jax.Array, b: jax.Array) -> tuple[Any, Any]:
        out, mean, rstd = op.layernorm_forward(x, w, b)
        return out, (x, w, mean, rstd)

    def attention(qkv: jax.Array, num_heads: int) -> jax.Array:
        def forward(qkv: jax.Array) -> tuple[Any, Any]:
            out, kept = op.attention_forward(qkv, num_heads)
            return out, (qkv, out, kept)

        return _pair(forward, lambda saved, dout: op.attention_backward(dout, *saved, num_heads)[:1])(qkv)

    return Differentiable(
        embedding=_pair(lambda *given: (embedding_forward(*given), given), embedding_backward),
        layernorm=_pair(layernorm_forward, lambda saved, dout: op.layernorm_backward(dout, *saved)[:3]),
        linear=op.linear_forward,
        gelu=_pair(lambda x: (op.gelu_forward(x), x), lambda x, dout: op.gelu_backward(dout, x)[:1]),
        attention=attention,
    )


def _pair(forward: Callable[..., tuple[Any, Any]], backward: Callable[[Any, Any], tuple[Any, ...]]) -> Any:
    """Return a function with its backward. forward(*given): what it returns, and what backward(that, dout) takes."""

    def function(*given: Any) -> Any:
        return forward(*given)[0]

    found = jax.custom_vjp(function)
    found.defvjp(forward, backward)
    return found


# ----- the loss -------------------------------------------------------------------------------------------------------


def loss(
    flat: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
    shape: ModelShape,
    execution: Execution,
    weight: jax.Array | float,
) -> jax.Array:
    """Return weight times the mean loss of a model, which JAX differentiates for flat (flat_size,)."""
    return _of_params(tensors_of(flat, shape), tokens, targets, shape, execution, weight)


def loss_and_gradients(
    flat: jax.Array,
    tokens: jax.Array,
    targets: jax.Array,
    shape: ModelShape,
    execution: Execution,
    weight: jax.Array | float,
    on_block: Callable[[Any], Any] = lambda found: found,
    waits: bool = False,
) -> tuple[jax.Array, Gradients]:
    """Return the loss and its gradients by tensor. All of them exist before the first `on_block`: nothing `waits`."""
    params = tensors_of(flat, shape)
    found, gradient = jax.value_and_grad(_of_params)(params, tokens, targets, shape, execution, weight)
    specs = tensor_specs(shape)
    layered = [getattr(gradient, spec.name) for spec in specs if spec.tensor.layered]
    blocks = tuple(on_block(tuple(each[layer] for each in layered)) for layer in range(num_layers(shape)))
    return found, Gradients({s.name: getattr(gradient, s.name) for s in specs if not s.tensor.layered}, blocks)


def _of_params(
    params: Any, tokens: jax.Array, targets: jax.Array, shape: ModelShape, execution: Execution, weight: Any
) -> jax.Array:
    with scope("forward"):
        rows = program_of(shape).hidden(params, tokens, shape, execution)
        op, rows = running(shape, execution)[1].op, rows.reshape(-1, rows.shape[-1])
        head = partial(_head, op=op, shape=shape, limit=execution.logit_rows)
        return head(rows, head_of(params, shape), targets, weight)


def _head(
    rows: jax.Array, head: jax.Array, targets: jax.Array, weight: Any, op: Operations, shape: ModelShape, limit: int
) -> Any:
    """Return weight times the mean loss. Its gradients are made with it, so the logits are never kept."""
    T, flat, V = targets.shape[1], targets.reshape(-1), shape.vocab_size

    def forward(rows: jax.Array, head: jax.Array) -> tuple[Any, Any]:
        dlosses = weight_of_rows(shape, targets, weight, jnp.promote_types(rows.dtype, jnp.float32))
        losses, *gradients = head_gradients(
            rows, head, flat, dlosses, V, op.classifier, limit, op.head_weights, op.embedding_backward
        )
        return weight * mean_of(losses, shape, T), (gradients, jnp.zeros((), head.dtype))

    def backward(saved: Any, dloss: jax.Array) -> tuple[jax.Array, jax.Array]:
        (drows, dhead), like = saved
        return (drows * dloss).astype(drows.dtype), (dhead * dloss).astype(like.dtype)

    def loss(rows: jax.Array, head: jax.Array) -> jax.Array:
        return weight * mean_of(
            head_losses(rows, head, flat, V, op.classifier_forward, limit, op.head_weights), shape, T
        )

    function = jax.custom_vjp(loss)
    function.defvjp(forward, backward)
    return function(rows, head)
