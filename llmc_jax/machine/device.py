"""What this machine can do: its cores, caches and memory, model FLOPs utilisation, and whether a model fits.

Leaves out measuring (benchmarks/), compiling a step to learn its exact memory, and what GPUs are sold with (gpus.py).
Importing it does not import JAX.
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
from llmc_jax.machine.gpus import card_memory_bytes
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters


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
        cpu_cores=len(usable_cores()),
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


def usable_cores() -> list[int]:
    """Return the cores that this process may use, by their numbers."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


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


UNKNOWN_CACHE = 96 << 20  # bytes; Apple says nothing about its system-level cache, and none is larger


def cache_bytes(cores: Iterable[int] | None = None, root: Path = Path("/")) -> int:
    """Return the bytes of all caches of some cores, each counted once; UNKNOWN_CACHE where nothing says it.

    cores: those that this process may use where it is None. root: where /sys is looked for (a test's own).
    """
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "hw.l3cachesize"]  # of Intel's; Apple's own processors have no such entry
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return int(found) if found.isdigit() and int(found) > 0 else UNKNOWN_CACHE
    sizes: dict[tuple[str, ...], int] = {}
    for core in usable_cores() if cores is None else cores:
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
