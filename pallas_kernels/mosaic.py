"""The one place that touches Pallas's experimental Mosaic GPU API, for jax 0.11.2 to 0.12.x.

Kernels are written with the names below, so that a change of that API is met here. `interpret=True` runs a kernel on
the CPU: shared memory, barriers and asynchronous copies are simulated, and races are found. What the simulation does
not know has a stand-in here, each with a note; docs/kernels/proof.md lists how those are proved instead.

    warp: 32 threads; warpgroup: 4 warps, the unit in which a Mosaic GPU kernel is written; GMEM, SMEM: global and
    shared memory; layout: which thread's register holds which element of an array
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

f32 = jnp.float32
bf16 = jnp.bfloat16

WARPS = 4  # of a warpgroup
LANES = 32  # of a warp


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    grid: Sequence[int],
    grid_names: Sequence[str],
    scratch: Sequence[Any] = (),
    approx_math: bool = False,
    auto_barriers: bool = True,
    interpret: bool = False,
) -> Callable[..., Any]:
    """A Mosaic GPU kernel: one warpgroup per point of the grid runs `body(*inputs, *outputs, *scratch)`, all Refs.

    name: what profilers, dumps and compiled programs call it. approx_math: tanh.approx, ex2.approx and the like.
    auto_barriers=False leaves out the barriers round memory accesses: legal where no thread reads what another wrote.
    """
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid),
        grid_names=tuple(grid_names),
        scratch_types=list(scratch),
        compiler_params=plgpu.CompilerParams(approx_math=approx_math, unsafe_no_auto_barriers=not auto_barriers),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )


def shape_of(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a kernel's output."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


# ----- registers and global memory ----------------------------------------------------------------------------------


def row_layout(columns: int, widest: int = 8) -> Any:
    """Layout of a (4k, columns) array in which each of the 4 warps holds whole rows: a sum over a row is 5 shuffles.

    A lane holds vectors of up to `widest` neighbouring elements, 16 bytes of bf16 at 8. columns must divide by 32.
    """
    if columns % LANES:
        raise ValueError(f"a row of {columns} elements does not divide over {LANES} lanes; pad it to a multiple")
    vector = widest
    while (columns // LANES) % vector:
        vector //= 2
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def flat_layout(elements: int, vector: int = 8) -> Any:
    """Layout of a 1-D array spread over the 128 threads of a warpgroup in vectors; 128 * vector divides `elements`."""
    return plgpu.Layout.WG_STRIDED((elements,), vec_size=vector)


def load(ref: Any, layout: Any, dtype: Any = None) -> jax.Array:
    """Registers in a given layout from a Ref in GMEM, or from plain SMEM, converted to dtype if one is given."""
    values = plgpu.load(ref, layout=layout, optimized=False)
    return values if dtype is None else values.astype(dtype)


def store(ref: Any, values: jax.Array) -> None:
    """Registers of any layout to a Ref in GMEM. plgpu.store came with jax 0.12, where `ref[...] =` refuses some."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def along(values: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """A vector repeated to the 2-D shape of `like`, its elements running along `axis`."""
    return lax.broadcast_in_dim(values, like.shape, (axis,))


def iota(shape: Sequence[int], axis: int, layout: Any) -> jax.Array:
    """The index along one axis, int32."""
    return plgpu.broadcasted_iota(jnp.int32, tuple(shape), axis, layout=layout)


def zeros(shape: Sequence[int], layout: Any, dtype: Any = f32) -> jax.Array:
    """Registers of zeros in a layout."""
    return plgpu.layout_cast(jnp.zeros(tuple(shape), dtype), layout)


def full(shape: Sequence[int], value: float, layout: Any, dtype: Any = f32) -> jax.Array:
    """Registers of one value in a layout."""
    return plgpu.layout_cast(jnp.full(tuple(shape), value, dtype), layout)


# ----- buffers that a kernel changes in place -----------------------------------------------------------------------


def empty(shape: Sequence[int], dtype: Any, *, interpret: bool) -> jax.Array:
    """A buffer for a kernel to fill. Interpret mode fills it with NaN, so that a test sees what was not written."""
    if not interpret:
        return lax.empty(tuple(shape), dtype)
    poison = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else -1
    return jnp.full(tuple(shape), poison, dtype)


def in_place(call: Callable[..., Any], inputs: Sequence[Any], changed: Sequence[jax.Array]) -> tuple[Any, list[Any]]:
    """Runs a kernel that reads `inputs` and changes `changed` where they lie; returns its outputs and the changed."""
    refs = [jax.new_ref(array) for array in changed]
    outputs = call(*inputs, *refs)
    return outputs, [jax.freeze(ref) for ref in refs]
