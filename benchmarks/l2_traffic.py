"""How often attention's tiles come from memory and how often from the L2 cache: a simulation, nothing is measured.

    python benchmarks/l2_traffic.py [--target h200] [--shape 64 1024 12 64]      prints benchmarks/results/l2_traffic.md

Every block of threads walks over the tiles of one head of one sequence; whether its neighbours read the same ones at
about the same time is decided by the order in which blocks are started. The simulation starts them in that order, as
many as the GPU holds at once, lets each read a tile per round, starts the next one where a block has ended, and keeps
the tiles that were used last. Rows, tiles and versions are those of pallas_kernels/tuning.py, the cache the target's
(llmc_jax/machine/deviceless.py); how many blocks an SM holds comes from compiling the kernels, so that this needs a
Python with JAX's CUDA plugin and nvdisasm, as benchmarks/attention_loops.py does.

What the simulation does not know: blocks that run faster than others, an L2 cache of two halves that hold some data
twice (the column "half" stands for that), what else needs the cache.
"""

import argparse
import itertools
import shutil
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pallas_kernels.tuning import attention_sizes  # noqa: E402

AXES = ("sequence", "head", "tile")  # of the kernels' grid: the last is the fastest
ORDERS = {"tiles the fastest": AXES, "sequences the fastest": ("tile", "head", "sequence")}
ROWS = 64  # of a warpgroup
ITEM = 2  # bytes of bf16 and fp16


class Traffic(NamedTuple):
    """Tiles that were read, and those of them that the cache did not have."""

    reads: int
    misses: int


class Walk(NamedTuple):
    """What one block reads: tiles begin..end-1 of a stream that some others walk over too."""

    stream: Hashable
    begin: int
    end: int


def traffic(walks: Iterable[Walk], resident: int, capacity: int) -> Traffic:
    """Simulates blocks that are started in this order, so many at once, and a cache of so many tiles."""
    waiting = iter(walks)
    active = [[walk, walk.begin] for walk in itertools.islice(waiting, resident)]
    cache: OrderedDict[tuple[Hashable, int], None] = OrderedDict()  # the last is the one used last
    reads = misses = 0
    while active:
        for place in active:
            walk, tile = place
            reads += 1
            if (walk.stream, tile) in cache:
                cache.move_to_end((walk.stream, tile))
            else:
                misses += 1
                cache[walk.stream, tile] = None
                if len(cache) > capacity:
                    cache.popitem(last=False)
            place[1] = tile + 1
            if place[1] == walk.end:
                place[0] = next(waiting, None)
                place[1] = place[0].begin if place[0] else 0
        active = [place for place in active if place[0]]
    return Traffic(reads, misses)


def walks(kernel: str, order: tuple[str, ...], blocks: dict[str, int], tiles: int) -> Iterator[Walk]:
    """A kernel's blocks in the order of their start: forward and dq up to the diagonal, the longest first; dkv from it.

    blocks: how many there are along each axis of the grid; tiles: that a block's rows are long.
    """
    for place in itertools.product(*(range(blocks[axis]) for axis in order)):
        at = dict(zip(order, place, strict=True))
        begin, end = at["tile"] * tiles, blocks["tile"] * tiles
        yield Walk((at["sequence"], at["head"]), *((begin, end) if kernel == "dkv" else (0, end - begin)))


COLUMNS = (
    "kernel", "order of blocks", "at once", "read", "compulsory", "from memory", "with half the cache",
    "ms of memory, at the data sheet's rate",
)  # fmt: skip


class Row(NamedTuple):
    """Of one kernel and order; bytes."""

    kernel: str
    order: str
    resident: int  # blocks on the GPU at once
    read: int
    compulsory: int
    missed: int
    missed_half: int  # with half of the cache


def rows(kernel: str, architecture: str, version: str, shape: list[int], resident: int, cache: int) -> Iterator[Row]:
    """Simulates both orders."""
    B, T, NH, HS = shape
    sizes = attention_sizes(architecture, HS, version)
    columns, own = sizes.columns[kernel], ROWS * sizes.warpgroups
    pair = 2 * columns * HS * ITEM  # k and v, or q and dout
    blocks = {"sequence": B, "head": NH, "tile": -(-T // own)}
    for name, order in ORDERS.items():
        found = [
            traffic(walks(kernel, order, blocks, own // columns), resident, size // pair)
            for size in (cache, cache // 2)
        ]
        compulsory = B * NH * blocks["tile"] * own // columns
        yield Row(
            kernel, name, resident, found[0].reads * pair, compulsory * pair, *(each.misses * pair for each in found)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h200")
    parser.add_argument("--shape", type=int, nargs=4, default=[64, 1024, 12, 64], metavar=("B", "T", "NH", "HS"))
    parser.add_argument("--nvdisasm", default=shutil.which("nvdisasm"))
    arguments = parser.parse_args()
    if not arguments.nvdisasm:
        parser.error("nvdisasm is not on PATH; name it with --nvdisasm (package nvidia-cuda-nvdisasm has one)")

    from benchmarks.attention_loops import compiled
    from llmc_jax.machine import gpus

    gpu, shape = gpus.known_target(arguments.target), arguments.shape
    bandwidth = gpu.gpu.bandwidth * 1e9
    print(f"{gpu.device_kind}, B T NH HS = {shape}, L2 of {gpu.l2_cache / 2**20:.0f} MiB; GB\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for kernel in compiled(arguments.target, None, shape, "bf16", arguments.nvdisasm):
        _, step, version = kernel.name.rsplit("_", 2)
        fit = kernel.blocks(gpu.shared_memory_per_multiprocessor, gpu.threads_per_multiprocessor)
        resident = fit * gpu.multiprocessors
        for row in rows(step, gpu.architecture, version, shape, resident, gpu.l2_cache):
            figures = [f"{size / 1e9:.2f}" for size in (row.read, row.compulsory, row.missed, row.missed_half)]
            ms = f"{row.missed / bandwidth * 1e3:.3f}"
            print("| " + " | ".join([kernel.name, row.order, str(row.resident), *figures, ms]) + " |")


if __name__ == "__main__":
    main()
