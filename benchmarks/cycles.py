"""Clocks of a multiprocessor for a tile of attention on an H200, by a model that runs the machine code; no GPU needed.

    python benchmarks/cycles.py [--head-size 64] [--length 1024] [--nvdisasm PATH]

Needs a Python with JAX's CUDA plugin and assembler (`make test-aot` makes them) and nvdisasm, of any CUDA toolkit from
12.8 on or of the package nvidia-cuda-nvdisasm, on PATH or by --nvdisasm.

A warp runs its kernel's instructions in order: before the loop over tiles, the loop so many times, after it. The
assembler has written into each one how many clocks its warp stands still afterwards and which results it waits for. One
of a multiprocessor's four schedulers is simulated, with a warp of every warpgroup that computes: it issues one
instruction at a time, to units that are busy for so many clocks (UNITS); a matrix product is issued and runs on. Blocks
begin when others have ended, as many at a time as registers and shared memory allow. Left out: copies that come too
late, warpgroups that wait for each other's slots, caches of instructions, bank conflicts, memory's bandwidth.

The rates of the data sheet explain 0.6 of the measured time. Three pairs of numbers, CALIBRATIONS, each explain all of
it: which of them is right only a card can say, so a change is an improvement where all three say so.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


class Machine(NamedTuple):
    """Clocks. What is not calibrated is NVIDIA's or, like the latencies, what others measured on Hopper."""

    tensor: float = 32  # that a product of 64 x 64 x 16 occupies the tensor cores: 2,048 multiply-adds a clock
    chained: float = 0  # from such a product to the next one of its warpgroup, if that is more
    issue: float = 1  # for each instruction of a scheduler
    launch: float = 2000  # from the end of a block to the first instruction of the next one
    memory: float = 1000  # from starting a copy to its end


CALIBRATIONS = {
    "data sheet": Machine(),
    "rates": Machine(tensor=57, issue=1.8),
    "chains": Machine(chained=100, issue=1.8),
    "blocks": Machine(tensor=51, launch=6000),
}
# us of 64 x 1024 x 12 x 64 (results/gpu_nvidia_h200.md, and its trace for dq and dk, dv); 144 tiles of each head
MEASURED = {"attention_forward": 710, "attention_dq": 830, "attention_dkv": 1250}
HELD_OUT = {"relu_attention_forward": 511, "relu_attention_dq + relu_attention_dkv": 1875}

UNITS = {"MUFU": ("exponentials", 8.0), "IMAD": ("multiplier", 2.0), "HGMMA": ("tensor", 0.0)}
HALF_RATE = re.findall(r"\w+", "FMNMX F2FP LOP3 SHF IADD3 ISETP MOV PRMT PLOP3 FSEL SEL FSETP LEA VIADD")
UNITS |= dict.fromkeys(HALF_RATE, ("half", 2.0))
UNITS |= dict.fromkeys(("LDS", "SHFL", "STS", "LDSM", "STSM"), ("shared", 4.0))  # one unit for four schedulers
LATENCY = {"MUFU": 24, "LDS": 30, "SHFL": 24, "SYNCS": 30, "S2R": 30, "S2UR": 30, "LDSM": 33, "LDC": 40, "LD": 700}
READ = 15  # from the issue of an instruction until others may write its operands
BARRIER = 20  # of a warpgroup, whose four warps do the same at the same time
PRODUCT = 30  # from the end of a product until a warp that waits for it goes on


class Instruction(NamedTuple):
    """What the assembler wrote down of one."""

    text: str
    kind: str
    stall: int
    writes: int  # number of the scoreboard that it reports its result to; 7: none
    reads: int
    waits: tuple[int, ...]  # for these scoreboards
    left: int = -1  # of a wait for products: how many groups may be unfinished
    first: bool = False  # a wait for a copy that this block has just started

    @property
    def label(self) -> str:
        """Return where a branch goes to."""
        return found[1] if (found := re.search(r"(\.L_x_\d+)", self.text)) else ""


class Paths(NamedTuple):
    """What a warp that computes runs: once, and for each part of the work before, in and after its loop over tiles."""

    once: list[Instruction]
    before: list[Instruction]
    loop: list[Instruction]
    after: list[Instruction]


def parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions in the text of nvdisasm -hex, and where its labels stand."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    text = ""
    for line in sass.splitlines():
        if match := re.match(r"\s*(\.L_x_\d+):", line):
            labels[match[1]] = len(code)
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s*/\* 0x", line):
            text = match[1]
        elif text and (match := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/", line)):
            control = int(match[1], 16) >> 41
            kind = re.split(r"[.\s]", re.sub(r"^@!?U?P\w+\s+", "", text))[0]
            waits = tuple(board for board in range(6) if control >> 11 + board & 1)
            left = re.search(r"DEPBAR.*gsb0, 0x(\d+)", text)
            code.append(
                Instruction(text, kind, max(control & 15, 1), control >> 5 & 7, control >> 8 & 7, waits,
                            int(left[1]) if left else -1)
            )  # fmt: skip
            text = ""
    return code, labels


def path(code: list[Instruction], labels: dict[str, int], starts_copies: bool) -> Paths:
    """Return what a warp runs that computes, and maybe starts copies: branches round both are told by what they jump.

    Raises ValueError where no loop has matrix products.
    """

    def has(begin: int, end: int, *kinds: str) -> bool:
        return any(each.kind in kinds for each in code[begin:end])

    loops = [(labels[each.label], n) for n, each in enumerate(code) if each.kind == "BRA" and labels[each.label] <= n]
    around = [(a, b) for a, b in loops if has(a, b, "HGMMA") and not has(a, b, "EXIT")]
    if not around:
        raise ValueError("no loop with matrix products")
    begin, end = min(around, key=lambda loop: loop[1] - loop[0])
    outer = [loop for loop in around if loop[0] < begin and loop[1] > end]

    def walk(n: int, stop: int, starts_copies: bool = starts_copies) -> list[Instruction]:
        ran = list[Instruction]()
        while n != stop:
            ran.append(code[n])
            if code[n].kind == "EXIT":
                break
            to = labels.get(code[n].label, 0) if code[n].kind == "BRA" else 0
            copies, waits = has(n + 1, to, "UTMALDG"), any(n < a and b < to for a, b in loops)
            jumps = to > n and to <= (begin if n < begin else len(code)) and not has(n + 1, to, "EXIT", "HGMMA")
            if outer:  # copies of the first part come before a wait, of the next one after it
                starts_copies = any("PHASECHK" in each.text for each in ran)
            taken = not code[n].text.startswith("@") or (jumps and (waits or (copies and not starts_copies)))
            n = to if to and taken else n + 1
        return ran

    first = outer[0][0] if outer else 0
    head, waits = walk(first, begin), 0
    for n, each in enumerate(head):
        waits += "PHASECHK" in each.text
        head[n] = each._replace(
            first="PHASECHK" in each.text and (waits == 1 or not outer)
        )  # others were started early
    return Paths(walk(0, first), head, walk(begin, end + 1), walk(end + 1, outer[0][1] + 1 if outer else -1))


class Warp:
    """One that runs: where it is, and when its results are there."""

    def __init__(self, path: Paths, turns: Sequence[int], at: float, block: list["Warp"]) -> None:
        self.code = path.once + [
            each for n in turns for part in (path.before, path.loop * n, path.after) for each in part
        ]
        self.place, self.next, self.last, self.copied, self.chain = 0, at, at, 0.0, 0.0
        self.boards = [0.0] * 8
        self.groups: list[float] = []  # when each group of products has ended
        self.block = block


def simulate(paths: list[Paths], blocks: list[list[tuple[int, ...]]], resident: int, machine: Machine) -> float:
    """Return the clocks for so many blocks, each of a warp for each path, given the loop's turns in each part."""
    free = {unit: 0.0 for unit, _ in UNITS.values()} | {"uniform": 0.0}
    queue, warps, clock = list(blocks), list[Warp](), 0.0

    def launch(at: float) -> None:
        if queue:
            parts, block = queue.pop(0), list[Warp]()
            block += [
                Warp(path, [part[w] for part in parts], at + machine.launch, block) for w, path in enumerate(paths)
            ]
            warps.extend(block)

    def earliest(warp: Warp) -> tuple[float, float]:
        unit, _ = unit_of(warp.code[warp.place])
        return max(warp.next, 0 if unit == "tensor" else free.get(unit, 0), issued), warp.last

    issued = 0.0
    for _ in range(resident):
        launch(0)
    while warps:
        warp = min(warps, key=earliest)
        clock, each = earliest(warp)[0], warp.code[warp.place]
        issued, ready = clock + machine.issue, clock + each.stall
        unit, busy = unit_of(each)
        if unit == "tensor":
            begin = max(free[unit], clock + 4)
            free[unit] = begin + machine.tensor
            begin = max(begin, warp.chain)
            warp.chain = begin + machine.chained
            if "gsb0" in each.text:
                warp.groups.append(begin + max(machine.tensor, machine.chained) + PRODUCT)
        elif unit:
            free[unit] = clock + busy
        if each.kind == "UTMALDG":
            for other in warp.block:
                other.copied = clock + machine.memory
        ready = clock + BARRIER if each.kind == "BAR" else ready
        warp.boards[each.writes] = max(warp.boards[each.writes], clock + LATENCY.get(each.kind, 20))
        warp.boards[each.reads] = max(warp.boards[each.reads], clock + READ)
        warp.place, warp.last = warp.place + 1, clock
        if warp.place == len(warp.code):
            warps.remove(warp)
            warp.block.remove(warp)
            if not warp.block:
                launch(clock)
            continue
        each = warp.code[warp.place]
        waits = [warp.boards[board] for board in each.waits] + [warp.copied] * each.first
        if 0 <= each.left < len(warp.groups):
            waits.append(warp.groups[-1 - each.left])
        warp.next = max(ready, *waits) if waits else ready
    return clock


def unit_of(each: Instruction) -> tuple[str, float]:
    """Return the unit that an instruction occupies, and for how long; those with U have one of their own."""
    uniform = each.kind.startswith("U") and each.kind != "UTMALDG"
    return UNITS.get(each.kind, ("uniform", 2.0) if uniform else ("", 0.0))


class Kernel(NamedTuple):
    """A kernel as it was assembled."""

    name: str
    sass: str
    resident: int  # blocks of a multiprocessor


def compiled(head_size: int, length: int, nvdisasm: str) -> list[Kernel]:
    """Return the attention kernels, softmax and relu, of 64 sequences and 12 heads for an H200."""
    import jax
    import jax.numpy as jnp

    from llmc_jax.machine import deviceless
    from pallas_kernels import attention

    of, B, NH = jax.ShapeDtypeStruct, 64, 12
    x, qkv = (of((B, length, n * NH * head_size), jnp.bfloat16) for n in (1, 3))

    def all_of(x: jax.Array, qkv: jax.Array, lse: jax.Array) -> Any:
        softmax = attention.attention_forward(qkv, NH), attention.attention_backward(x, qkv, x, lse, NH)
        relu = attention.relu_attention_forward(qkv, NH), attention.relu_attention_backward(x, qkv, x, (), NH)
        return softmax, relu

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        deviceless.compile_for(jax.jit(all_of), (x, qkv, of((B, NH, length), jnp.float32)), "h200")
        return [disassembled(path, nvdisasm) for path in sorted(Path(folder).glob("*.ptx"))]


def disassembled(ptx: Path, nvdisasm: str) -> Kernel:
    """Assemble what Mosaic dumped, and read it."""
    text = ptx.read_text(errors="replace").rstrip("\0")
    ptx.write_text(text)
    name = re.findall(r"\.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", text)[0]
    threads = int(re.findall(r"\.maxntid (\d+)", text)[0])
    (resources,) = ptx.parent.glob(f"{name}_*.resources.txt")
    shared = int(re.findall(r"smem_scratch_bytes=(\d+)", resources.read_text())[0]) + 1024
    assembler = next(Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/bin/ptxas"))
    binary = str(ptx.with_suffix(".cubin"))
    command = [str(assembler), "-v", "-O3", "-arch", "sm_90a", str(ptx), "-o", binary]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = -(-int(re.findall(r"Used (\d+) registers", log)[0]) // 8) * 8
    sass = subprocess.run([nvdisasm, "-c", "-hex", binary], check=True, capture_output=True, text=True).stdout
    resident = min(65_536 // (registers * threads), 233_472 // shared)
    return Kernel(name.removesuffix("_wgmma"), sass, resident)


def clocks(kernel: Kernel, machine: Machine, head_size: int, length: int) -> float:
    """Return the clocks of a tile of 64 x 64 scores, of those that blocks of 128 rows walk over."""
    from pallas_kernels.tuning import attention_sizes

    step = kernel.name.rsplit("_", 1)[1]
    sizes = attention_sizes("sm_90", head_size, "wgmma")
    columns, warpgroups, rows = sizes.columns[step], sizes.warpgroups, length // 64
    code, labels = parse(kernel.sass)
    paths = [path(code, labels, w == 0) for w in range(warpgroups)]
    parts = [
        tuple((rows - 1 - i if step == "dkv" else i) * 64 // columns for i in range(first, first + warpgroups))
        for first in range(0, rows, warpgroups)
    ]
    mixed = [parts[n * (len(parts) // 2 + 1) % len(parts)] for n in range(2 * len(parts))]  # of two heads
    blocks = [mixed] if paths[0].once else [[part] for part in mixed]  # which go from part to part, or do not
    return simulate(paths, blocks, kernel.resident, machine) / (2 * (rows // 2) * (rows // 2 + 1) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"))
    options = parser.parse_args()
    if not options.nvdisasm:
        parser.error("nvdisasm is not on PATH; name it with --nvdisasm (package nvidia-cuda-nvdisasm has one)")
    print("| kernel | blocks | " + " | ".join(CALIBRATIONS) + " |\n|---|---|" + "---|" * len(CALIBRATIONS))
    for kernel in compiled(options.head_size, options.length, options.nvdisasm):
        found = [clocks(kernel, machine, options.head_size, options.length) for machine in CALIBRATIONS.values()]
        print(f"| {kernel.name} | {kernel.resident} | " + " | ".join(f"{each:.0f}" for each in found) + " |")


if __name__ == "__main__":
    main()
