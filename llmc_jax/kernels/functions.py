"""The functions of a step that have several implementations, by name: the model's operations and the optimizer's."""

from collections.abc import Mapping

from llmc_jax.ops.table import XLA, Function, Operations
from llmc_jax.training.adamw import ADAMW
from llmc_jax.training.optimizer import Optimizer, global_norm

OPTIMIZERS = {each.name: each for each in (ADAMW,)}

# XLA's.
PLAIN: dict[str, Function] = {
    **XLA._asdict(),
    **{f"{name}_update": optimizer.update for name, optimizer in OPTIMIZERS.items()},
    "global_norm": global_norm,
}

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
    **{name: (f"{name}_update",) for name in OPTIMIZERS},
    "global norm": ("global_norm",),
}


def assembled(functions: Mapping[str, Function], optimizer: Optimizer = ADAMW) -> tuple[Operations, Optimizer]:
    """Return the model's operations and an optimizer with these functions; what is missing is XLA's."""
    all_functions = PLAIN | dict(functions)
    op = Operations(**{name: all_functions[name] for name in Operations._fields})
    update, norm = all_functions[f"{optimizer.name}_update"], all_functions["global_norm"]
    return op, optimizer._replace(update=update, global_norm=norm)
