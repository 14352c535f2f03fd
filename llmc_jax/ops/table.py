"""The seam between the model and its kernels: one function of each operation, and XLA's plain ones of ops/."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llmc_jax.ops import attention, classifier, embedding, gelu, layernorm
from llmc_jax.training import adamw as optimizer

Function = Callable[..., Any]


class Operations(NamedTuple):
    """One implementation of every operation that has several. Signatures are those of the functions in ops/."""

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
    global_norm: Function
    adamw_update: Function


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
    global_norm=optimizer.global_norm,
    adamw_update=optimizer.adamw_update,
)

# The rows of the table that a run prints: what is chosen together, and the functions it consists of.
GROUPS: dict[str, tuple[str, ...]] = {
    "layernorm": (
        "layernorm_forward",
        "layernorm_backward",
        "residual_layernorm_forward",
        "residual_layernorm_backward",
    ),
    "gelu": ("gelu_forward", "gelu_backward"),
    "attention": ("attention_forward", "attention_backward"),
    "classifier": ("classifier",),
    "embedding backward": ("embedding_backward",),
    "adamw": ("adamw_update",),
    "global norm": ("global_norm",),
}


def functions_of(op: Operations, operation: str) -> Sequence[Function]:
    """Return the functions that an operation of GROUPS consists of, in its order."""
    return [getattr(op, name) for name in GROUPS[operation]]
