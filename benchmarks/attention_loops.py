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
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

REGISTERS = 65_536  # of an SM
ALLOCATED = 8  # registers of a thread are given out in steps of so many
RESERVED = 1024  # bytes of shared memory that the system takes of each block
LARGEST_BLOCKS = 32  # of an SM
TENSOR_RATE = 2048  # 16-bit multiply-adds of an SM in a clock on Hopper: 989 TFLOP/s of 132 SMs at 1.83 GHz


class Loop(NamedTuple):
    """The shortest loop with matrix products in a kernel's machine code: a tile below the diagonal."""

    instructions: int
    kinds: Counter[str]

    def count(self, *kinds: str) -> int:
        """How many of its instructions begin so."""
        return sum(number for kind, number in self.kinds.items() if kind.startswith(kinds))


class Kernel(NamedTuple):
    """A compiled kernel."""

    name: str
    registers: int
    spilled: int  # bytes
    serialized: bool  # Hopper's matrix products wait for each other
    shared_memory: int  # bytes of a block
    threads: int  # of a block
    loop: Loop


def main_loop(sass: str) -> Loop:
    """Finds the loop in nvdisasm's text. Raises ValueError where no loop has a matrix product."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in sass.splitlines():
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            labels[match[1]] = len(instructions)
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(match[1])
            target = re.search(r"\bBRA\b.*?(\.L_x_\d+)", match[1])
            if target and target[1] in labels:
                body = instructions[labels[target[1]] :]
                loop = Loop(len(body), Counter(re.sub(r"^@!?U?P\w+\s+", "", each).split()[0] for each in body))
                if loop.count("HGMMA", "HMMA"):
                    loops.append(loop)
    if not loops:
        raise ValueError("no loop with matrix products: is this the machine code of an attention kernel?")
    return min(loops)


def blocks_per_multiprocessor(kernel: Kernel, shared_memory: int, threads: int) -> int:
    """How many blocks an SM holds at once that has so many bytes of shared memory and so many threads."""
    registers = -(-kernel.registers // ALLOCATED) * ALLOCATED * kernel.threads
    return min(
        REGISTERS // registers,
        shared_memory // (kernel.shared_memory + RESERVED),
        threads // kernel.threads,
        LARGEST_BLOCKS,
    )


def clocks(kernel: Kernel, step: str, columns: int, head_size: int) -> tuple[int, int, int]:
    """Clocks of an SM's tensor cores, of its exponentials (16 a clock) and of a scheduler, for a warpgroup's tile."""
    products = {"forward": 2, "dq": 3, "dkv": 4}[step]
    tensor = products * 64 * columns * head_size // TENSOR_RATE
    return tensor, kernel.loop.count("MUFU") * 128 // 16, kernel.loop.instructions


def compiled(target: str, version: str | None, shape: list[int], dtype: str, nvdisasm: str) -> list[Kernel]:
    """Forward, dq and dkv for B, T, NH, HS. One target for each process."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        _compile(target, version, shape, dtype)
        dumped = sorted(Path(folder).glob("*.ptx"), key=lambda path: int(re.findall(r"\d+", path.stem)[-1]))
        return [_assembled(path, nvdisasm) for path in dumped]


def _compile(target: str, version: str | None, shape: list[int], dtype: str) -> None:
    import jax
    import jax.numpy as jnp

    from llmc_jax import deviceless
    from pallas_kernels import attention

    (B, T, NH, HS), of = shape, jax.ShapeDtypeStruct
    kind = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[dtype]
    options = {"target": deviceless.known_target(target).architecture, "version": version}
    x, qkv = of((B, T, NH * HS), kind), of((B, T, 3 * NH * HS), kind)

    def both(dout: jax.Array, qkv: jax.Array, out: jax.Array, lse: jax.Array) -> tuple[object, object]:
        forward = attention.attention_forward(qkv, NH, **options)
        return forward, attention.attention_backward(dout, qkv, out, lse, NH, **options)

    with deviceless.kernel_resources():  # keeps back what the compiler prints
        deviceless.compile_for(both, (x, qkv, x, of((B, NH, T), jnp.float32)), target)


PTX = {
    "name": r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(",
    "target": r"\.target (\w+)",
    "threads": r"\.maxntid (\d+)",
}


def _assembled(ptx: Path, nvdisasm: str) -> Kernel:
    """Assembles and disassembles the text of one kernel."""
    text = ptx.read_text(errors="replace")
    found = {key: match[1] for key, pattern in PTX.items() if (match := re.search(pattern, text))}
    (resources,) = ptx.parent.glob(f"{found['name']}_*.resources.txt")
    assembler = next(Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/bin/ptxas"))
    binary = ptx.with_suffix(".cubin")
    command = [str(assembler), "-v", "-O3", "-arch", found["target"], str(ptx), "-o", str(binary)]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    sass = subprocess.run([nvdisasm, "-c", str(binary)], check=True, capture_output=True, text=True).stdout
    return Kernel(
        name=found["name"],
        registers=int(re.findall(r"Used (\d+) registers", log)[0]),
        spilled=int(re.findall(r"(\d+) bytes spill stores", log)[0]),
        serialized="serialized" in log,
        shared_memory=int(re.findall(r"smem_scratch_bytes=(\d+)", resources.read_text())[0]),
        threads=int(found["threads"]),
        loop=main_loop(sass),
    )


def row(kernel: Kernel, target: str, head_size: int, item_bytes: int = 2) -> str:
    """The table's line of a kernel."""
    from llmc_jax import deviceless
    from pallas_kernels.attention import ROWS
    from pallas_kernels.tuning import attention_sizes

    gpu = deviceless.known_target(target)
    _, step, version = kernel.name.rsplit("_", 2)
    sizes = attention_sizes(gpu.architecture, head_size, version)
    columns = sizes.columns[step]
    blocks = blocks_per_multiprocessor(kernel, gpu.shared_memory_per_multiprocessor, gpu.threads_per_multiprocessor)
    tensor, exponentials, issue = clocks(kernel, step, columns, head_size)
    asked = 2 * columns * head_size * item_bytes // sizes.warpgroups
    cells = [
        kernel.name, f"{ROWS} x {columns}", kernel.registers, f"{kernel.spilled}{' serialized' * kernel.serialized}",
        kernel.shared_memory, blocks, blocks * sizes.warpgroups, issue, tensor, exponentials, asked,
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


COLUMNS = (
    "kernel", "tile", "registers", "spilled", "shared memory", "blocks", "warpgroups", "instructions", "tensor", "MUFU",
    "bytes of L2",
)  # fmt: skip


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
