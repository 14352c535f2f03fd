"""How a Triton kernel is called from JAX: on the GPU through jax-triton, in Triton's own interpreter on the CPU.

Triton decides when it is imported which of the two a process has: with TRITON_INTERPRET=1 in the environment it
interprets, without it compiles. Leaves out the kernels themselves.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton

from pallas_kernels.tuning import sizes

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Triton writes PTX for the assembler in its own package, which for Blackwell and in later versions is newer than JAX's
# may be. 8.7, of CUDA 12.8, is the first that knows all our targets.
PTX_VERSION = 87


def call(
    kernel: Any,
    *inputs: jax.Array,
    changed: Sequence[jax.Array] = (),
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    programs: int,
    warps: int,
    target: str,
    interpret: bool,
    **constants: int | float,
) -> list[jax.Array]:
    """Run `programs` instances of a kernel whose parameters are inputs, changed, outputs and then the constants.

    Returns the arrays that it overwrote, and then the new ones.

    changed: arrays that the kernel overwrites; XLA copies one first only where it is needed afterwards.
    programs: may be 0. warps: of one program. target: as in pallas_kernels.tuning. interpret: on the CPU; the process
    must have been started with TRITON_INTERPRET=1. Raises ValueError if it was and interpret is False, or the reverse.
    """
    sizes(target)  # refuses a target that has no kernels
    if isinstance(kernel, triton.JITFunction) == interpret:
        how = "started with TRITON_INTERPRET=1" if interpret else "started without TRITON_INTERPRET"
        raise ValueError(f"interpret={interpret}: Triton reads the environment when imported; Python must be {how}")
    if programs == 0:
        return [*changed, *(jnp.zeros(each.shape, each.dtype) for each in outputs)]
    if interpret:
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in changed]

        def run(*arrays: Any) -> list[np.ndarray]:
            return _interpreted(kernel, arrays, len(inputs), outputs, programs, constants)

        results: list[jax.Array] = jax.pure_callback(run, [*shapes, *outputs], *inputs, *changed)
        return results

    import jax_triton

    refs = [jax.new_ref(each) for each in changed]
    new = jax_triton.triton_call(
        *inputs,
        *refs,
        kernel=kernel,
        out_type=list(outputs),
        grid=(programs,),
        name=kernel.__name__,
        num_warps=warps,
        compute_capability=int(target.removeprefix("sm_")),
        backend_options={"ptx_version": PTX_VERSION},
        **constants,
    )
    return [*(jax.freeze(ref) for ref in refs), *new]


def warps_for(block: int) -> int:
    """Return the warps for a row in registers: 8 elements a thread, 16 bytes of bf16, until there are 16 warps."""
    return min(16, max(1, block // 256))


def check_dtype(name: str, array: jax.Array) -> None:
    """Raise ValueError unless an array is bf16, fp16 or fp32: the kernels compute in fp32."""
    if array.dtype not in DTYPES:
        raise ValueError(f"{name} is {array.dtype}; the Triton kernels take bfloat16, float16 or float32: convert it")


# ----- the interpreter ----------------------------------------------------------------------------------------------


class _HostTensor:
    """A NumPy array with what Triton's interpreter asks of a PyTorch tensor on the CPU; its storage is itself."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype  # Triton takes the name: float32, bfloat16, int32

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_HostTensor":
        return self

    def cpu(self) -> "_HostTensor":
        return self

    def new_empty(self, size: int, device: str) -> "_HostTensor":
        return self

    def set_(self, *view: Any) -> None:
        """Do nothing: the interpreter works on the array itself, so there is nothing to copy here or back."""

    def copy_(self, other: "_HostTensor") -> None:
        assert other is self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides


def _interpreted(
    kernel: Any,
    arrays: Sequence[Any],
    num_inputs: int,
    outputs: Sequence[jax.ShapeDtypeStruct],
    programs: int,
    constants: dict[str, int | float],
) -> list[np.ndarray]:
    """Run the kernel on NumPy arrays: inputs, then those it changes. Return the changed, then the outputs.

    Outputs are full of NaN before, so that a test sees what was not written.
    """
    copies = [np.array(array, order="C") for array in arrays]
    new = [np.full(each.shape, np.nan, each.dtype) for each in outputs]
    kernel[(programs,)](*[_HostTensor(array) for array in (*copies, *new)], **constants)
    return [*copies[num_inputs:], *new]
