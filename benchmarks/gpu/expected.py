"""How many seconds each item is expected to take: what a call is planned by. Its time limit is another number.

From the records of an NVIDIA H200 (results/gpu_nvidia_h200.json), with the steps that have been added to a timed step
since; what is marked `estimate` has not been measured.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from benchmarks.gpu.plan import D12_NUMERICS, SIDE_BY_SIDE, Item

CALL = 10.0  # for JAX to find its devices, once a call
# Part, pattern of the name, seconds with the start of the process; the first that matches counts.
SECONDS = (
    ("machine", "copy", 3.6), ("machine", "product fp8*", 2.5),  # fp8: estimate
    ("machine", "product*", 1.5), ("machine", "*", 0.4),
    *[("numerics", name, 11.1) for name in D12_NUMERICS],  # 20 of them took three processes 74 s
    ("numerics", "adamw_update bf16 1557725184*", 20.0),  # estimate
    ("numerics", "*", 4.2),  # 103 of them took four processes 107 s
    ("races", "*", 60.0),  # estimate
    ("kernels", "attention*wgmma", 7.9), ("kernels", "attention*mma", 4.7), ("kernels", "attention*", 1.0),
    ("kernels", "*attention*", 4.0), ("kernels", "layernorm_forward*", 4.1), ("kernels", "embedding*", 3.7),
    ("kernels", "classifier*", 2.6), ("kernels", "*", 1.2),
    ("ncu", "*", 7.5),
    ("tiles", "*", 1.5),  # estimate
    ("step", "*triton-gemm on*", 200.0),  # estimate
    ("step", "d24*", 23.0), ("step", "d36*", 29.0),  # d36: estimate
    ("step", "d48*", 36.0), ("step", "*", 20.0),
    ("versus", "d48*", 100.0), ("versus", "*", 51.0),
    ("torch", "attention*flash", 5.0), ("torch", "attention*", 0.5), ("torch", "*", 38.0),
    ("repeat", "*", 18.0),
    ("generate", "d12 bf16*", 9.5), ("generate", "*", 15.0),  # others than d12: estimate
    ("resume", "killed*", 60.0), ("resume", "*", 40.0),  # estimate
    ("variants", "*", 17.0), ("start", "*", 43.0), ("profile", "*", 20.0),
    ("check", "*", 65.0),
    ("llmc", "*", 6.4),
)  # fmt: skip


def seconds_of(item: Item) -> float:
    """Return the seconds that an item is expected to take, in its own process."""
    return next(seconds for part, pattern, seconds in SECONDS if part == item.part and fnmatchcase(item.name, pattern))


def seconds_of_all(items: Sequence[Item]) -> float:
    """Return the seconds that items are expected to take, of which some share the card."""
    return sum(seconds_of(item) / (SIDE_BY_SIDE if item.shares else 1) for item in items)
