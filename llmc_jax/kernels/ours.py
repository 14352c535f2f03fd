"""The handwritten kernels by name: Pallas's for an architecture, and Triton's. Imported when asked for."""

import importlib
from functools import cache, partial
from typing import Any

from llmc_jax.config.train import ATTENTIONS
from llmc_jax.kernels.functions import GROUPS, PLAIN
from llmc_jax.ops.table import Function

BY_FILE = {  # of pallas_kernels/; of some there is one in triton/ too, in a file of that name
    "layernorm": GROUPS["layernorm"],
    "gelu": GROUPS["gelu"],
    "attention": tuple(f"{name}_{way}" for name in ATTENTIONS.values() for way in ("forward", "backward")),
    "softmax": ("softmax_forward", "softmax_backward"),
    "classifier": GROUPS["classifier"],
    "embedding": GROUPS["embedding backward"],
    "adamw": (*GROUPS["adamw"], *GROUPS["global norm"]),
}
FILES = {name: file for file, names in BY_FILE.items() for name in names}  # of each kernel


def pallas_kernel(name: str, target: str, interpret: bool = False, **more: Any) -> Function:
    """Return a kernel for an architecture ("sm_90"), with its twin's signature. more: what else the kernel takes.

    interpret: simulated on the CPU, slowly, for tests and for whoever wants to look.
    """
    return _bound(name, target, interpret, tuple(more.items()))


@cache  # the same function for the same arguments: what calls it is compiled once
def _bound(name: str, target: str, interpret: bool, more: tuple[tuple[str, Any], ...]) -> Function:
    return partial(_late(name), target=target, interpret=interpret, **dict(more))


@cache
def _late(name: str) -> Function:
    """Return a kernel that is imported when it is called: a plan that runs nothing saves a fifth of a second."""

    def kernel(*arguments: Any, **more: Any) -> Any:
        return getattr(importlib.import_module(kernel.__module__), name)(*arguments, **more)

    kernel.__name__ = kernel.__qualname__ = name
    kernel.__module__ = f"pallas_kernels.{FILES[name]}"
    return kernel


def pallas_functions(target: str, interpret: bool = False) -> dict[str, Function]:
    """Return the kernels that have a place in PLAIN; attention is `flash`, in bf16 and fp16 only."""
    return {name: pallas_kernel(name, target, interpret) for name in PLAIN if name in FILES}


def triton_kernel(name: str) -> Function:
    """Return one of Triton's kernels (the extra `[triton]`), with its twin's signature."""
    function: Function = getattr(importlib.import_module(f"llmc_jax.kernels.triton.{FILES[name]}"), name)
    return function
