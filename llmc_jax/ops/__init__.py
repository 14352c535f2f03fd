"""The operations of GPT-2, one file each: `<op>_forward` and its hand-derived `<op>_backward` side by side.

Every backward takes the gradient of the loss with respect to the operation's output (`d` + name) and what the forward
saved, and returns the gradients of the inputs. Statistics and sums are taken in at least float32, so that the same code
is exact in float64. Nothing here knows the model, the optimizer or the GPU.

    B batch, T sequence length, C channels, NH heads, HS head size, V vocabulary, Vp padded vocabulary
"""

from importlib import import_module
from types import ModuleType

__all__ = ["attention", "classifier", "embedding", "gelu", "head", "layernorm", "linear", "residual", "softmax"]


def __getattr__(name: str) -> ModuleType:
    """Import an operation's file when it is first named, as in `llmc_jax.ops.gelu`."""
    if name not in __all__:
        raise AttributeError(f"module 'llmc_jax.ops' has no attribute {name!r}")
    return import_module(f"llmc_jax.ops.{name}")
