"""What the assembler makes of attention's kernels for a GPU that is not there: registers, occupancy, the main loop.

    python benchmarks/attention_loops.py [--target h200] [--version wgmma] [--shape 64 1024 12 64] [--dtype bf16]

Needs a Python with JAX's CUDA plugin (`make test-aot` makes them) and nvdisasm, of any CUDA toolkit from 12.8 on or of
the package nvidia-cuda-nvdisasm, on PATH or by --nvdisasm. Nothing runs on a GPU: the figures are the assembler's.

    registers, spilled   of a thread; bytes
    blocks, warpgroups   that an SM holds at once, by registers, shared memory and threads
    instructions         that a warp issues for each tile that it walks over, in the loop over tiles below the diagonal
                         so many clocks of the warp's scheduler, to which a warpgroup's other three warps do not belong
    tensor, MUFU         clocks that a warpgroup's tile occupies an SM's tensor cores (at Hopper's rate) and its units
                         for exponentials. A tile cannot take less than the largest of these three
    bytes of L2          that a warpgroup's tile asks of the L2 cache, warpgroups of a block sharing what they read
    too early            instructions that touch registers of products which have not been waited for: none may
"""

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.sass import Kernel, Loop, assembled  # noqa: E402

ROWS = 64  # of a warpgroup
STEPS = ("forward", "dq", "dkv")
TENSOR_RATE = 2048  # 16-bit multiply-adds of an SM in a clock on Hopper: 989 TFLOP/s of 132 SMs at 1.83 GHz
MUFU_RATE = 16  # exponentials of an SM in a clock
COLUMNS = (
    "kernel", "tile", "registers", "spilled", "shared memory", "blocks", "warpgroups", "instructions", "tensor", "MUFU",
    "bytes of L2", "too early",
)  # fmt: skip


def main_loop(kernel: Kernel) -> Loop:
    """The shortest loop with matrix products: a tile below the diagonal. Raises ValueError where there is none."""
    loops = [loop for loop in kernel.loops if loop.count("HGMMA", "HMMA")]
    if not loops:
        raise ValueError("no loop with matrix products: is this the machine code of an attention kernel?")
    return min(loops, key=lambda loop: loop.instructions)


def clocks(kernel: Kernel, step: str, columns: int, head_size: int) -> tuple[int, int, int]:
    """Clocks of an SM's tensor cores, of its exponentials and of a scheduler, for a warpgroup's tile."""
    products = {"forward": 2, "dq": 3, "dkv": 4}[step]
    tensor = products * ROWS * columns * head_size // TENSOR_RATE
    loop = main_loop(kernel)
    return tensor, loop.count("MUFU") * 128 // MUFU_RATE, loop.instructions


def compiled(target: str, version: str | None, shape: list[int], dtype: str, nvdisasm: str) -> list[Kernel]:
    """Forward, dq and dkv for B, T, NH, HS. One target for each process."""
    import jax
    import jax.numpy as jnp

    from llmc_jax.machine import deviceless, gpus
    from pallas_kernels import attention

    (B, T, NH, HS), of = shape, jax.ShapeDtypeStruct
    kind = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[dtype]
    options = {"target": gpus.known_target(target).architecture, "version": version}
    x, qkv, lse = of((B, T, NH * HS), kind), of((B, T, 3 * NH * HS), kind), of((B, NH, T), jnp.float32)

    def both(dout: jax.Array, qkv: jax.Array, out: jax.Array, lse: jax.Array) -> tuple[object, object]:
        forward = attention.attention_forward(qkv, NH, **options)
        return forward, attention.attention_backward(dout, qkv, out, lse, NH, **options)

    found = assembled(lambda: deviceless.compile_for(jax.jit(both), (x, qkv, x, lse), target), nvdisasm)
    return sorted(found, key=lambda kernel: STEPS.index(kernel.name.split("_")[1]))


def row(kernel: Kernel, target: str, head_size: int, item_bytes: int = 2) -> str:
    """The table's line of a kernel."""
    from llmc_jax.machine import gpus
    from pallas_kernels.tuning import attention_sizes

    gpu = gpus.known_target(target)
    _, step, version = kernel.name.rsplit("_", 2)
    sizes = attention_sizes(gpu.architecture, head_size, version)
    columns = sizes.columns[step]
    blocks = kernel.blocks(gpu.shared_memory_per_multiprocessor, gpu.threads_per_multiprocessor)
    tensor, exponentials, issue = clocks(kernel, step, columns, head_size)
    asked = 2 * columns * head_size * item_bytes // sizes.warpgroups
    cells = [
        kernel.name, f"{ROWS} x {columns}", kernel.registers, f"{kernel.spilled}{' serialized' * kernel.serialized}",
        kernel.shared_memory, blocks, blocks * sizes.warpgroups, issue, tensor, exponentials, asked,
        len(kernel.early),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--version", help="of pallas_kernels/tuning.py; default: the table's choice")
    parser.add_argument("--shape", type=int, nargs=4, default=[64, 1024, 12, 64], metavar=("B", "T", "NH", "HS"))
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"))
    arguments = parser.parse_args()
    if not arguments.nvdisasm:
        parser.error("nvdisasm is not on PATH; name it with --nvdisasm (package nvidia-cuda-nvdisasm has one)")
    kernels = compiled(arguments.target, arguments.version, arguments.shape, arguments.dtype, arguments.nvdisasm)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for kernel in kernels:
        print(row(kernel, arguments.target, arguments.shape[-1]))


if __name__ == "__main__":
    main()
