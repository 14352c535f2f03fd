"""The one place that touches Pallas's experimental Mosaic GPU API, for jax 0.11.2 to 0.12.x.

Kernels are written with the names below, so that a change of that API is met here. `interpret=True` runs a kernel on
the CPU: shared memory, barriers and asynchronous copies are simulated, and races are found. What the simulation does
not know has a stand-in here, each with a note; docs/kernels/proof.md lists how those are proved instead.

    warp: 32 threads; warpgroup: 4 warps, the unit in which a Mosaic GPU kernel is written; GMEM, SMEM: global and
    shared memory; layout: which thread's register holds which element of an array
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

f32 = jnp.float32
bf16 = jnp.bfloat16
WGMMA = plgpu.Layout.WGMMA  # of sums by wgmma, 64 rows at a time

WARPS = 4  # of a warpgroup
LANES = 32  # of a warp
THREADS = WARPS * LANES
# Of a thread, where one warpgroup of three copies for two that compute: a launch gives all three alike 168, of the
# 65,536 of a multiprocessor.
COMPUTING_REGISTERS, COPYING_REGISTERS = 240, 24
LOG2E = math.log2(math.e)  # exponents are of base 2, which a GPU has an instruction for
SCRATCH_OF_SUMS = 2048  # bytes of SMEM: Pallas's own default
# CUDA's limits of a launch's grid, for x, y and z. Source: CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability"
LIMITS = (2**31 - 1, 65_535, 65_535)


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
    sums_cross_warps: bool = True,
    warpgroups: int = 1,
    blocks: int = 1,
    interpret: bool = False,
) -> Callable[..., Any]:
    """Return a Mosaic GPU kernel: at each point of the grid a warpgroup runs body(*inputs, *outputs, *scratch) on Refs.

    name: what profilers, dumps and compiled programs call it. warpgroups: how many of them run the body together, with
    the same SMEM; where there are several, lax.axis_index("warpgroup") tells them apart. blocks: of a cluster, of which
    there is one at each point of the grid then; lax.axis_index("block") tells them apart. approx_math: tanh.approx,
    ex2.approx and the like. auto_barriers=False leaves out the barriers round memory accesses: legal where no thread
    reads what another wrote. sums_cross_warps=False saves the 2 KB of SMEM in which warps would meet for a sum or a
    maximum: legal where each is taken within a warp; lowering refuses the others then.

    grid: the last axis is CUDA's x and runs the fastest; the ones before it are y and z, where only 65,535 blocks fit,
    so that a number that grows with the batch belongs last. Raises ValueError for more, and RuntimeError where
    interpreted warpgroups would wait for each other for ever.
    """
    _check_grid(name, grid, grid_names)
    if interpret and warpgroups > 1:
        _check_threads(name, warpgroups)
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid),
        grid_names=tuple(grid_names),
        cluster=(blocks,) if blocks > 1 else (),
        cluster_names=("block",) if blocks > 1 else (),
        scratch_types=list(scratch),
        num_threads=warpgroups if warpgroups > 1 else None,
        thread_name="warpgroup" if warpgroups > 1 else None,
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            unsafe_no_auto_barriers=not auto_barriers,
            reduction_scratch_bytes=SCRATCH_OF_SUMS if sums_cross_warps else 0,
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )


def _check_grid(name: str, grid: Sequence[int], grid_names: Sequence[str]) -> None:
    """Refuse what CUDA would not launch: "invalid argument" is all that it would say, and say it late."""
    for axis, (size, axis_name) in enumerate(zip(reversed(grid), reversed(grid_names), strict=True)):
        if size > LIMITS[axis]:
            raise ValueError(f"{name}: {size:,} blocks along {axis_name!r}; CUDA's grid has {LIMITS[axis]:,} there")


def _check_threads(name: str, warpgroups: int) -> None:
    """Refuse to interpret warpgroups in too few of XLA's threads: each waits in one, and so does the kernel itself."""
    threads = _threads_of_xla()
    if threads <= warpgroups:
        raise RuntimeError(
            f"{name}: to interpret {warpgroups} warpgroups XLA needs {warpgroups + 1} threads, and has {threads}: they "
            "would wait for each other for ever; set NPROC=8 in the environment before Python starts"
        )


def _threads_of_xla() -> int:
    """Return how many threads XLA computes with on a CPU: what the environment says, or the cores of this process."""
    said = [os.environ[name] for name in ("PJRT_NPROC", "NPROC") if os.environ.get(name, "").isdecimal()]
    if said:
        return int(said[0])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is at least a number."""
    return -(-number // multiple) * multiple


def shape_of(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a kernel's output."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


# ----- registers and global memory ----------------------------------------------------------------------------------


def widest(dtype: Any) -> int:
    """Return the elements in 16 bytes, the largest access that a thread makes."""
    return 16 // jnp.dtype(dtype).itemsize


def row_layout(columns: int, widest: int = 8) -> Any:
    """Lay out a (4k, columns) array so that each of the 4 warps holds whole rows: a sum over a row is 5 shuffles.

    A lane holds vectors of up to `widest` neighbouring elements, 16 bytes of bf16 at 8. columns must divide by 32.
    """
    if columns % LANES:
        raise ValueError(f"a row of {columns} elements does not divide over {LANES} lanes; pad it to a multiple")
    vector = widest
    while (columns // LANES) % vector:
        vector //= 2
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


class Part(NamedTuple):
    """Neighbouring columns of rows, all of one vector width."""

    columns: slice  # of the row
    layout: Any  # of (rows, size): WARPS / team rows at a time
    size: int


def row_parts(columns: int, team: int = 1, widest: int = 8) -> list[Part]:
    """Cut a row into few parts that `team` warps, 1, 2 or 4, hold together; WARPS / team rows at a time.

    A lane takes vectors of `widest` neighbouring elements as far as they go round evenly, then of half as many, and so
    on: 1600 columns are 1536 in vectors of 8 and 64 in vectors of 2, where one width for all would be 2. Sums over a
    row are 5 shuffles, and for a larger team an exchange through shared memory. columns must divide by 32 team.
    """
    lanes = LANES * team
    if columns % lanes:
        raise ValueError(f"a row of {columns} elements does not divide over {lanes} lanes; pad it to a multiple")
    parts, start, vector = [], 0, widest
    while start < columns:
        if size := (columns - start) // (lanes * vector) * lanes * vector:
            parts.append(Part(slice(start, start + size), _team_layout(team, vector), size))
            start += size
        vector //= 2
    return parts


def _team_layout(team: int, vector: int) -> Any:
    """Return tiles of tiles: the rows and columns of the warps at a time, then of a warp's lanes, then the vector."""
    tiles: tuple[tuple[int, ...], ...] = (WARPS // team, team * LANES * vector), (LANES * vector,), (vector,)
    warps = {1: (-3,), 2: (-4, -3), 4: (-3,)}[team]
    if team == 1:  # all columns of a tile are one warp's
        tiles = tiles[0], tiles[2]
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=(-2,), vector_dim=-1)


def column_layout(columns: int) -> Any:
    """Lay out (16 k, columns n), so that sums over the rows stay within warps: 16, 32 or 64 columns at a time.

    Of these a warp takes a quarter, lanes beside each other two each; the fewer lanes are left below each other, the
    fewer shuffles.
    """
    tiling = plgpu.Tiling(((2 * LANES * WARPS // columns, columns), (columns // WARPS,), (2,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)


def cell_layout(lanes: int, vector: int) -> Any:
    """Lay out rows that so many neighbouring lanes share, in vectors that go round: 128 / lanes rows at a time."""
    rows = LANES // lanes
    tiling = plgpu.Tiling(((WARPS * rows, lanes * vector), (rows, vector)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)


# Of (4, 4): each warp has a row, all of it in every lane.
FOURS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, 4),)), warp_dims=(-2,), lane_dims=(plgpu.Replicated(LANES),), vector_dim=-1
)


def flat_layout(elements: int, vector: int = 8) -> Any:
    """Lay out a 1-D array over the 128 threads of a warpgroup in vectors; 128 * vector divides `elements`."""
    return plgpu.Layout.WG_STRIDED((elements,), vec_size=vector)


def by_warp(values: jax.Array, interpret: bool) -> jax.Array:
    """Return registers of `flat_layout` as (WARPS, …): each warp's own in a row, so that a sum over one is 5 shuffles.

    Nothing moves: neighbouring vectors belong to neighbouring threads. Mosaic does not convert the one layout into the
    other, so the registers get the other's name. Interpret mode has no layouts.
    """
    shape = WARPS, values.size // WARPS
    if interpret:
        return values.reshape(shape)
    vector = values.size // (WARPS * LANES)
    flat, rows = flat_layout(values.size, vector), row_layout(shape[1], vector)

    @plgpu.inline_mgpu(arg_types=(flat,), return_type=plgpu.ShapeDtypeStruct(shape, values.dtype, layout=rows))
    def relabel(_: Any, values: Any) -> Any:
        layout = rows.to_mgpu()
        registers = values.registers.reshape(layout.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return relabel(values)


def widened(values: jax.Array, layout: Any, interpret: bool) -> jax.Array:
    """Return bf16 registers in float32, an instruction an element: bf16 is float32's upper half.

    LLVM takes the two halves of a register apart before it shifts them, half an instruction more for each element.
    Other dtypes are converted as ever, and so is everything in interpret mode.
    """
    made = layout.to_mgpu()
    vector = made.vec_size if hasattr(made, "vec_size") else made.vector_length  # of a flat layout, of a tiled one
    if interpret or values.dtype != bf16 or vector % 2:
        return values.astype(f32)

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(values.shape, jnp.dtype(f32), layout=layout)
    )
    def widen(_: Any, values: Any) -> Any:
        registers = np.empty_like(values.registers)
        for place, register in np.ndenumerate(values.registers):
            registers[place] = _widened_register(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    return widen(values)


def _widened_register(register: ir.Value) -> ir.Value:
    """Return MLIR's vector<2k x bf16> as vector<2k x f32>."""
    [elements] = ir.VectorType(register.type).shape
    i32 = ir.IntegerType.get_signless(32)
    pairs_type, wide_type = (ir.VectorType.get((elements // 2,), element) for element in (i32, ir.F32Type.get()))
    pairs = vector.bitcast(pairs_type, register)

    def all_pairs(number: int) -> ir.Value:
        splat = ir.DenseElementsAttr.get_splat(pairs_type, ir.IntegerAttr.get(i32, number))
        return arith.constant(pairs_type, splat)  # type: ignore[call-arg, arg-type]

    low = vector.bitcast(wide_type, arith.shli(pairs, all_pairs(16)))
    high = vector.bitcast(wide_type, arith.andi(pairs, all_pairs(-(2**16))))
    return vector.shuffle(low, high, [place // 2 + place % 2 * (elements // 2) for place in range(elements)])


def load(ref: Any, layout: Any, dtype: Any = None) -> jax.Array:
    """Read registers in a given layout from a Ref in GMEM or plain SMEM, and convert them to dtype if one is given."""
    values = plgpu.load(ref, layout=layout, optimized=False)
    return values if dtype is None else values.astype(dtype)


def store(ref: Any, values: jax.Array) -> None:
    """Write registers to a Ref in GMEM or plain SMEM. plgpu.store is of jax 0.12; `ref[...] =` refuses some layouts."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values


def along(values: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """Repeat a vector to the 2-D shape of `like`, its elements running along `axis`."""
    return lax.broadcast_in_dim(values, like.shape, (axis,))


def iota(shape: Sequence[int], axis: int, layout: Any) -> jax.Array:
    """Return the index along one axis, int32."""
    return plgpu.broadcasted_iota(jnp.int32, tuple(shape), axis, layout=layout)


def zeros(shape: Sequence[int], layout: Any, dtype: Any = f32) -> jax.Array:
    """Return registers of zeros in a layout."""
    return plgpu.layout_cast(jnp.zeros(tuple(shape), dtype), layout)


def full(shape: Sequence[int], value: float, layout: Any, dtype: Any = f32) -> jax.Array:
    """Return registers of one value in a layout."""
    return plgpu.layout_cast(jnp.full(tuple(shape), value, dtype), layout)


# ----- shared memory ------------------------------------------------------------------------------------------------


def shared(shape: Sequence[int], dtype: Any = f32) -> Any:
    """Return scratch in SMEM, for `scratch=`."""
    return plgpu.SMEM(tuple(shape), dtype)


def barrier(warpgroups: int = 1, number: int = 1) -> Any:
    """Return a barrier of a block's warpgroups, for `scratch=`; or so many of them, each at its index."""
    return plgpu.Barrier(num_arrivals=warpgroups, num_barriers=number)


def meet(barrier: Any) -> None:
    """Wait, each thread of the barrier's warpgroups for all: what they wrote before, all can read afterwards."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def sums_scratch(rows: int, parts: Sequence[Part]) -> list[Any]:
    """Return scratch for `store_sums` of so many rows: SMEM for each part and a barrier; one row needs none."""
    return [*[shared((rows, part.size)) for part in parts], barrier()] if rows > 1 else []


def store_sums(destination: Any, parts: Sequence[Part], sums: Sequence[jax.Array], scratch: Sequence[Any]) -> None:
    """Add sums (rows, part) of each part over the rows by way of SMEM, and write them to a Ref (1, columns) in GMEM."""
    if not scratch:
        for part, values in zip(parts, sums, strict=True):
            store(destination.at[:, part.columns], values)
        return
    *buffers, barrier = scratch
    for buffer, values in zip(buffers, sums, strict=True):
        store(buffer, values)
    meet(barrier)
    for part, buffer in zip(parts, buffers, strict=True):
        rows = [load(buffer.at[row], part.layout.reduce(0)) for row in range(buffer.shape[0])]  # (part,) each
        store(destination.at[0, part.columns], reduce(add, rows))
    meet(barrier)  # before the buffers are written again


# ----- tiles in shared memory ---------------------------------------------------------------------------------------


def tile_spec(shape: Sequence[int], dtype: Any) -> Any:
    """Return SMEM for tiles (..., rows, columns) of 16-bit elements, rows a multiple of 8, columns of 8.

    Stored swizzled: the 16-byte pieces of each 8 x 8 block lie in different banks, so that rows as well as columns of
    it are read in one go. The widest swizzle that divides the columns is taken: 128 bytes for 64, 64 for 96, 32 for 80.
    """
    swizzle = plgpu.find_swizzle(shape[-1] * 16)
    tiling, swizzling = plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
    return plgpu.SMEM(tuple(shape), dtype, transforms=(tiling, swizzling))


def load_tile(tile: Any, layout: Any, dtype: Any = None) -> jax.Array:
    """Read registers in a matrix product's layout from a tile in SMEM, and convert them to dtype if one is given."""
    values = plgpu.load(tile, layout=layout)
    return values if dtype is None else values.astype(dtype)


def store_tile(values: jax.Array, tile: Any, destination: Any) -> None:
    """Write registers of a matrix product's layout to GMEM, by way of a tile in SMEM that makes whole rows of them."""
    tile[...] = values
    layout = plgpu.Layout.SMEM_GMEM_COPY(tile.shape, tile.dtype, plgpu.find_swizzle(tile.shape[-1] * 16))
    store(destination, plgpu.load(tile, layout=layout))


def column_sums(tile: Any) -> jax.Array:
    """Return sums over the 16 k rows of a tile (rows, 16 n) in SMEM, (columns,) in float32."""
    return load(tile, column_layout(math.gcd(tile.shape[1], 64)), f32).sum(0)


class Copies(NamedTuple):
    """Asynchronous copies of tiles from GMEM to SMEM.

    From Hopper on one thread starts the tensor memory accelerator (TMA), which reports at a barrier. Before that every
    thread starts cp.async of its own share; `wait` then waits for all copies under way, whatever barrier it is given.
    Interpret mode knows the first kind alone.
    """

    target: str
    interpret: bool

    @property
    def by_thread(self) -> bool:
        return self.target in ("sm_80", "sm_86", "sm_89") and not self.interpret

    def barriers(self, *kinds: tuple[int, int]) -> list[Any]:
        """Return for each (number, copies) so many barriers, each completed by so many copies; or none at all."""
        return [] if self.by_thread else [plgpu.Barrier(num_arrivals=copies, num_barriers=n) for n, copies in kinds]

    def start(
        self, source: Any, tile: Any, barriers: Sequence[Any], kind: int, slot: Any = 0, *, to_all: bool = False
    ) -> None:
        """Start copying; barriers[kind], of those that `barriers` made, reports at its slot.

        to_all: every block of the cluster starts this copy, and all of them get it: each reads a part for all. In
        interpret mode, which knows no such copy, each reads all for itself.
        """
        if self.by_thread:
            plgpu.copy_gmem_to_smem(source, tile, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
        else:
            together = "block" if to_all and not self.interpret else None
            plgpu.copy_gmem_to_smem(source, tile, barriers[kind].at[slot], collective_axes=together)

    def wait(self, barriers: Sequence[Any], kind: int, slot: Any = 0) -> None:
        """Wait until the copies are there, for all threads to see."""
        if self.by_thread:
            plgpu.wait_gmem_to_smem(0)
        else:
            plgpu.barrier_wait(barriers[kind].at[slot])

    def release(self, barriers: Sequence[Any], kind: int, slot: Any) -> None:
        """Tell that this warpgroup is done with a slot."""
        plgpu.barrier_arrive(barriers[kind].at[slot])


def barriers_of_a_cluster(number: int) -> Any:
    """Return so many barriers, each completed by one arrival in each of a cluster's blocks, for all of them."""
    return plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=1, num_barriers=number)


def send(tile: Any, destination: Any) -> None:
    """Start copying a tile in SMEM, which this warpgroup has written, to GMEM; `wait_for_sent` before it is changed."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, destination)


def wait_for_sent(under_way: int, *, arrived: bool = False) -> None:
    """Wait until at most so many tiles that this warpgroup sent are still read; arrived: or not in GMEM yet."""
    plgpu.wait_smem_to_gmem(under_way, wait_read_only=not arrived)


def finish_reading() -> None:
    """Wait, before a copy overwrites what this warpgroup has loaded from SMEM, so that no thread reads what follows."""
    plgpu.commit_smem()


def set_registers(number: int, *, more: bool) -> None:
    """Change how many registers each thread of this warpgroup has: first some give theirs up, then others take more.

    number: a multiple of 8. Hopper's setmaxnreg; interpret mode has no registers.
    """
    plgpu.set_max_registers(number, action="increase" if more else "decrease")


# ----- matrix products ----------------------------------------------------------------------------------------------

Operands = tuple[Any, Any]  # left and right: a tile in SMEM each, the left one maybe in registers
Weigh = Callable[[jax.Array], jax.Array]
Sums = Sequence[tuple[jax.Array, Any]]  # registers (64, columns), and the tile in SMEM that is weighted and added


class MmaProducts(NamedTuple):
    """Products of 64-row tiles by mma.sync, every GPU from Ampere on: all operands in registers, float32 sums.

    Interpret mode has neither mma nor inline_mgpu: jnp.dot and the identity stand in.
    """

    dtype: Any
    interpret: bool

    @property
    def layout(self) -> Any:
        """Return the layout of sums (64, columns)."""
        return plgpu.Layout.MMA_ACC(self.dtype)

    def finish_reading(self, copies: Copies) -> None:
        """Wait, before a copy overwrites a tile that products have read, so that no thread reads what follows.

        The TMA is another way to memory than loads are and needs a fence; cp.async's own wait has a barrier.
        """
        if not copies.by_thread:
            plgpu.commit_smem()

    def left(self, tile: Any) -> Any:
        """Read a tile as left operand into registers, once for many products."""
        return plgpu.load(tile, layout=plgpu.Layout.MMA_LHS(self.dtype))

    def add(self, sums: jax.Array, a: Any, b: Any) -> jax.Array:
        """Return sums + a b, where a is registers or a tile in SMEM and b is a tile in SMEM, maybe transposed."""
        if not isinstance(a, jax.Array):
            a = self.left(a)
        b = plgpu.load(b, layout=plgpu.Layout.MMA_RHS(self.dtype))
        if self.interpret:
            return sums + jnp.dot(a, b, preferred_element_type=f32)
        return plgpu.mma(sums, a, b)

    def product(self, a: Any, b: Any) -> jax.Array:
        """Return a b."""
        return self.add(zeros((a.shape[0], b.shape[1]), self.layout), a, b)

    def add_weighted(self, sums: jax.Array, weights: jax.Array, b: Any) -> jax.Array:
        """Return sums + weights b. weights: registers in the layout of sums, rounded here to the operands' dtype."""
        return self.add(sums, self.relabelled(weights.astype(self.dtype)), b)

    def gradients(
        self, score: Operands, weigh: Weigh, dweights: Operands, start: jax.Array, dscore: Any, sums: Sums
    ) -> list[jax.Array]:
        """Return the sums: the first gets dscore times its tile, the second, if there is one, weights times its tile.

        weights = weigh(a b of `score`); dscore = dscore(weights, start + c d of `dweights`).
        """
        weights = weigh(self.product(*score))
        dweighted = self.add(start, *dweights)
        added = [self.add_weighted(sum, weights, tile) for sum, tile in sums[1:]]
        return [self.add_weighted(sums[0][0], dscore(weights, dweighted), sums[0][1]), *added]

    def relabelled(self, weights: jax.Array) -> jax.Array:
        """Return registers in the layout of sums as a left operand.

        Each thread holds in the one layout just the elements that it must hold in the other, in the same order
        (tests/pallas_kernels/test_attention_layout.py); Mosaic has no conversion for it, so the registers get the other
        layout's name. The barrier keeps its canonicalisation from folding that away.
        """
        if self.interpret:
            return weights
        lhs = plgpu.Layout.MMA_LHS(self.dtype)

        @plgpu.inline_mgpu(
            arg_types=(self.layout,), return_type=plgpu.ShapeDtypeStruct(weights.shape, self.dtype, layout=lhs)
        )
        def relabel(_: Any, weights: Any) -> Any:
            layout = lhs.to_mgpu()
            registers = mgpu.optimization_barrier(weights).registers.reshape(layout.registers_shape(weights.shape))
            return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

        return relabel(weights)


class WgmmaProducts(NamedTuple):
    """Products of 64-row tiles by wgmma, Hopper alone: operands are read from SMEM, the left one maybe from registers.

    A warpgroup starts products and goes on; it waits where it needs a result. Interpret mode knows neither sums of one
    of several warpgroups nor a left operand in registers: there operands are loaded, which a fence ends as wgmma's own
    end would, and jnp.dot multiplies them at once.
    """

    dtype: Any
    interpret: bool

    @property
    def layout(self) -> Any:
        """Return the layout of sums (64, columns)."""
        return plgpu.Layout.WGMMA

    def finish_reading(self, copies: Copies) -> None:
        """Do nothing: a wgmma has read its operands when its result is there."""

    def left(self, tile: Any) -> Any:
        """Return a tile as left operand: it stays where it is."""
        return tile

    def product(self, a: Any, b: Any) -> jax.Array:
        """Return a b of two tiles in SMEM, the second maybe transposed."""
        if self.interpret:
            return self.loaded_product(a, b)

        def multiply(sums: Any) -> jax.Array:
            plgpu.wgmma(sums, a, b)
            return sums[...]

        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), f32))

    def add_weighted(self, sums: jax.Array, weights: jax.Array, b: Any) -> jax.Array:
        """Return sums + weights b. weights: registers in the layout of sums, rounded here to the operands' dtype."""
        weights = weights.astype(self.dtype)
        if self.interpret:
            return sums + self.loaded_product(weights, b)
        return pl.run_state(lambda sums: plgpu.wgmma(sums, weights, b))(plgpu.ACC.init(sums))

    def gradients(
        self, score: Operands, weigh: Weigh, dweights: Operands, start: jax.Array, dscore: Any, sums: Sums
    ) -> list[jax.Array]:
        """Compute as MmaProducts. While weights are computed dweights is under way; while dscore is, the second sum."""
        if self.interpret:
            weights = weigh(self.loaded_product(*score))
            dweighted = start + self.loaded_product(*dweights)
            lefts = (dscore(weights, dweighted), weights)
            return [self.add_weighted(sum, left, tile) for (sum, tile), left in zip(sums, lefts, strict=False)]

        def multiply(second: Any, *sums_s: Any) -> None:
            def begin(first: Any) -> None:
                plgpu.wgmma(first, *score)
                plgpu.wgmma(second, *dweights)
                weights = weigh(plgpu.wgmma_accumulator_load(first, wait_n=1))
                for sum_s, (_, tile) in zip(sums_s[1:], sums[1:], strict=True):
                    plgpu.wgmma(sum_s, weights.astype(self.dtype), tile)
                dweighted = plgpu.wgmma_accumulator_load(second, wait_n=len(sums) - 1)
                plgpu.wgmma(sums_s[0], dscore(weights, dweighted).astype(self.dtype), sums[0][1])

            pl.run_scoped(begin, plgpu.ACC((start.shape[0], start.shape[1]), f32))

        state = (start, *(sum for sum, _ in sums))
        return list(pl.run_state(lambda refs: multiply(*refs))(tuple(map(plgpu.ACC.init, state)))[1:])

    def summed(
        self, shape: tuple[int, int], steps: int, operands: Callable[[Any], Operands], done: Callable[[Any], None]
    ) -> jax.Array:
        """Return the sum of so many products, of shape; done(k) is called when the operands of step k have been read.

        The next product is begun before the one before it has ended.
        """
        if self.interpret:

            def add_loaded(k: Any, sums: jax.Array) -> jax.Array:
                sums = sums + self.loaded_product(*operands(k))
                done(k)
                return sums

            return lax.fori_loop(0, steps, add_loaded, jnp.zeros(shape, f32))

        def multiply(sums: Any) -> jax.Array:
            def step(k: Any, _: None) -> None:
                plgpu.wgmma(sums, *operands(k))
                plgpu.wgmma_wait(1)
                pl.when(k > 0)(lambda: done(k - 1))

            lax.fori_loop(0, steps, step, None)
            found = sums[...]
            done(steps - 1)
            return found

        return pl.run_scoped(multiply, plgpu.ACC(shape, f32))

    def loaded_product(self, a: Any, b: Any) -> jax.Array:
        """Multiply as interpret mode can."""
        a = a if isinstance(a, jax.Array) else a[...]
        product = jnp.dot(a, plgpu.load(b), preferred_element_type=f32)
        plgpu.commit_smem()
        return product


# ----- a body's refs --------------------------------------------------------------------------------------------------


def without(body: Callable[..., None], absent: Sequence[int]) -> Callable[..., None]:
    """Return a kernel body that is called without the refs at these places, and hands None on for each of them."""

    def called(*refs: Any) -> None:
        given = list(refs)
        for place in sorted(absent):
            given.insert(place, None)
        body(*given)

    return called


# ----- buffers that a kernel changes in place -----------------------------------------------------------------------


def empty(shape: Sequence[int], dtype: Any, *, interpret: bool) -> jax.Array:
    """Return a buffer for a kernel to fill. Interpret mode puts NaN there: a test sees what was not written."""
    if not interpret:
        return lax.empty(tuple(shape), dtype)
    poison = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else -1
    return jnp.full(tuple(shape), poison, dtype)


def in_place(call: Callable[..., Any], inputs: Sequence[Any], changed: Sequence[jax.Array]) -> tuple[Any, list[Any]]:
    """Run a kernel that reads `inputs` and changes `changed` where they lie; return its outputs and the changed."""
    refs = [jax.new_ref(array) for array in changed]
    outputs = call(*inputs, *refs)
    return outputs, [jax.freeze(ref) for ref in refs]
