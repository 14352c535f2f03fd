"""Five ways to write one layernorm for a GPU, from the obvious to the one in use, and what each makes the GPU do.

    python benchmarks/layernorm_ladder.py [--target h200] [--rows 65536] [--columns 768]

The operation is what a GPT-2 block does: residual = x + f, out = layernorm(residual), bf16. Without a GPU the kernels
are compiled for `--target` (JAX's CUDA plugin must be installed, `make test-aot` does that) and the table has what is
known then. With one they are compiled for it, compared with float64, and timed.

    python benchmarks/layernorm_ladder.py --plans [--target h200]

Registers and spilled bytes of both kernels for every way of holding a row, from 768 columns to 12288: where the limits
in pallas_kernels/tuning.py come from. Takes minutes.
"""

import argparse
import itertools
import os
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from llmc_jax.base.errors import InputError  # noqa: E402
from llmc_jax.machine.deviceless import compile_for  # noqa: E402
from llmc_jax.machine.gpus import TARGETS  # noqa: E402
from pallas_kernels import layernorm, mosaic  # noqa: E402
from pallas_kernels.mosaic import along, f32, load, store  # noqa: E402
from pallas_kernels.tuning import sizes  # noqa: E402

EPS = layernorm.EPS
SECTOR = 32  # bytes: what the memory system moves at least
BYTES = 2  # of a bf16
ADDITION = 3 * BYTES  # per element, by a kernel of its own: read x and f, write residual

PLANNED = (768, 1024, 1280, 1600, 2048, 2560, 4096, 12288)
TEAMS = {1: (0, 2048), 2: (0, 4096), 4: (0, 8192), 0: (4096, 1 << 20)}  # and the columns to try each for

Outputs = tuple[jax.Array, jax.Array]  # residual, out


# ----- the rungs ----------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """How a warpgroup holds rows while it goes through their columns block by block."""

    rows: int
    block: int  # columns
    layout: Any


def thread_per_row(vector: int) -> Held:
    """128 rows, one per thread, which takes `vector` neighbouring elements at a time."""
    threads, lanes = mosaic.THREADS, mosaic.LANES
    tiling = plgpu.Tiling(((threads, vector), (lanes, vector)))
    return Held(threads, 64, plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1))


def warp_per_row(vector: int) -> Held:
    """4 rows, one per warp, whose lanes take `vector` neighbouring elements each."""
    return Held(4, 128, mosaic.row_layout(128, vector))


def three_passes(
    x: jax.Array, f: jax.Array, w: jax.Array, b: jax.Array, *, held: Held, name: str, interpret: bool = False
) -> Outputs:
    """Layernorm that reads its input once for the mean, once for the variance and once for the result."""
    n, C = x.shape
    rows_at_once, block, layout = held

    def body(x_ref: Any, w_ref: Any, b_ref: Any, out_ref: Any) -> None:
        rows = pl.ds(lax.axis_index("tile") * rows_at_once, rows_at_once)

        def values(k: Any) -> jax.Array:
            return load(x_ref.at[rows, pl.ds(k * block, block)], layout, f32)

        def squares(k: Any) -> jax.Array:
            centred = values(k) - along(mean, values(k), 0)
            return centred * centred

        def total(function: Callable[[Any], jax.Array]) -> jax.Array:
            first = function(0).sum(1)
            return lax.fori_loop(1, C // block, lambda k, so_far: so_far + function(k).sum(1), first)

        mean = total(values) / C
        rstd = lax.rsqrt(total(squares) / C + EPS)

        @pl.loop(0, C // block)
        def _(k: Any) -> None:
            columns = pl.ds(k * block, block)
            w, b = (load(ref.at[columns], layout.reduce(0), f32) for ref in (w_ref, b_ref))
            centred = values(k) - along(mean, values(k), 0)
            out = centred * along(rstd, centred, 0) * along(w, centred, 1) + along(b, centred, 1)
            store(out_ref.at[rows, columns], out.astype(out_ref.dtype))

    residual = x + f
    call = mosaic.kernel(
        body,
        name=name,
        out_type=mosaic.shape_of(x.shape, x.dtype),
        grid=(n // rows_at_once,),
        grid_names=("tile",),
        auto_barriers=False,
        interpret=interpret,
    )
    return residual, call(residual, w, b)


def in_registers(x: jax.Array, f: jax.Array, w: jax.Array, b: jax.Array, **options: Any) -> Outputs:
    """The kernel in use, after an addition of its own."""
    residual = x + f
    return residual, layernorm.layernorm_forward(residual, w, b, **options)[0]


def fused(x: jax.Array, f: jax.Array, w: jax.Array, b: jax.Array, **options: Any) -> Outputs:
    """The kernel in use, with the addition inside."""
    return layernorm.residual_layernorm_forward(x, f, w, b, **options)[:2]


class Rung(NamedTuple):
    """One attempt, and what its memory accesses are by construction."""

    name: str
    function: Callable[..., Outputs]
    passes: int  # readings of the layernorm's input
    vector: int  # elements per access of a thread
    apart: bool  # the lanes of a warp read different rows, so that their accesses are not neighbours
    fused: bool = False  # with the addition


def rungs(columns: int, options: dict[str, Any]) -> list[Rung]:
    """From the obvious to the one in use."""
    passes = partial(three_passes, interpret=options.get("interpret", False))
    widest = max(vector for vector in (8, 4, 2, 1) if columns // 32 % vector == 0)
    return [
        Rung("a thread per row, element by element", partial(passes, held=thread_per_row(1), name="rung1"), 3, 1, True),
        Rung("a thread per row, 16 bytes at a time", partial(passes, held=thread_per_row(8), name="rung2"), 3, 8, True),
        Rung("a warp per row, element by element", partial(passes, held=warp_per_row(1), name="rung3"), 3, 1, False),
        Rung("a warp per row, held in registers", partial(in_registers, **options), 1, widest, False),
        Rung("with the addition to the residual", partial(fused, **options), 1, widest, False, fused=True),
    ]


# ----- what is known without a GPU ----------------------------------------------------------------------------------


def asked_for(rung: Rung) -> int:
    """Bytes per element that the two operations ask for."""
    if rung.fused:
        return 4 * BYTES
    return ADDITION + (rung.passes + 1) * BYTES


def moved(rung: Rung) -> int:
    """Bytes per element that whole sectors make of that, if no cache brings the rest of a sector back into use."""
    if not rung.apart:
        return asked_for(rung)
    return ADDITION + (rung.passes + 1) * BYTES * SECTOR // (rung.vector * BYTES)


def accesses(rung: Rung, columns: int) -> int:
    """Loads and stores of a warp per row, without w and b. 32 rows share those of a warp with a row per thread."""
    per_pass = columns / rung.vector / 32
    return round(per_pass * (4 if rung.fused else rung.passes + 1))


PTX_KINDS = {"load": r"ld(\.global)?\.", "store": r"st(\.global)?\.", "shuffle": r"shfl\.", "barrier": r"bar(rier)?\."}
INSTRUCTION = re.compile(r"^\s+(?:@!?%\w+ )?([a-z][\w.:]+)", re.MULTILINE)


def instruction_counts(ptx: str) -> Counter[str]:
    """Instructions in a kernel's text by kind; those in a loop count once. `ld.param` is not a load from memory."""
    counts: Counter[str] = Counter()
    for name in INSTRUCTION.findall(ptx):
        if name.startswith(("ld.param", "st.local", "ld.local")):
            continue
        kind = next((kind for kind, pattern in PTX_KINDS.items() if re.match(pattern, name)), "other")
        counts[kind] += 1
    return counts


class Static(NamedTuple):
    """What the compiler says of a rung's layernorm kernel."""

    registers: int
    spilled: int
    counts: Counter[str]


def compiled(function: Callable[..., Any], arguments: list[Any], target: str) -> Static:
    """Compiles a function with one kernel for a GPU that is not there."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            with silence():
                compile_for(jax.jit(function), arguments, target)
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        (ptx,), (log,) = ([path.read_text() for path in Path(folder).glob(f"*.{kind}")] for kind in ("ptx", "ptxas"))
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers and spilled, log
    return Static(int(registers[1]), int(spilled[1]), instruction_counts(ptx))


@contextmanager
def silence() -> Iterator[None]:
    """The dump of a kernel complains that nvdisasm is not installed, on the process's own standard error."""
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def print_plans(target: str) -> None:
    """The residual's kernels, forward and backward, for each length of rows and each team that may hold one."""
    architecture = TARGETS[target].architecture
    ours = sizes(architecture)
    directions = {
        "forward": (ours.layernorm_forward, lambda x, w, rows: layernorm._forward(x, x, w, w, architecture, False)),
        "backward": (
            ours.layernorm_backward,
            lambda x, w, rows: layernorm._backward(x, x, x, w, rows, rows, architecture, False),
        ),
    }
    plan_rows = layernorm.plan_rows
    print(f"{TARGETS[target].device_kind}, jax {jax.__version__}: registers, and spilled bytes if any; * in use\n")
    print("| columns | dtype | kernel | one warp | two warps | four warps | streamed |\n|---|---|---|---|---|---|---|")
    for columns, dtype, direction in itertools.product(PLANNED, (jnp.bfloat16, f32), directions):
        limits, function = directions[direction]
        x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((8192, columns), (columns,)))
        rows = jax.ShapeDtypeStruct((8192,), f32)
        cells = []
        for team, (shortest, longest) in TEAMS.items():
            used = plan_rows(columns, limits).team == team
            if not used and not shortest <= columns <= longest:
                cells.append("")
                continue
            forced = tuple(columns if team and warps >= team else 0 for warps in (1, 2, 4))
            layernorm.plan_rows = lambda columns, _, forced=forced: plan_rows(columns, forced)
            # a new function each time: what JAX has traced before it would not trace with another plan
            static = compiled(lambda *given, function=function: function(*given), [x, w, rows], target)
            spilled = f", spills {static.spilled}" if static.spilled else ""
            cells.append(f"{static.registers}{spilled}{' *' if used else ''}")
        layernorm.plan_rows = plan_rows
        print(f"| {columns} | {jnp.dtype(dtype).name} | {direction} | " + " | ".join(cells) + " |", flush=True)


# ----- on a GPU -----------------------------------------------------------------------------------------------------


def inputs(rows: int, columns: int) -> tuple[jax.Array, ...]:
    """x, f, w, b."""
    keys = jax.random.split(jax.random.key(0), 4)
    x, f = (jax.random.normal(key, (rows, columns), jnp.bfloat16) for key in keys[:2])
    w, b = (1 + 0.5 * jax.random.normal(key, (columns,), jnp.bfloat16) for key in keys[2:])
    return x, f, w, b


def worst_error(found: Outputs, x: jax.Array, f: jax.Array, w: jax.Array, b: jax.Array) -> float:
    """Of the first and the last 256 rows, relative to the largest element; 2^-8 is bf16's own rounding."""
    rows = np.r_[:256, -256:0]
    residual, out = (np.asarray(array[rows], np.float64) for array in found)
    np.testing.assert_array_equal(residual, np.asarray((x[rows] + f[rows]).astype(jnp.float32), np.float64))
    norm = (residual - residual.mean(-1, keepdims=True)) / np.sqrt(residual.var(-1, keepdims=True) + EPS)
    expected = norm * np.asarray(w, np.float64) + np.asarray(b, np.float64)
    return float(np.abs(out - expected).max() / np.abs(expected).max())


def microseconds(function: Callable[..., Outputs], arguments: tuple[jax.Array, ...], calls: int = 20) -> float:
    """Median over seven rounds of the time of one call; the arrays are larger than the caches."""
    times = []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(calls):
            outputs = function(*arguments)
        jax.block_until_ready(outputs)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times[1:])


def print_times(ladder: list[Rung], rows: int, columns: int) -> None:
    arguments = inputs(rows, columns)
    print(f"\n{jax.devices()[0].device_kind}, {rows:,} rows of {columns}, jax {jax.__version__}\n")
    print("| rung | error | us | GB/s of what is asked for |\n|---|---|---|---|")
    for rung in ladder:
        function = jax.jit(rung.function)
        error = worst_error(function(*arguments), *arguments)
        if error > 2.0**-8:
            raise SystemExit(f"{rung.name}: wrong by {error:.1e} of the largest element")
        time_of_one = microseconds(function, arguments)
        speed = asked_for(rung) * rows * columns / time_of_one / 1e3
        print(f"| {rung.name} | {error:.1e} | {time_of_one:.0f} | {speed:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200", choices=sorted(TARGETS), help="GPU to compile for (default h200)")
    parser.add_argument("--rows", type=int, default=65536, help="B T, a multiple of 128 (default 65536)")
    parser.add_argument("--columns", type=int, default=768, help="C, a multiple of 128 (default 768)")
    parser.add_argument("--plans", action="store_true", help="compile every way of holding rows of many lengths")
    given = parser.parse_args()
    if given.plans:
        print_plans(given.target)
        return
    if given.rows % 128 or given.columns % 128:
        raise SystemExit("the lower rungs have no padding: --rows and --columns must be multiples of 128")
    gpu = jax.devices()[0] if jax.default_backend() == "gpu" else None
    if gpu is not None:
        architecture = "sm_" + gpu.compute_capability.replace(".", "")
        print_times(rungs(given.columns, {"target": architecture}), given.rows, given.columns)
        return
    ladder = rungs(given.columns, {"target": TARGETS[given.target].architecture})
    wide = jax.ShapeDtypeStruct((given.rows, given.columns), jnp.bfloat16)
    narrow = jax.ShapeDtypeStruct((given.columns,), jnp.bfloat16)
    print(f"{TARGETS[given.target].device_kind}, rows of {given.columns} bf16, jax {jax.__version__}, not run\n")
    print(
        "| rung | bytes per element asked for | in whole sectors | accesses | registers | spilled | PTX: loads |",
        end="",
    )
    print(" stores | shuffles | barriers | others |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for rung in ladder:
        try:
            static = compiled(rung.function, [wide, wide, narrow, narrow], given.target)
        except InputError as error:
            raise SystemExit(f"{error}") from None
        known = [asked_for(rung), moved(rung), accesses(rung, given.columns), static.registers, static.spilled]
        counts = [static.counts[kind] for kind in (*PTX_KINDS, "other")]
        print(f"| {rung.name} | " + " | ".join(map(str, known + counts)) + " |", flush=True)


if __name__ == "__main__":
    main()
