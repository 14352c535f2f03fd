"""What a machine's rates are, at most and really: peaks, the shares of them that kinds of work reach, and floors.

The only place where such shares stand: the plan, the roofline, the step table, the model of many GPUs and the floors
of profiles take them from here. Those of Hopper in 16 bits were measured on one NVIDIA H200; each of the others is an
estimate. Both name their source; `python benchmarks/card_shares.py` prints those of a card whose check has run. Leaves
out how long a step takes (time.py), and CPUs' rates (cpu.py).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.numbers import Interval
from llmc_jax.machine import gpus
from llmc_jax.models.work import Work

# Kinds of work, by what their rate depends on.
PRODUCTS, OWN_PRODUCTS, ATTENTION, ATTENTION_BACKWARD, MATRIX, MEMORY, COPY = (
    "products", "products of ours", "attention forward", "attention backward", "attention's matrix", "memory", "copy",
)  # fmt: skip


class Efficiency(NamedTuple):
    """The share of a peak that a kind of work reaches."""

    low: float
    typical: float
    high: float
    measured_on: str | None  # the device whose rates these are, measured by this project; None: an estimate
    source: str

    def seconds(self, least: float) -> Interval:
        """Return what takes `least` seconds at the peak."""
        return Interval(least / self.high, least / self.typical, least / self.low)


class Hardware(NamedTuple):
    """One device: its peaks, and what of them is reached."""

    kind: str  # as JAX names it
    flops: float  # FLOP/s of products at most, in the precision of the plan
    bandwidth: float  # bytes per second to and from memory at most
    multiprocessors: int | None  # None: not known
    # By kind of work, of the FLOP/s or, where it waits for memory, of the bandwidth. An operation that waits for memory
    # may have one of its own, as "backward ln1"; else MEMORY's counts.
    shares: Mapping[str, Efficiency]
    gap: Interval  # seconds between two kernels
    least: float  # seconds of the smallest kernel

    def share(self, kind: str) -> Efficiency:
        """Return the share that a kind of work reaches, or an operation that waits for memory."""
        return self.shares.get(kind, self.shares[MEMORY])

    def filled(self, rows: int, columns: int) -> float:
        """Return the share of it that a product's result keeps busy."""
        if gpus.GPUS[self.kind].capability == "9.0":
            return filled(rows, columns, self.multiprocessors, HOPPER_TILES)
        slow = self.multiprocessors is not None and self.flops <= SLOW * self.multiprocessors
        return filled(rows, columns, self.multiprocessors, (*TILES, *SMALL_TILES) if slow else TILES)

    def filled_by_own(self, rows: int, columns: int) -> float:
        """Return the share of it that a product of ours keeps busy (pallas_kernels/matmul.py)."""
        return filled(rows, columns, self.multiprocessors, OWN_TILES)

    @property
    def roof(self) -> "Roof":
        """Return what floors are computed with. A GeForce card may run faster than the clock of its peak."""
        return Roof(self.flops * max(1.0, self.shares[PRODUCTS].high), self.bandwidth)


# ----- floors ---------------------------------------------------------------------------------------------------------


class Roof(NamedTuple):
    """A machine's best rates, which set the floors."""

    flops: float  # FLOP/s of products
    bandwidth: float  # bytes per second, to and from memory


def roofline(work: Work, roof: Roof) -> tuple[float, str]:
    """Return the seconds that work takes at least, and what says so: products or memory, "" for no floor."""
    if not work.flops and not work.bytes:
        return 0.0, ""
    by_products, by_memory = work.flops / roof.flops, work.bytes / roof.bandwidth
    return max(by_products, by_memory), "products" if by_products > by_memory else "memory"


# ----- products in tiles ----------------------------------------------------------------------------------------------

TILES = ((128, 256), (256, 128))  # of a product's result that a block makes
# Those that cuBLASLt took on an NVIDIA H200, and one that divides the widths of GPT-2 1558M.
HOPPER_TILES = (*TILES, (192, 192), (128, 160), (160, 128), (128, 128), (256, 160))
OWN_TILES = ((128, 128),)  # of our products, whose sum is never split
# A multiprocessor of at most so many FLOP/s, as of GeForce and workstation cards, is fed by smaller tiles as well.
SLOW, SMALL_TILES = 2.7e12, ((128, 128), (128, 64), (64, 128))
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16)  # parts that the sum of a product may be split into
Tiles = tuple[tuple[int, int], ...]


def filled(rows: int, columns: int, multiprocessors: int | None, tiles_of: Tiles = TILES) -> float:
    """Return the share of the multiprocessors that a product's tiles keep busy, the sum split where they are too few.

    rows, columns: of the result. tiles_of: the sizes that there are. Tiles beyond the edge and the last, incomplete
    wave are lost.
    """
    best = 0.0
    for high, wide in tiles_of:
        tiles = math.ceil(rows / high) * math.ceil(columns / wide)
        inside = rows * columns / (tiles * high * wide)
        blocks = multiprocessors or tiles
        for split in SPLITS if tiles < blocks else (1,):
            best = max(best, inside * tiles * split / (math.ceil(tiles * split / blocks) * blocks))
    return best


# ----- the shares of GPUs ---------------------------------------------------------------------------------------------

GAPS = Interval(0.5e-6, 1e-6, 2e-6)  # seconds between two kernels of a CUDA graph, an estimate
# A step of 526 kernels on an NVIDIA H200 stood still for 0.75 ms without CUDA graphs, and was 0.9 ms faster with them.
HOPPER_GAPS = Interval(0.0, 0.1e-6, 0.5e-6)
LEAST = 2e-6  # seconds of the smallest kernel, an estimate; on an NVIDIA H200 248 below 10 us took 2.8 us on average
OF_COPY = 0.86  # of a copy's speed, what a kernel that waits for memory reaches


Bounds = tuple[float, float, float]  # low, typical, high


def _estimates(source: str, *shares: Bounds) -> tuple[Efficiency, ...]:
    return tuple(Efficiency(*each, None, source) for each in shares)


_WAITING = {
    OWN_PRODUCTS: Efficiency(
        0.48, 0.67, 0.73, None, "not measured: 93 to 97 % of cuBLASLt's kernels of this kind, in whole steps on an "
        "NVIDIA H200 0.70 for a sum over 768 and 0.75 over 3072; at least what makes up for the passes that they save, "
        "since a run takes no slower ones",
    ),
    COPY: Efficiency(0.85, 0.90, 0.94, None, "what a large copy reaches of the bandwidth"),
    MEMORY: Efficiency(
        0.68, 0.90 * OF_COPY, 0.86, None, "86 % of a copy; apex' layernorm reaches 75 to 81 % on an A100, QuACK's 77 "
        "to 90 % on an H100, llm.kittens' AdamW 86 % on an RTX 5090",
    ),
    MATRIX: Efficiency(0.20, 0.35, 0.50, None, "several passes over the T x T matrix, each at the speed of memory"),
}  # fmt: skip
_WORKSTATION = (
    *_estimates("cuBLAS: 0.52 on an RTX PRO 6000 Max-Q, 0.92 on an L20; the power limit decides", (0.50, 0.65, 0.90)),
    *_estimates("FlashAttention-2's share on an A100", (0.22, 0.32, 0.45), (0.17, 0.25, 0.35)),
)
_GEFORCE_ATTENTION = _estimates(
    "as an RTX 5090: its tensor cores run at half rate, so that less stands beside them",
    (0.40, 0.55, 0.75), (0.30, 0.42, 0.60),
)  # fmt: skip
_BLACKWELL = (
    *_estimates("cuBLAS 63 % of the tensor cores in JAX's tutorial of Blackwell matmul", (0.52, 0.65, 0.76)),
    *_estimates("our kernels do not use Blackwell's own tensor instructions", (0.07, 0.10, 0.15), (0.055, 0.08, 0.12)),
)
_ELSEWHERE = _estimates(
    "a guess: nothing is known of this architecture here", (0.45, 0.65, 0.85), (0.20, 0.30, 0.40), (0.16, 0.25, 0.33)
)
# Products, attention forward and backward at 64 channels a head and T=1024 (FLOPs inside the mask), by compute
# capability and whether its tensor cores sum in fp32 at half rate, as a GeForce's do.
_SHARES: dict[tuple[str, bool], tuple[Efficiency, ...]] = {
    ("8.0", False): (
        *_estimates("llm.c's runs reach 60 to 64 % over whole steps on A100s, so products more", (0.68, 0.78, 0.87)),
        *_estimates("below FlashAttention-2's 0.35 to 0.40, causal, T=1024", (0.22, 0.30, 0.42)),
        *_estimates("below FlashAttention-2's 0.30, causal, T=1024", (0.18, 0.25, 0.34)),
    ),
    ("8.6", False): _WORKSTATION,
    ("8.6", True): (
        *_estimates("llm.c at 1558M reaches 81 % over whole steps on two RTX 3090", (0.80, 0.90, 1.00)),
        *_GEFORCE_ATTENTION,
    ),
    ("8.9", False): _WORKSTATION,
    ("8.9", True): (
        *_estimates("llm.c at 1558M reaches 74 % over whole steps on two RTX 4090", (0.76, 0.88, 1.00)),
        *_GEFORCE_ATTENTION,
    ),
    ("9.0", False): (
        *_estimates("cuBLASLt in a model's sizes under Hopper's power limit, 570 to 720 TFLOP/s", (0.58, 0.65, 0.73)),
        *_estimates("half of what the main loops allow (results/attention.md); cuDNN 0.32", (0.27, 0.34, 0.39)),
        *_estimates("half of what the main loops allow (results/attention.md); tokamax 0.21", (0.21, 0.27, 0.32)),
    ),
    ("10.0", False): _BLACKWELL,
    ("10.3", False): _BLACKWELL,
    ("12.0", False): _WORKSTATION,
    ("12.0", True): (
        *_estimates("cuBLASLt 223 to 227 TFLOP/s on an RTX 5090, above the 209.5 of its rated clock",
                    (0.92, 1.03, 1.08)),
        *_estimates("131 TFLOP/s on an RTX 5090 by Pallas and by llm.kittens, PyTorch 180", (0.45, 0.60, 0.80)),
        *_estimates("94 TFLOP/s on an RTX 5090 by llm.kittens", (0.33, 0.45, 0.60)),
    ),
}  # fmt: skip


# ----- measured -------------------------------------------------------------------------------------------------------

H200 = "NVIDIA H200"
_RECORDS, _TRACE = "benchmarks/results/gpu_nvidia_h200.json", "benchmarks/results/gpu_nvidia_h200_profile.txt"


def _by_memory(typical: float, source: str = f"a traced step, {_TRACE}") -> Efficiency:
    """Return a share of the bandwidth. It hardly moves: GELU took 193 to 199 us while the clock fell by an eighth."""
    return Efficiency(0.97 * typical, typical, min(1.02 * typical, 0.93), H200, source)


# Of Hopper in 16 bits, by one card. Products are those of whole steps, since the clock falls while a step is repeated.
_TRACED = {
    "forward embedding": 0.61, "forward weights": 0.50, "forward ln1": 0.87, "forward ln2": 0.86, "forward lnf": 0.88,
    "forward gelu": 0.86, "forward classifier": 0.70, "backward lnf": 0.63, "backward ln2": 0.65, "backward ln1": 0.65,
    "backward gelu": 0.85, "backward embedding": 0.55, "update adamw": 0.87,
}  # fmt: skip
_HOPPER: dict[str, Efficiency] = {kind: _by_memory(share) for kind, share in _TRACED.items()} | {
    PRODUCTS: Efficiency(
        0.67, 0.71, 0.75, H200, f"steps of d12, d24 and d48 less the rest; alone 0.69 to 0.73, {_RECORDS}"
    ),
    ATTENTION: Efficiency(0.29, 0.31, 0.335, H200, f"a traced step; alone 0.33, {_RECORDS}"),
    ATTENTION_BACKWARD: Efficiency(0.265, 0.28, 0.30, H200, f"a traced step; alone 0.28, {_RECORDS}"),
    COPY: Efficiency(0.85, 0.874, 0.90, H200, f"a large copy, {_RECORDS}"),
    MEMORY: _by_memory(0.86, f"most kernels of a traced step, {_TRACE}"),
    "update norm": _by_memory(0.87, f"the norm alone, {_RECORDS}"),
}


def shares_of(kind: str, precision: gpus.Precision = "bf16") -> dict[str, Efficiency]:
    """Return the shares that a GPU reaches, measured on a card of its architecture or estimated, by kind of work.

    kind: a key of `gpus.GPUS`. precision: of the products.
    """
    known = gpus.GPUS[kind]
    half_rate = known.fp16 < 3 * known.fp32
    found = _SHARES.get((known.capability, half_rate), _ELSEWHERE)
    measured = _HOPPER if known.capability == "9.0" and precision in ("bf16", "fp16") else {}
    return dict(zip((PRODUCTS, ATTENTION, ATTENTION_BACKWARD), found, strict=True)) | _WAITING | measured


def gpu(kind: str, precision: gpus.Precision) -> Hardware:
    """Return a GPU by the driver's name. Raises InputError for one that is not in the table or lacks the precision."""
    if kind not in gpus.GPUS:
        raise InputError(f"GPU {kind}: not in the table of GPUs (llmc_jax/machine/gpus.py); take one that is")
    peak = gpus.peak_flops(kind, precision)
    if peak is None:
        raise InputError(f"--dtype: {kind} has no products in {precision}; take another")
    bandwidth, shares = 1e9 * gpus.GPUS[kind].bandwidth, shares_of(kind, precision)
    gaps = HOPPER_GAPS if gpus.GPUS[kind].capability == "9.0" else GAPS
    return Hardware(kind, peak, bandwidth, gpus.multiprocessors_of(kind), shares, gaps, LEAST)
