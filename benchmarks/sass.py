"""A kernel's machine code: what the assembler reports of it, its loops, and how many blocks of it an SM holds.

For the commands that print what compiling for a GPU that is not there shows. Needs nvdisasm, of any CUDA toolkit from
12.8 on or of the package nvidia-cuda-nvdisasm. Leaves out what the instructions cost.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

REGISTERS = 65_536  # of an SM
ALLOCATED = 8  # registers of a thread are given out in steps of so many
RESERVED = 1024  # bytes of shared memory that the system takes of each block
LARGEST_BLOCKS = 32  # of an SM


class Loop(NamedTuple):
    """Instructions that end with a branch to the first of them."""

    instructions: int
    kinds: Counter[str]

    def count(self, *kinds: str) -> int:
        """How many of its instructions begin so."""
        return sum(number for kind, number in self.kinds.items() if kind.startswith(kinds))


class Kernel(NamedTuple):
    """An assembled kernel."""

    name: str
    registers: int  # of a thread
    spilled: int  # bytes
    serialized: bool  # Hopper's matrix products wait for each other
    shared_memory: int  # bytes of a block
    threads: int  # of a block
    instructions: int
    loops: tuple[Loop, ...]  # in the order of their ends

    def blocks(self, shared_memory: int, threads: int) -> int:
        """How many blocks an SM holds at once that has so many bytes of shared memory and so many threads."""
        return min(
            REGISTERS // (-(-self.registers // ALLOCATED) * ALLOCATED * self.threads),
            shared_memory // (self.shared_memory + RESERVED),
            threads // self.threads,
            LARGEST_BLOCKS,
        )


def parse(sass: str) -> tuple[int, tuple[Loop, ...]]:
    """The number of instructions in nvdisasm's text, and the loops."""
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
                loops.append(Loop(len(body), Counter(re.sub(r"^@!?U?P\w+\s+", "", each).split()[0] for each in body)))
    return len(instructions), tuple(loops)


def assembled(compile_kernels: Callable[[], object], nvdisasm: str) -> list[Kernel]:
    """The Mosaic kernels that a function compiles, in that order. One compute capability for each process."""
    from llmc_jax import deviceless

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            with deviceless.kernel_resources():  # keeps back what the compiler prints
                compile_kernels()
        finally:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        dumped = sorted(Path(folder).glob("*.ptx"), key=lambda path: int(re.findall(r"\d+", path.stem)[-1]))
        return [_assemble(path, nvdisasm) for path in dumped]


PTX = {
    "name": r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(",
    "target": r"\.target (\w+)",
    "threads": r"\.maxntid (\d+)",
}


def _assemble(ptx: Path, nvdisasm: str) -> Kernel:
    text = ptx.read_text(errors="replace").rstrip("\0")
    ptx.write_text(text)
    found = {key: match[1] for key, pattern in PTX.items() if (match := re.search(pattern, text))}
    (resources,) = ptx.parent.glob(f"{found['name']}_*.resources.txt")
    assembler = next(Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/bin/ptxas"))
    binary = ptx.with_suffix(".cubin")
    command = [str(assembler), "-v", "-O3", "-arch", found["target"], str(ptx), "-o", str(binary)]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    sass = subprocess.run([nvdisasm, "-c", str(binary)], check=True, capture_output=True, text=True).stdout
    instructions, loops = parse(sass)
    return Kernel(
        name=found["name"],
        registers=int(re.findall(r"Used (\d+) registers", log)[0]),
        spilled=int(re.findall(r"(\d+) bytes spill stores", log)[0]),
        serialized="serialized" in log,
        shared_memory=int(re.findall(r"smem_scratch_bytes=(\d+)", resources.read_text())[0]),
        threads=int(found["threads"]),
        instructions=instructions,
        loops=loops,
    )
