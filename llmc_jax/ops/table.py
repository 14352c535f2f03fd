"""The seam between the model and its kernels: one function of each operation, and XLA's plain ones of ops/."""

from collections.abc import Callable
from typing import Any, NamedTuple

from llmc_jax.ops import attention, classifier, embedding, gelu, layernorm, linear

Function = Callable[..., Any]


class Operations(NamedTuple):
    """One implementation of every operation of the model that has several.

    Signatures are those of the functions in ops/.
    """

    layernorm_forward: Function
    layernorm_backward: Function
    residual_layernorm_forward: Function
    residual_layernorm_backward: Function
    gelu_forward: Function
    gelu_backward: Function
    attention_forward: Function
    attention_backward: Function
    classifier: Function  # loss and gradient in one
    classifier_forward: Function  # loss alone
    embedding_backward: Function
    linear_forward: Function
    linear_backward: Function
    # Products that end in what would be a pass over their result; None: both are done, one after the other.
    head_weights: Function | None = None
    linear_gelu_forward: Function | None = None
    linear_gelu_backward: Function | None = None


# Of each such product the operations whose place it takes.
PARTS = {
    "head_weights": ("linear_forward", "linear_backward", "classifier", "classifier_forward"),
    "linear_gelu_forward": ("linear_forward", "gelu_forward"),
    "linear_gelu_backward": ("linear_backward", "gelu_backward"),
}


def without_replaced(op: Operations, before: Operations) -> Operations:
    """Return operations of a model without the products whose parts it has replaced by its own."""
    changed = {name for name in Operations._fields if getattr(op, name) is not getattr(before, name)}
    absent: dict[str, Any] = {name: None for name, parts in PARTS.items() if changed & set(parts)}
    return op._replace(**absent)


XLA = Operations(
    layernorm_forward=layernorm.layernorm_forward,
    layernorm_backward=layernorm.layernorm_backward,
    residual_layernorm_forward=layernorm.residual_layernorm_forward,
    residual_layernorm_backward=layernorm.residual_layernorm_backward,
    gelu_forward=gelu.gelu_forward,
    gelu_backward=gelu.gelu_backward,
    attention_forward=attention.attention_forward,
    attention_backward=attention.attention_backward,
    classifier=classifier.classifier,
    classifier_forward=classifier.classifier_forward,
    embedding_backward=embedding.embedding_backward,
    linear_forward=linear.linear_forward,
    linear_backward=linear.linear_backward,
)
