"""The functions of a step that have several implementations, by name: the model's operations and the optimizer's.

XLA's, our handwritten kernels (Pallas's for an architecture, and Triton's, both imported when asked for) and cuDNN's
attention. Leaves out which of them runs (choice.py).
"""

import importlib
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax

from llmc_jax.ops import gelu, head
from llmc_jax.ops.linear import bias_backward
from llmc_jax.ops.table import XLA, Function, Operations
from llmc_jax.training.optimizer import Optimizer, global_norm
from llmc_jax.training.rules.adamw import ADAMW, adamw_update

# XLA's.
PLAIN: dict[str, Function] = {
    **XLA._asdict(),
    "adamw_update": adamw_update,
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
    "adamw": ("adamw_update",),
    "global norm": ("global_norm",),
    # products that end in what would be a pass over their result; XLA's are None: both, one after the other
    "head": ("head_weights",),
    "fc": ("linear_gelu_forward",),
    "fcproj": ("linear_gelu_backward",),
}
PRODUCTS = ("head", "fc", "fcproj")  # of GROUPS: what --products is about
# What such a product computes, plainly.
TWINS: dict[str, Function] = {
    "head_weights": head.head_weights,
    "linear_gelu_forward": gelu.linear_gelu_forward,
    "linear_gelu_backward": gelu.linear_gelu_backward,
}


def assembled(functions: Mapping[str, Function], optimizer: Optimizer = ADAMW) -> tuple[Operations, Optimizer]:
    """Return the model's operations and an optimizer with these functions; what is missing is XLA's.

    Only AdamW has an update of its own among them.
    """
    all_functions = PLAIN | dict(functions)
    op = Operations(**{name: all_functions[name] for name in Operations._fields})
    update, norm = all_functions.get(f"{optimizer.name}_update"), all_functions["global_norm"]
    return op, optimizer._replace(update=update, global_norm=norm)


def operations(optimizer: str) -> tuple[str, ...]:
    """Return the operations, of GROUPS, of a step with an optimizer."""
    return tuple(name for name in GROUPS if name != "adamw" or optimizer == name)


# ----- our kernels --------------------------------------------------------------------------------------------------

BY_FILE = {  # of pallas_kernels/; of some there is one in triton/ too, in a file of that name
    "layernorm": GROUPS["layernorm"],
    "gelu": GROUPS["gelu"],
    "attention": tuple(f"{name}_{way}" for name in ("attention", "relu_attention") for way in ("forward", "backward")),
    "softmax": ("softmax_forward", "softmax_backward"),
    "classifier": GROUPS["classifier"],
    "embedding": GROUPS["embedding backward"],
    "adamw": (*GROUPS["adamw"], *GROUPS["global norm"]),
    "matmul": tuple(name for product in PRODUCTS for name in GROUPS[product]),
}
FILES = {name: file for file, names in BY_FILE.items() for name in names}  # of each kernel


@cache  # the same function for the same arguments: what calls it is compiled once
def pallas_kernel(name: str, target: str, interpret: bool, **more: Any) -> Function:
    """Return a kernel for an architecture ("sm_90"), with its twin's signature. more: what else the kernel takes.

    interpret: simulated on the CPU, slowly, for tests and for whoever wants to look.
    """
    return partial(_late(name), target=target, interpret=interpret, **more)


@cache
def _late(name: str) -> Function:
    """Return a kernel that is imported when it is called: a plan that runs nothing saves a fifth of a second."""

    def kernel(*arguments: Any, **more: Any) -> Any:
        return getattr(importlib.import_module(kernel.__module__), name)(*arguments, **more)

    kernel.__name__ = kernel.__qualname__ = name
    kernel.__module__ = f"pallas_kernels.{FILES[name]}"
    return kernel


def pallas_functions(target: str, interpret: bool = False, dtype: str = "bf16") -> dict[str, Function]:
    """Return the kernels that have a place in PLAIN; attention is `flash`, in bf16 and fp16 only.

    Products are among them on sm_90 in bf16 alone.
    """
    products = (target, dtype) == ("sm_90", "bf16")
    names = [name for name in PLAIN if name in FILES and (products or name not in TWINS)]
    return {name: pallas_kernel(name, target, interpret) for name in names}


@cache
def relu_kernel(name: str, target: str, interpret: bool) -> Function:
    """Return a kernel of relu attention, which need not be told what the model's attention is."""
    kernel = pallas_kernel(f"relu_{name}", target, interpret)
    return lambda *arrays, **_: kernel(*arrays)


def triton_kernel(name: str) -> Function:
    """Return one of Triton's kernels (the extra `[triton]`), with its twin's signature."""
    function: Function = getattr(importlib.import_module(f"llmc_jax.kernels.triton.{FILES[name]}"), name)
    return function


# ----- cuDNN, with the signatures of ops/attention.py ---------------------------------------------------------------


def cudnn_attention_forward(qkv: jax.Array, num_heads: int) -> tuple[jax.Array, Any]:
    """Return causal attention by cuDNN of packed qkv (B, T, 3C): out (B, T, C), and its own means for the backward."""
    B, T, C3 = qkv.shape

    def attend(qkv: jax.Array) -> jax.Array:
        q, k, v = (qkv.reshape(B, T, 3, num_heads, -1)[:, :, i] for i in range(3))  # (B, T, NH, HS) each
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.reshape(B, T, C3 // 3)

    return jax.vjp(attend, qkv)


def cudnn_attention_backward(
    dout: jax.Array, _qkv: jax.Array, _out: jax.Array, saved: Any, _num_heads: int
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of `cudnn_attention_forward` for packed qkv (B, T, 3C), and its sum over all rows (3C,)."""
    (dqkv,) = saved(dout)
    return dqkv, bias_backward(dqkv)
