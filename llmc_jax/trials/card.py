"""The GPU that JAX is going to use, asked before JAX touches it: by the driver's library, which makes no context.

So that others can still use the card afterwards, where only one process at a time may (compute mode exclusive). Leaves
out the figures that change while it works (llmc_jax/machine/nvml.py). Imports JAX only to ask for its settings.
"""

import ctypes
import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.machine.device import output_of
from llmc_jax.machine.gpus import Machine

DRIVER_VERSION = Path("/sys/module/nvidia/version")
MAJOR, MINOR = 75, 76  # CUDA's numbers of the attributes that are the compute capability
FREE_SHARE = 0.75  # of the memory, that must be free for a trial
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


class Card(NamedTuple):
    """What identifies a GPU, or a slice of one (MIG), and its driver."""

    name: str  # NVIDIA H200; of a slice NVIDIA H200 MIG 1g.18gb
    uuid: str  # in hexadecimal digits
    capability: str  # 9.0
    memory: int  # bytes
    driver: str  # its version; empty: it does not say
    gpus: int = 1  # GPUs that CUDA shows this process, this one and others

    @property
    def machine(self) -> Machine:
        """Return the card as the choice of kernels sees it."""
        return Machine("gpu", self.name, self.capability)


def find_card(cuda: Any = None) -> Card | None:
    """Return the first GPU that CUDA shows this process; None where JAX is not going to use one.

    cuda: the driver's library, where a test has its own.
    """
    return next(iter(_cards(cuda)), None)


def seen_gpus(cuda: Any = None) -> tuple[str, ...]:
    """Return the uuid of each GPU that CUDA shows this process, in its order. cuda: as in `find_card`."""
    return tuple(card.uuid for card in _cards(cuda))


def _cards(cuda: Any) -> list[Card]:
    """Return the GPUs that CUDA shows this process; none where the driver does not describe each of them."""
    if cuda is None and not _jax_uses_cuda():
        return []
    count = ctypes.c_int()
    try:
        cuda = cuda or ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return []
        return [_described(cuda, number, count.value) for number in range(count.value)]
    except (OSError, AttributeError):
        return []


def _described(cuda: Any, number: int, gpus: int) -> Card:
    """Return one of several GPUs. Raises OSError where the driver refuses a question."""
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, uuid, memory = ctypes.create_string_buffer(128), ctypes.create_string_buffer(16), ctypes.c_size_t()
    calls: list[tuple[Callable[..., int], tuple[Any, ...]]] = [
        (cuda.cuDeviceGet, (ctypes.byref(device), number)),
        (cuda.cuDeviceGetName, (name, len(name), device)),
        (cuda.cuDeviceGetUuid_v2, (uuid, device)),
        (cuda.cuDeviceTotalMem_v2, (ctypes.byref(memory), device)),
        (cuda.cuDeviceGetAttribute, (ctypes.byref(major), MAJOR, device)),
        (cuda.cuDeviceGetAttribute, (ctypes.byref(minor), MINOR, device)),
    ]
    if any(call(*arguments) for call, arguments in calls):
        raise OSError
    words, capability = name.value.decode(errors="replace"), f"{major.value}.{minor.value}"
    return Card(words, uuid.raw.hex(), capability, memory.value, driver_version(), gpus)


def driver_version() -> str:
    """Return the version of NVIDIA's driver; empty where it does not say."""
    try:
        return DRIVER_VERSION.read_text().strip()
    except OSError:
        return ""


def _jax_uses_cuda() -> bool:
    """Return whether JAX has a plugin for NVIDIA GPUs, and nobody has told it to use something else."""
    import jax

    asked = str(jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS", "")).lower().split(",")[0]
    if asked not in ("", "cuda", "gpu"):
        return False
    return sys.platform == "linux" and any(importlib.util.find_spec(name) for name in PLUGINS)


def jax_has_begun() -> bool:
    """Return whether JAX has a device already in this process: a GPU that only one process may use is then taken."""
    from jax._src import xla_bridge  # JAX says it nowhere else

    return bool(xla_bridge.backends_are_initialized())


def _nvidia_smi(arguments: Sequence[str]) -> str:
    return output_of("nvidia-smi", *arguments, seconds=20)


def busy(card: Card, ask: Callable[[Sequence[str]], str] = _nvidia_smi) -> str:
    """Return why nothing should be tried on a card now; empty where it is free, as far as is known.

    ask: what runs nvidia-smi with arguments and returns what it prints, nothing where it cannot.
    """
    if "MIG" in card.name:  # of a slice nvidia-smi tells neither
        return ""
    gpu = f"GPU-{uuid.UUID(card.uuid)}"
    memory = ask(["-i", gpu, "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"])
    others = ask(["-i", gpu, "--query-compute-apps=pid", "--format=csv,noheader"])
    numbers = [word.strip() for word in memory.split(",")]
    processes = [word for word in others.split() if word.isdigit() and int(word) != os.getpid()]
    if processes:
        return f"other processes use the card ({', '.join(processes)})"
    if len(numbers) == 2 and all(word.isdigit() for word in numbers) and int(numbers[0]) < FREE_SHARE * int(numbers[1]):
        return f"of the card's memory only {int(numbers[0])} of {int(numbers[1])} MiB are free"
    return ""
