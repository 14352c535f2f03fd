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
        """Return how many of its instructions begin so."""
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
    early: tuple[str, ...] = ()  # instructions that touch registers of unfinished products: none may

    def blocks(self, shared_memory: int, threads: int) -> int:
        """Return how many blocks an SM holds at once that has so many bytes of shared memory and so many threads."""
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


def early(sass: str) -> tuple[str, ...]:
    """The instructions in nvdisasm's text that touch registers which an unfinished wgmma reads or writes.

    Read from top to bottom, as the loops here are: each waits for its products before its branch. A group of HGMMA ends
    with gsb0, and DEPBAR.LE gsb0, n waits until at most n groups, the youngest, are unfinished.
    """
    found, groups, reads, writes = [], [], set[int](), set[int]()
    for match in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?((\S+).*?)\s*;", sass):
        instruction, kind = match[1], match[2]
        registers = [int(number) for number in re.findall(r"\bR(\d+)", instruction)]
        if kind.startswith("HGMMA"):
            columns = int(kind.split(".")[1].split("x")[1])
            writes |= set(range(registers[0], registers[0] + columns // 2))
            if re.match(r"\S+ R\d+, R\d+, gdesc", instruction):  # the left operand is in registers
                reads |= set(range(registers[1], registers[1] + 4))
            if "gsb0" in instruction:
                groups.append((reads, writes))
                reads, writes = set(), set()
        elif wait := re.search(r"DEPBAR\.LE gsb0, 0x(\d+)", instruction):
            groups = groups[len(groups) - int(wait[1]) :] if int(wait[1]) else []
        elif registers:
            target = set()
            if re.match(r"\S+ (P\w+, )?R\d", instruction) and not kind.startswith(("ST", "R2UR")):
                wide = 4 if ".128" in kind or kind.startswith("LDSM") else 2 if ".64" in kind or kind == "CS2R" else 1
                target = set(range(registers[0], registers[0] + wide))
            for read, written in [*groups, (reads, writes)]:
                if target & read or (target | set(registers)) & written:
                    found.append(instruction)
    return tuple(found)


def assembled(compile_kernels: Callable[[], object], nvdisasm: str) -> list[Kernel]:
    """The Mosaic kernels that a function compiles, in that order. One compute capability for each process."""
    from benchmarks import assembler

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        try:
            with assembler.kernel_resources():  # keeps back what the compiler prints
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
        early=early(sass),
    )
