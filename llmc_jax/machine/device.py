"""What this machine can do: peaks of NVIDIA GPUs, model FLOPs utilisation, memory, and whether a model fits.

Leaves out measuring (benchmarks/) and compiling a step to learn its exact memory. Importing it does not import JAX.
"""

import math
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from llmc_jax.config.model import GPT3_CHANNELS_TO_SHAPE, LLMC_DEPTH_TO_CHANNELS, ModelConfig, parse_descriptor
from llmc_jax.errors import InputError
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters

Precision = Literal["fp16", "bf16", "tf32", "fp32"]


class Gpu(NamedTuple):
    """Peaks of one GPU at its boost clock, dense (no 2:4 sparsity), tensor products accumulated in fp32.

    fp16, bf16, tf32: tensor cores; fp32: ordinary cores. All in TFLOP/s; None where the hardware lacks the format.
    bandwidth in GB/s (1e9 bytes), memory in GB as sold.
    """

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
    "Tesla V100-SXM2-16GB": Gpu(125.0, None, None, 15.7, 900, 16),  # V
    "Tesla V100-SXM2-32GB": Gpu(125.0, None, None, 15.7, 900, 32),  # V
    "Tesla V100-PCIE-16GB": Gpu(112.0, None, None, 14.0, 900, 16),  # V
    "Tesla V100-PCIE-32GB": Gpu(112.0, None, None, 14.0, 900, 32),  # V
    "Tesla V100S-PCIE-32GB": Gpu(130.0, None, None, 16.4, 1134, 32),  # V
    "Tesla T4": Gpu(65.0, None, None, 8.1, 320, 16),  # T
    "NVIDIA GeForce RTX 2080 Ti": Gpu(53.8, None, None, 13.4, 616, 11),  # T, reference clock
    "NVIDIA TITAN RTX": Gpu(130.5, None, None, 16.3, 672, 24),  # T
    "NVIDIA A100-SXM4-40GB": Gpu(312.0, 312.0, 156.0, 19.5, 1555, 40),  # A
    "NVIDIA A100-SXM4-80GB": Gpu(312.0, 312.0, 156.0, 19.5, 2039, 80),  # A
    "NVIDIA A100-PCIE-40GB": Gpu(312.0, 312.0, 156.0, 19.5, 1555, 40),  # A
    "NVIDIA A100 80GB PCIe": Gpu(312.0, 312.0, 156.0, 19.5, 1935, 80),  # A
    "NVIDIA A800-SXM4-40GB": Gpu(312.0, 312.0, 156.0, 19.5, 1555, 40),  # D: an A100 with slower NVLink
    "NVIDIA A800-SXM4-80GB": Gpu(312.0, 312.0, 156.0, 19.5, 2039, 80),  # D
    "NVIDIA A800 80GB PCIe": Gpu(312.0, 312.0, 156.0, 19.5, 1935, 80),  # D
    "NVIDIA A800 40GB Active": Gpu(312.0, 312.0, 156.0, 19.5, 1555, 40),  # D s
    "NVIDIA A30": Gpu(165.0, 165.0, 82.0, 10.3, 933, 24),  # D
    "NVIDIA A10": Gpu(125.0, 125.0, 62.5, 31.2, 600, 24),  # D
    "NVIDIA A10G": Gpu(70.0, 70.0, 35.0, 35.0, 600, 24),  # D (the AWS datasheet of the card)
    "NVIDIA A40": Gpu(149.7, 149.7, 74.8, 37.4, 696, 48),  # D
    "NVIDIA A2": Gpu(18.0, 18.0, 9.0, 4.5, 200, 16),  # D
    "NVIDIA RTX A6000": Gpu(154.8, 154.8, 77.4, 38.7, 768, 48),  # G, appendix C
    "NVIDIA RTX A5000": Gpu(111.1, 111.1, 55.6, 27.8, 768, 24),  # D s n
    "NVIDIA RTX A4500": Gpu(94.6, 94.6, 47.3, 23.7, 640, 20),  # D s n
    "NVIDIA RTX A4000": Gpu(76.7, 76.7, 38.3, 19.2, 448, 16),  # D s n
    "NVIDIA GeForce RTX 3090 Ti": Gpu(80.0, 80.0, 40.0, 40.0, 1008, 24),  # G c
    "NVIDIA GeForce RTX 3090": Gpu(71.0, 71.0, 35.6, 35.6, 936, 24),  # G
    "NVIDIA GeForce RTX 3080 Ti": Gpu(68.2, 68.2, 34.1, 34.1, 912, 12),  # G c
    "NVIDIA GeForce RTX 3080": Gpu(59.5, 59.5, 29.8, 29.8, 760, 10),  # G; the 12 GB card (61.3) has the same name
    "NVIDIA GeForce RTX 3070 Ti": Gpu(43.5, 43.5, 21.7, 21.7, 608, 8),  # G c
    "NVIDIA GeForce RTX 3070": Gpu(40.6, 40.6, 20.3, 20.3, 448, 8),  # G
    "NVIDIA GeForce RTX 3060 Ti": Gpu(32.4, 32.4, 16.2, 16.2, 448, 8),  # G c
    "NVIDIA GeForce RTX 3060": Gpu(25.5, 25.5, 12.7, 12.7, 360, 12),  # G c
    "NVIDIA L4": Gpu(121.0, 121.0, 60.0, 30.3, 300, 24),  # D s
    "NVIDIA L40": Gpu(181.05, 181.05, 90.5, 90.5, 864, 48),  # D
    "NVIDIA L40S": Gpu(362.05, 362.05, 183.0, 91.6, 864, 48),  # D
    "NVIDIA RTX 6000 Ada Generation": Gpu(364.2, 364.2, 182.1, 91.1, 960, 48),  # L
    "NVIDIA RTX 5000 Ada Generation": Gpu(261.1, 261.1, 130.6, 65.3, 576, 32),  # D s n (a quarter of sparse FP8)
    "NVIDIA RTX 4500 Ada Generation": Gpu(158.5, 158.5, 79.3, 39.6, 432, 24),  # D s n (a quarter of sparse FP8)
    "NVIDIA RTX 4000 Ada Generation": Gpu(106.9, 106.9, 53.5, 26.7, 360, 20),  # D s n (a quarter of sparse FP8)
    "NVIDIA GeForce RTX 4090": Gpu(165.2, 165.2, 82.6, 82.6, 1008, 24),  # L
    "NVIDIA GeForce RTX 4090 D": Gpu(147.1, 147.1, 73.5, 73.5, 1008, 24),  # L c
    "NVIDIA GeForce RTX 4080 SUPER": Gpu(104.4, 104.4, 52.2, 52.2, 736, 16),  # L c
    "NVIDIA GeForce RTX 4080": Gpu(97.5, 97.5, 48.7, 48.7, 716.8, 16),  # L
    "NVIDIA GeForce RTX 4070 Ti SUPER": Gpu(88.2, 88.2, 44.1, 44.1, 672, 16),  # L c
    "NVIDIA GeForce RTX 4070 Ti": Gpu(80.2, 80.2, 40.1, 40.1, 504, 12),  # L
    "NVIDIA GeForce RTX 4070 SUPER": Gpu(71.0, 71.0, 35.5, 35.5, 504, 12),  # L c
    "NVIDIA GeForce RTX 4070": Gpu(58.3, 58.3, 29.1, 29.1, 504, 12),  # L c
    "NVIDIA GeForce RTX 4060 Ti": Gpu(44.1, 44.1, 22.1, 22.1, 288, 8),  # L c; also sold with 16 GB
    "NVIDIA GeForce RTX 4060": Gpu(30.2, 30.2, 15.1, 15.1, 272, 8),  # L c
    "NVIDIA H100 80GB HBM3": Gpu(989.4, 989.4, 494.7, 66.9, 3350, 80),  # H (SXM5)
    "NVIDIA H100 PCIe": Gpu(756.0, 756.0, 378.0, 51.2, 2000, 80),  # H
    "NVIDIA H100 NVL": Gpu(835.5, 835.5, 417.5, 60.0, 3900, 94),  # D s
    "NVIDIA H800": Gpu(989.4, 989.4, 494.7, 66.9, 3350, 80),  # D: an H100 with slower NVLink
    "NVIDIA H800 PCIe": Gpu(756.0, 756.0, 378.0, 51.2, 2000, 80),  # D
    "NVIDIA H20": Gpu(148.0, 148.0, 74.0, 44.0, 4000, 96),  # D
    "NVIDIA H200": Gpu(989.4, 989.4, 494.7, 66.9, 4800, 141),  # H: the H100's chip and clock, other memory
    "NVIDIA H200 NVL": Gpu(835.5, 835.5, 417.5, 60.0, 4800, 141),  # D s
    "NVIDIA GH200 120GB": Gpu(989.4, 989.4, 494.7, 66.9, 4000, 96),  # H; the name counts the CPU's memory
    "NVIDIA GH200 480GB": Gpu(989.4, 989.4, 494.7, 66.9, 4000, 96),  # H; the name counts the CPU's memory
    "NVIDIA GH200 144G HBM3e": Gpu(989.4, 989.4, 494.7, 66.9, 4900, 144),  # H
    "NVIDIA B100": Gpu(1750.0, 1750.0, 875.0, 60.0, 8000, 192),  # B s n
    "NVIDIA B200": Gpu(2250.0, 2250.0, 1125.0, 75.0, 7700, 180),  # B s n
    "NVIDIA GB200": Gpu(2500.0, 2500.0, 1250.0, 80.0, 8000, 186),  # B s, one of the superchip's two GPUs
    "NVIDIA B300 SXM6 AC": Gpu(2250.0, 2250.0, 1125.0, 75.0, 8000, 270),  # B s n
    "NVIDIA GB300": Gpu(2500.0, 2500.0, 1250.0, 80.0, 8000, 279),  # B s
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": Gpu(503.8, 503.8, 251.9, 126.0, 1792, 96),  # R (PRO)
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": Gpu(440.0, 440.0, 220.0, 110.0, 1792, 96),  # D c
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": Gpu(480.0, 480.0, 240.0, 120.0, 1597, 96),  # D c
    "NVIDIA GeForce RTX 5090": Gpu(209.5, 209.5, 104.8, 104.8, 1792, 32),  # R
    "NVIDIA GeForce RTX 5080": Gpu(112.6, 112.6, 56.3, 56.3, 960, 16),  # R
    "NVIDIA GeForce RTX 5070 Ti": Gpu(87.9, 87.9, 43.9, 43.9, 896, 16),  # R
    "NVIDIA GeForce RTX 5070": Gpu(61.7, 61.7, 30.9, 30.9, 672, 12),  # R
    "NVIDIA GeForce RTX 5060 Ti": Gpu(47.4, 47.4, 23.7, 23.7, 448, 16),  # R c; also sold with 8 GB
    "NVIDIA GeForce RTX 5060": Gpu(38.4, 38.4, 19.2, 19.2, 448, 8),  # R c
}


def peak_flops(device_kind: str, precision: Precision) -> float | None:
    """Peak FLOP/s of one device in a precision, dense; None where the device is not in the table or lacks the format.

    device_kind: as JAX reports it (`jax.devices()[0].device_kind`). CPUs have no entry: their peak depends on clocks
    that no one promises, so a rate is printed instead.
    """
    gpu = GPUS.get(device_kind)
    peak = None if gpu is None else getattr(gpu, precision)
    return None if peak is None else peak * 1e12


def flops_per_token(
    config: ModelConfig, sequence_length: int, *, definition: Literal["llm.c", "palm"] = "llm.c"
) -> int:
    """Floating-point operations of forward and backward per token of a sequence of T tokens.

    6N for the matrix products (2N forward, 4N backward; N counts all parameters, padded rows included) and, for
    attention's products, 6LCT with "llm.c", which halves them as causality allows, or 12LCT with "palm".
    Sources: llm.c train_gpt2.cu, `gpt2_estimate_mfu`; Chowdhery et al., PaLM (2022), appendix B.
    """
    attention = {"llm.c": 6, "palm": 12}[definition] * config.num_layers * config.channels * sequence_length
    return 6 * num_parameters(config) + attention


def model_flops_utilization(flops_per_second: float, peak: float | None, num_devices: int = 1) -> float | None:
    """MFU as a fraction: the FLOP/s that a whole run reaches over the peak of its devices; None without a peak."""
    return None if peak is None else flops_per_second / (peak * num_devices)


class Device(NamedTuple):
    """The machine that a run uses. memory_bytes is None where nothing says it."""

    platform: str  # cpu, gpu, tpu
    kind: str  # JAX's device_kind; on a CPU the processor's name
    num_devices: int  # that JAX sees
    memory_bytes: int | None  # of one device; on a CPU the main memory
    cpu_cores: int  # that this process may use
    system: str  # operating system and architecture


def describe_device() -> Device:
    """The device that JAX computes on by default, and what there is of it. Initialises JAX's backend."""
    import jax

    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    return Device(
        platform=devices[0].platform,
        kind=cpu_name() if on_cpu else devices[0].device_kind,
        num_devices=len(devices),
        memory_bytes=available_memory_bytes(),
        cpu_cores=_usable_cores(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def device_label(device: Device) -> str:
    """One line for the start-up table: `1 of 8 x NVIDIA H200, 105.0 GiB` or `CPU: AMD EPYC 7B13, 2 cores, 23.5 GiB`."""
    memory = "" if device.memory_bytes is None else f", {gib(device.memory_bytes)}"
    if device.platform == "cpu":
        cores = "1 core" if device.cpu_cores == 1 else f"{device.cpu_cores} cores"
        return f"CPU: {device.kind}, {cores}{memory}"
    count = "" if device.num_devices == 1 else f"1 of {device.num_devices} x "
    return f"{count}{device.kind}{memory}"


def cpu_name() -> str:
    """The processor's model name, as the operating system gives it."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    else:
        name = _field(Path("/proc/cpuinfo"), "model name")
    return name or platform.processor() or platform.machine() or "unknown processor"


def _field(path: Path, key: str) -> str:
    """The value of the first `key : value` line of a file, or an empty string."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory_bytes() -> int | None:
    """Bytes that one device of this machine can hold in all; None where nothing says it.

    GPU: what JAX's allocator may take (platform.configure asks for 92 % of the card, unless the environment variable
    XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise).
    CPU: the main memory, or the container's limit where that is lower. Not what happens to be free at this moment:
    that changes by itself, while a model that exceeds the whole can never run.
    """
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return host_memory_bytes()
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or card_memory_bytes(device.device_kind)


def card_memory_bytes(kind: str) -> int | None:
    """Bytes of a whole GPU as it is sold, by the driver's name; None for one not in the table, such as a MIG slice."""
    return int(GPUS[kind].memory * 1e9) if kind in GPUS else None


UNKNOWN_CACHE = 96 << 20  # bytes; Apple says nothing about its system-level cache, and none is larger


def cache_bytes(cores: Iterable[int] | None = None, root: Path = Path("/")) -> int:
    """Return the bytes of all caches of some cores, each counted once; UNKNOWN_CACHE where nothing says it.

    cores: those that this process may use where it is None. root: where /sys is looked for (a test's own).
    """
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "hw.l3cachesize"]  # of Intel's; Apple's own processors have no such entry
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return int(found) if found.isdigit() and int(found) > 0 else UNKNOWN_CACHE
    if cores is None:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    sizes: dict[tuple[str, ...], int] = {}
    for core in cores:
        for cache in root.glob(f"sys/devices/system/cpu/cpu{core}/cache/index*"):
            try:
                level, kind, size, shared = (
                    cache.joinpath(name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
                )
            except OSError:
                continue
            number, unit = size[:-1], {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1:])
            if kind != "Instruction" and unit and number.isdigit():
                sizes[level, kind, shared] = int(number) * unit
    return sum(sizes.values()) or UNKNOWN_CACHE


def host_memory_bytes(root: Path = Path("/")) -> int | None:
    """The main memory in bytes, or the limit of the control group this process runs in where that is lower.

    root: where /proc and /sys are looked for (a test's own).
    """
    total = _field(root / "proc/meminfo", "MemTotal").removesuffix("kB").strip()
    limits = [int(total) * 1024] if total.isdigit() else []
    if not limits and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _cgroup_limit_files(root):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) > 0:  # v2 writes "max" where there is no limit, v1 a number beyond any memory
            limits.append(int(text))
    return min(limits, default=None)


def _cgroup_limit_files(root: Path) -> Iterator[Path]:
    """The files that may limit this process's memory: its control group's and every parent's, version 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield base.joinpath(*parts[:depth], name)


class Memory(NamedTuple):
    """Bytes that one training step needs at least."""

    state: int  # parameters, m, v, gradient and the step's copies of the weights
    activations: int  # what the backward of one micro-batch reads

    @property
    def total(self) -> int:
        return self.state + self.activations


class Storage(NamedTuple):
    """What decides how many bytes a training step keeps, beside the model and the batch."""

    bytes_per_value: int = 4  # of weights, activations and gradients: 4 in fp32, 2 in bf16 and fp16
    master_weights: bool = True  # fp32 weights beside 16-bit ones
    accumulation: int = 1  # micro-batches of an update
    attention_weights: bool = True  # the T x T matrix is kept for the backward
    recompute_blocks: int = 0  # N: only every N-th block's input is kept
    logit_rows: int = 0  # rows of logits that exist at a time; 0: all
    sliced_weights: bool = True  # the compiled step copies the weights out of the flat buffer once, as on a CPU


FP32 = Storage()


def required_memory_bytes(
    config: ModelConfig, batch_size: int, sequence_length: int, storage: Storage = FP32
) -> Memory:
    """Bytes that training with a micro-batch of B x T tokens needs at least. Allocates nothing.

    State: flat buffers. m and v have 4 bytes an element, the parameters 4, or 2, or both, as storage says. During a
    step there are also the gradient, on a CPU the slices of the weights that the compiled step makes, and with several
    micro-batches in an update their sum in fp32.
    Activations, per token: in each of L layers the block's input C, qkv 3C, attention's output C, the second
    residual C, the MLP's hidden layer 4C and, where the T x T matrix is kept, one row of T weights for each of NH
    heads; then the logits, Vp, of the rows that exist at a time. Everything else (layernorm's and GELU's outputs,
    temporary gradients) could be recomputed or reused, so the sum is a lower bound: what exceeds it cannot run, what
    stays below it may still not.
    """
    size = storage.bytes_per_value
    params = 4 if size == 4 else size + 4 * storage.master_weights
    gradient = size + 4 * (storage.accumulation > 1)
    state = (params + 8 + gradient + size * storage.sliced_weights) * flat_size(config)
    tokens = batch_size * sequence_length
    row = 10 * config.channels + (config.num_heads * sequence_length if storage.attention_weights else 0)
    per_token = config.num_layers * row
    if storage.recompute_blocks:  # the kept inputs, and all activations of one stretch
        stretch = min(storage.recompute_blocks, config.num_layers)
        per_token = -(-config.num_layers // stretch) * config.channels + stretch * row
    logits = min(storage.logit_rows or tokens, tokens) * config.padded_vocab_size
    return Memory(state, size * (tokens * per_token + logits))


LEAST_LOGIT_ROWS = 8192  # a chunk that keeps a GPU busy: 0.8 GB of bf16 logits for GPT-2
SPARE = 1.1  # bytes that a compiled step takes for each that it keeps: how XLA lays the buffers out


def estimated_step_bytes(
    config: ModelConfig, batch_size: int, sequence_length: int, storage: Storage, recompute: int
) -> int:
    """Bytes that a compiled step takes on a GPU, rather too many: to decide what fits, not what may be tried.

    recompute: -r, 0 to 2. Beyond `required_memory_bytes`: GELU's output (4C a token and layer) and the layernorms' (2C)
    where they are not computed again, and the logits' gradient, which no kernel may write over the logits. 1.1 to 1.4
    times what the compiler reports (tests/machine/test_device.py).
    """
    need = required_memory_bytes(config, batch_size, sequence_length, storage)
    tokens = batch_size * sequence_length
    outputs = {0: 6, 1: 2}.get(recompute, 0) * (not storage.recompute_blocks)
    dlogits = min(storage.logit_rows or tokens, tokens) * config.padded_vocab_size
    kept = storage.bytes_per_value * (tokens * config.num_layers * config.channels * outputs + dlogits)
    return need.state + int(SPARE * (need.activations + kept))


def chosen_logit_rows(
    config: ModelConfig, batch_size: int, sequence_length: int, storage: Storage, recompute: int, memory: int | None
) -> int:
    """Return how many rows of logits a GPU makes at a time: 0 (all) where they fit, or the largest power of two.

    storage: but for its logit_rows. recompute: -r, 0 to 2. memory: bytes of the whole card (`card_memory_bytes`), and
    never what is free: a run that is started again must compute as before. Never fewer than LEAST_LOGIT_ROWS, which is
    also the answer where memory is None.

    Why many: the gradient of the head's input is a product of `rows` x C, a block for each tile of 128 x 256. With 8192
    rows and C=768 these are 64 * 3 = 192 tiles on an H200's 132 multiprocessors, 1.45 waves that take the time of 2:
    73 % of them work. 32,768 rows are 5.82 waves of 6, 97 %, and all 65,536 of B=64 T=1024 11.6 of 12. With one chunk
    there is also no sum of the chunks' dwte, 4 Vp C bytes that each chunk reads and writes.
    """
    if memory is None:
        return LEAST_LOGIT_ROWS
    highest = (batch_size * sequence_length - 1).bit_length()
    for rows in (0, *(2**k for k in range(highest - 1, LEAST_LOGIT_ROWS.bit_length() - 1, -1))):
        chunked = storage._replace(logit_rows=rows)
        if estimated_step_bytes(config, batch_size, sequence_length, chunked, recompute) <= MEMORY_SHARE * memory:
            return rows
    return LEAST_LOGIT_ROWS


def check_fits(
    config: ModelConfig,
    batch_size: int,
    sequence_length: int,
    storage: Storage = FP32,
    *,
    available: int | None = None,
) -> None:
    """Refuse a model that cannot be trained on this machine: InputError with what it needs, what there is, what fits.

    available: bytes; this machine's where it is None. Passes where the machine's memory is not known.
    """
    available = available_memory_bytes() if available is None else available
    need = required_memory_bytes(config, batch_size, sequence_length, storage)
    if available is None or need.total <= available:
        return
    rows = batch_size * storage.accumulation  # of one update: a smaller -b that divides them leaves it unchanged
    smaller = [size for size in divisors(rows) if size < batch_size]
    needs = (
        (size, required_memory_bytes(config, size, sequence_length, storage._replace(accumulation=rows // size)))
        for size in smaller
    )
    batch = next((size for size, need in needs if need.total <= available), None)
    model = largest_that_fits(batch_size, sequence_length, available, storage)
    shape = f"L={config.num_layers} NH={config.num_heads} C={config.channels}"
    raise InputError(
        f"-e: this model ({shape}, {num_parameters(config):,} parameters) needs at least {gib(need.total)} of memory "
        f"with -b {batch_size} -t {sequence_length}: {gib(need.state)} for parameters, gradient, AdamW's m and v and "
        f"the step's copies, {gib(need.activations)} for activations; this machine has {gib(available)}; "
        + _advice(need, available, batch, rows * sequence_length, model)
    )


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, the largest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)


def _advice(need: Memory, available: int, batch: int | None, total: int, model: str | None) -> str:
    smaller = f"take -e {model}, the largest known model that fits" if model else "take a smaller model than d6"
    if batch is not None:
        same = f"take -b {batch}: with -d {total} the updates stay the same"
        return f"{same}; or {smaller}" if model else same
    return f"lower -b or -t, or {smaller}" if need.state < available else smaller


def largest_that_fits(batch_size: int, sequence_length: int, available: int, storage: Storage = FP32) -> str | None:
    """The descriptor of the known model with most parameters whose training fits into `available` bytes, or None."""
    names = [f"d{depth}" for depth in LLMC_DEPTH_TO_CHANNELS]
    names += [f"gpt3:c{channels}" for channels, (_, size) in GPT3_CHANNELS_TO_SHAPE.items() if channels % size == 0]
    fitting = []
    for name in names:
        config = parse_descriptor(name)
        need = required_memory_bytes(config, batch_size, min(sequence_length, config.max_seq_len), storage)
        if need.total <= available:
            fitting.append((need.state, name))
    return max(fitting)[1] if fitting else None


def gib(num_bytes: int) -> str:
    """Bytes as text in GiB (2^30), or MiB below one."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:,.1f} GiB"
