"""GPUs as they are sold: what each can do at most, and what a compiler must know to compile for one that is not there.

Leaves out the machine that is here (device.py). Knows no JAX.
"""

import re
from typing import Literal, NamedTuple

from llmc_jax.base.errors import InputError

Precision = Literal["fp16", "bf16", "tf32", "fp32"]


class Gpu(NamedTuple):
    """Compute capability and peaks of one GPU at its boost clock, dense (no 2:4 sparsity), products summed in fp32.

    fp16, bf16, tf32: tensor cores; fp32: ordinary cores. All in TFLOP/s; None where the hardware lacks the format.
    bandwidth in GB/s (1e9 bytes), memory in GB as sold.
    """

    capability: str  # compute capability, such as 9.0
    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float
    bandwidth: float
    memory: float


# Keys are the names the driver reports, which are JAX's `device_kind`. They must match exactly: a laptop part or a MIG
# slice carries a longer name and has another peak.
#
# The letters at the end of a row name its source:
#   V  Tesla V100 datasheet (2020), V100S datasheet        T  Turing whitepaper WP-09183, T4 product brief
#   A  A100 whitepaper and datasheet (80 GB: datasheet)     D  the card's own NVIDIA datasheet
#   G  GA102 whitepaper v2, appendix A                      H  H100 whitepaper v1.04; memory from the card's datasheet
#   L  Ada whitepaper v2.1, appendix A, and its PRO twin    B  HGX B100/B200/B300 and GB200/GB300 NVL72 datasheets
#   R  RTX Blackwell whitepaper v1.1, appendix A
#   c  CUDA cores x boost clock from NVIDIA's product page, at the rates per core of the family's whitepaper
#   s  the source prints the figure with sparsity; it is halved here
#   n  the source is rounded or silent there: TF32 is taken as half of BF16
# GeForce cards since Ampere run tensor products with fp32 accumulation at half the rate of fp16 accumulation: a 3090
# reaches 71, a 4090 165.2 and a 5090 209.5 TFLOP/s, not the 142, 330 and 419 that are often quoted. The workstation
# cards of the same chips (RTX A6000, 6000 Ada, PRO 6000) run at the full rate; llm.c's table halves those too.
GPUS = {
    "Tesla V100-SXM2-16GB": Gpu("7.0", 125.0, None, None, 15.7, 900, 16),  # V
    "Tesla V100-SXM2-32GB": Gpu("7.0", 125.0, None, None, 15.7, 900, 32),  # V
    "Tesla V100-PCIE-16GB": Gpu("7.0", 112.0, None, None, 14.0, 900, 16),  # V
    "Tesla V100-PCIE-32GB": Gpu("7.0", 112.0, None, None, 14.0, 900, 32),  # V
    "Tesla V100S-PCIE-32GB": Gpu("7.0", 130.0, None, None, 16.4, 1134, 32),  # V
    "Tesla T4": Gpu("7.5", 65.0, None, None, 8.1, 320, 16),  # T
    "NVIDIA GeForce RTX 2080 Ti": Gpu("7.5", 53.8, None, None, 13.4, 616, 11),  # T, reference clock
    "NVIDIA TITAN RTX": Gpu("7.5", 130.5, None, None, 16.3, 672, 24),  # T
    "NVIDIA A100-SXM4-40GB": Gpu("8.0", 312.0, 312.0, 156.0, 19.5, 1555, 40),  # A
    "NVIDIA A100-SXM4-80GB": Gpu("8.0", 312.0, 312.0, 156.0, 19.5, 2039, 80),  # A
    "NVIDIA A100-PCIE-40GB": Gpu("8.0", 312.0, 312.0, 156.0, 19.5, 1555, 40),  # A
    "NVIDIA A100 80GB PCIe": Gpu("8.0", 312.0, 312.0, 156.0, 19.5, 1935, 80),  # A
    "NVIDIA A800-SXM4-40GB": Gpu("8.0", 312.0, 312.0, 156.0, 19.5, 1555, 40),  # D: an A100 with slower NVLink
    "NVIDIA A800-SXM4-80GB": Gpu("8.0", 312.0, 312.0, 156.0, 19.5, 2039, 80),  # D
    "NVIDIA A800 80GB PCIe": Gpu("8.0", 312.0, 312.0, 156.0, 19.5, 1935, 80),  # D
    "NVIDIA A800 40GB Active": Gpu("8.0", 312.0, 312.0, 156.0, 19.5, 1555, 40),  # D s
    "NVIDIA A30": Gpu("8.0", 165.0, 165.0, 82.0, 10.3, 933, 24),  # D
    "NVIDIA A10": Gpu("8.6", 125.0, 125.0, 62.5, 31.2, 600, 24),  # D
    "NVIDIA A10G": Gpu("8.6", 70.0, 70.0, 35.0, 35.0, 600, 24),  # D (the AWS datasheet of the card)
    "NVIDIA A40": Gpu("8.6", 149.7, 149.7, 74.8, 37.4, 696, 48),  # D
    "NVIDIA A2": Gpu("8.6", 18.0, 18.0, 9.0, 4.5, 200, 16),  # D
    "NVIDIA RTX A6000": Gpu("8.6", 154.8, 154.8, 77.4, 38.7, 768, 48),  # G, appendix C
    "NVIDIA RTX A5000": Gpu("8.6", 111.1, 111.1, 55.6, 27.8, 768, 24),  # D s n
    "NVIDIA RTX A4500": Gpu("8.6", 94.6, 94.6, 47.3, 23.7, 640, 20),  # D s n
    "NVIDIA RTX A4000": Gpu("8.6", 76.7, 76.7, 38.3, 19.2, 448, 16),  # D s n
    "NVIDIA GeForce RTX 3090 Ti": Gpu("8.6", 80.0, 80.0, 40.0, 40.0, 1008, 24),  # G c
    "NVIDIA GeForce RTX 3090": Gpu("8.6", 71.0, 71.0, 35.6, 35.6, 936, 24),  # G
    "NVIDIA GeForce RTX 3080 Ti": Gpu("8.6", 68.2, 68.2, 34.1, 34.1, 912, 12),  # G c
    "NVIDIA GeForce RTX 3080": Gpu("8.6", 59.5, 59.5, 29.8, 29.8, 760, 10),  # G; the 12 GB card (61.3) is named so too
    "NVIDIA GeForce RTX 3070 Ti": Gpu("8.6", 43.5, 43.5, 21.7, 21.7, 608, 8),  # G c
    "NVIDIA GeForce RTX 3070": Gpu("8.6", 40.6, 40.6, 20.3, 20.3, 448, 8),  # G
    "NVIDIA GeForce RTX 3060 Ti": Gpu("8.6", 32.4, 32.4, 16.2, 16.2, 448, 8),  # G c
    "NVIDIA GeForce RTX 3060": Gpu("8.6", 25.5, 25.5, 12.7, 12.7, 360, 12),  # G c
    "NVIDIA L4": Gpu("8.9", 121.0, 121.0, 60.0, 30.3, 300, 24),  # D s
    "NVIDIA L40": Gpu("8.9", 181.05, 181.05, 90.5, 90.5, 864, 48),  # D
    "NVIDIA L40S": Gpu("8.9", 362.05, 362.05, 183.0, 91.6, 864, 48),  # D
    "NVIDIA RTX 6000 Ada Generation": Gpu("8.9", 364.2, 364.2, 182.1, 91.1, 960, 48),  # L
    "NVIDIA RTX 5000 Ada Generation": Gpu("8.9", 261.1, 261.1, 130.6, 65.3, 576, 32),  # D s n (a quarter of sparse FP8)
    "NVIDIA RTX 4500 Ada Generation": Gpu("8.9", 158.5, 158.5, 79.3, 39.6, 432, 24),  # D s n (a quarter of sparse FP8)
    "NVIDIA RTX 4000 Ada Generation": Gpu("8.9", 106.9, 106.9, 53.5, 26.7, 360, 20),  # D s n (a quarter of sparse FP8)
    "NVIDIA GeForce RTX 4090": Gpu("8.9", 165.2, 165.2, 82.6, 82.6, 1008, 24),  # L
    "NVIDIA GeForce RTX 4090 D": Gpu("8.9", 147.1, 147.1, 73.5, 73.5, 1008, 24),  # L c
    "NVIDIA GeForce RTX 4080 SUPER": Gpu("8.9", 104.4, 104.4, 52.2, 52.2, 736, 16),  # L c
    "NVIDIA GeForce RTX 4080": Gpu("8.9", 97.5, 97.5, 48.7, 48.7, 716.8, 16),  # L
    "NVIDIA GeForce RTX 4070 Ti SUPER": Gpu("8.9", 88.2, 88.2, 44.1, 44.1, 672, 16),  # L c
    "NVIDIA GeForce RTX 4070 Ti": Gpu("8.9", 80.2, 80.2, 40.1, 40.1, 504, 12),  # L
    "NVIDIA GeForce RTX 4070 SUPER": Gpu("8.9", 71.0, 71.0, 35.5, 35.5, 504, 12),  # L c
    "NVIDIA GeForce RTX 4070": Gpu("8.9", 58.3, 58.3, 29.1, 29.1, 504, 12),  # L c
    "NVIDIA GeForce RTX 4060 Ti": Gpu("8.9", 44.1, 44.1, 22.1, 22.1, 288, 8),  # L c; also sold with 16 GB
    "NVIDIA GeForce RTX 4060": Gpu("8.9", 30.2, 30.2, 15.1, 15.1, 272, 8),  # L c
    "NVIDIA H100 80GB HBM3": Gpu("9.0", 989.4, 989.4, 494.7, 66.9, 3350, 80),  # H (SXM5)
    "NVIDIA H100 PCIe": Gpu("9.0", 756.0, 756.0, 378.0, 51.2, 2000, 80),  # H
    "NVIDIA H100 NVL": Gpu("9.0", 835.5, 835.5, 417.5, 60.0, 3900, 94),  # D s
    "NVIDIA H800": Gpu("9.0", 989.4, 989.4, 494.7, 66.9, 3350, 80),  # D: an H100 with slower NVLink
    "NVIDIA H800 PCIe": Gpu("9.0", 756.0, 756.0, 378.0, 51.2, 2000, 80),  # D
    "NVIDIA H20": Gpu("9.0", 148.0, 148.0, 74.0, 44.0, 4000, 96),  # D
    "NVIDIA H200": Gpu("9.0", 989.4, 989.4, 494.7, 66.9, 4800, 141),  # H: the H100's chip and clock, other memory
    "NVIDIA H200 NVL": Gpu("9.0", 835.5, 835.5, 417.5, 60.0, 4800, 141),  # D s
    "NVIDIA GH200 120GB": Gpu("9.0", 989.4, 989.4, 494.7, 66.9, 4000, 96),  # H; the name counts the CPU's memory
    "NVIDIA GH200 480GB": Gpu("9.0", 989.4, 989.4, 494.7, 66.9, 4000, 96),  # H; the name counts the CPU's memory
    "NVIDIA GH200 144G HBM3e": Gpu("9.0", 989.4, 989.4, 494.7, 66.9, 4900, 144),  # H
    "NVIDIA B100": Gpu("10.0", 1750.0, 1750.0, 875.0, 60.0, 8000, 192),  # B s n
    "NVIDIA B200": Gpu("10.0", 2250.0, 2250.0, 1125.0, 75.0, 7700, 180),  # B s n
    "NVIDIA GB200": Gpu("10.0", 2500.0, 2500.0, 1250.0, 80.0, 8000, 186),  # B s, one of the superchip's two GPUs
    "NVIDIA B300 SXM6 AC": Gpu("10.3", 2250.0, 2250.0, 1125.0, 75.0, 8000, 270),  # B s n
    "NVIDIA GB300": Gpu("10.3", 2500.0, 2500.0, 1250.0, 80.0, 8000, 279),  # B s
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Gpu("12.0", 503.8, 503.8, 251.9, 126.0, 1792, 96),  # R (PRO)
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": Gpu("12.0", 440.0, 440.0, 220.0, 110.0, 1792, 96),  # D c
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": Gpu("12.0", 480.0, 480.0, 240.0, 120.0, 1597, 96),  # D c
    "NVIDIA GeForce RTX 5090": Gpu("12.0", 209.5, 209.5, 104.8, 104.8, 1792, 32),  # R
    "NVIDIA GeForce RTX 5080": Gpu("12.0", 112.6, 112.6, 56.3, 56.3, 960, 16),  # R
    "NVIDIA GeForce RTX 5070 Ti": Gpu("12.0", 87.9, 87.9, 43.9, 43.9, 896, 16),  # R
    "NVIDIA GeForce RTX 5070": Gpu("12.0", 61.7, 61.7, 30.9, 30.9, 672, 12),  # R
    "NVIDIA GeForce RTX 5060 Ti": Gpu("12.0", 47.4, 47.4, 23.7, 23.7, 448, 16),  # R c; also sold with 8 GB
    "NVIDIA GeForce RTX 5060": Gpu("12.0", 38.4, 38.4, 19.2, 19.2, 448, 8),  # R c
}


def peak_flops(device_kind: str, precision: Precision) -> float | None:
    """Return the peak FLOP/s of one device in a precision, dense; None where it is unknown or lacks the format.

    device_kind: as JAX reports it (`jax.devices()[0].device_kind`). CPUs have no entry: their peak depends on clocks
    that no one promises, so a rate is printed instead.
    """
    gpu = GPUS.get(device_kind)
    peak = None if gpu is None else getattr(gpu, precision)
    return None if peak is None else peak * 1e12


def card_memory_bytes(kind: str) -> int | None:
    """Return the bytes of a whole GPU as it is sold; None for a name not in the table, such as a MIG slice's."""
    return int(GPUS[kind].memory * 1e9) if kind in GPUS else None


# ----- to compile for ------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """What the compiler must know of a GPU beside its row of GPUS."""

    device_kind: str  # the driver's name: a key of GPUS, and what JAX's own tables know
    multiprocessors: int
    shared_memory: int  # bytes of shared memory that a block may use
    threads_per_multiprocessor: int
    cores_per_multiprocessor: int  # fp32
    l2_cache: int  # bytes
    clock: float  # GHz, boost

    @property
    def gpu(self) -> Gpu:
        """Return its peaks, bandwidth and memory."""
        return GPUS[self.device_kind]

    @property
    def capability(self) -> str:
        return self.gpu.capability

    @property
    def shared_memory_per_multiprocessor(self) -> int:
        """Return the bytes that a block may use, with the system's own part."""
        return self.shared_memory + 1024

    @property
    def architecture(self) -> str:
        """Return the name that kernels are chosen by, such as sm_90."""
        return "sm_" + self.capability.replace(".", "")


MIB = 2**20
# Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (shared memory, threads); the
# cards' datasheets and whitepapers as named above (multiprocessors, cores, cache, clock). H100 PCIe and RTX A6000: also
# XLA's own openxla/xla:xla/backends/gpu/target_config/specs. The clock of the RTX PRO 6000 Server Edition is its fp32
# peak over its cores.
TARGETS = {
    "h200": Target("NVIDIA H200", 132, 232_448, 2048, 128, 50 * MIB, 1.98),
    "h100": Target("NVIDIA H100 80GB HBM3", 132, 232_448, 2048, 128, 50 * MIB, 1.98),
    "a100": Target("NVIDIA A100-SXM4-80GB", 108, 166_912, 2048, 64, 40 * MIB, 1.41),
    "rtx3090": Target("NVIDIA GeForce RTX 3090", 82, 101_376, 1536, 128, 6 * MIB, 1.70),
    "rtx4090": Target("NVIDIA GeForce RTX 4090", 128, 101_376, 1536, 128, 72 * MIB, 2.52),
    "rtx5090": Target("NVIDIA GeForce RTX 5090", 170, 101_376, 1536, 128, 96 * MIB, 2.41),
    "b200": Target("NVIDIA B200", 148, 232_448, 2048, 128, 126 * MIB, 1.96),
    "h100-pcie": Target("NVIDIA H100 PCIe", 114, 232_448, 2048, 128, 50 * MIB, 1.755),
    "a100-40": Target("NVIDIA A100-SXM4-40GB", 108, 166_912, 2048, 64, 40 * MIB, 1.41),
    "a100-pcie": Target("NVIDIA A100 80GB PCIe", 108, 166_912, 2048, 64, 40 * MIB, 1.41),
    "a6000": Target("NVIDIA RTX A6000", 84, 101_376, 1536, 128, 6 * MIB, 1.80),
    "l40s": Target("NVIDIA L40S", 142, 101_376, 1536, 128, 96 * MIB, 2.52),
    "rtx6000pro": Target("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 101_376, 1536, 128, 128 * MIB, 2.49),
}


def known_target(name: str) -> Target:
    """Return the facts about a GPU by its short name. Raises InputError for one not known."""
    if name not in TARGETS:
        raise InputError(f"GPU {name!r} is not known here: take one of {', '.join(TARGETS)}")
    return TARGETS[name]


def multiprocessors_of(kind: str) -> int | None:
    """Return how many a GPU has, by the driver's name; None where TARGETS has none such."""
    return next((each.multiprocessors for each in TARGETS.values() if each.device_kind == kind), None)


AMX = "amx_bf16"  # Linux's name of what multiplies tiles of bfloat16: Intel's Xeons since 2023 (Sapphire Rapids)


class Machine(NamedTuple):
    """The machine as the choice of kernels sees it."""

    platform: str  # cpu, gpu
    kind: str  # as JAX names the device
    capability: str = ""  # of an NVIDIA GPU: "9.0"; of an AMD one nothing, or "gfx942"; of a CPU with AMX: AMX

    @property
    def version(self) -> tuple[int, int]:
        """Return the compute capability as numbers; (0, 0) of what is no NVIDIA GPU."""
        match = re.fullmatch(r"(\d+)\.(\d+)", self.capability)
        return (int(match[1]), int(match[2])) if match and self.platform == "gpu" else (0, 0)

    @property
    def target(self) -> str | None:
        """Return the architecture whose kernels run here; None where there are none."""
        major, minor = self.version
        if major == 8:
            return "sm_89" if minor >= 9 else "sm_86" if minor >= 6 else "sm_80"
        return {9: "sm_90", 10: "sm_100", 12: "sm_120"}.get(major)


def measured_on(card: str, beside: str = "", ratio: float = 0.0) -> str:
    """Return who says that something is the fastest: a card, and what else took how many times as long there."""
    return f"{ratio:.2f} x {beside}, measured on an {card}" if beside else f"measured on an {card}, beside nothing else"


def machine_of(kind: str) -> Machine:
    """Return the machine with a GPU that need not be here. kind: a key of `gpus.GPUS`."""
    return Machine("gpu", kind, GPUS[kind].capability)


def this_machine() -> Machine:
    """Return the device that JAX computes on by default. Initialises JAX's backend."""
    from llmc_jax.machine.device import first_device, has_cpu_flag

    device = first_device()
    if device.platform == "cpu":
        capability = AMX if has_cpu_flag(AMX) else ""
    else:
        capability = getattr(device, "compute_capability", "") if device.platform == "gpu" else ""
    return Machine(device.platform, device.device_kind, str(capability))
