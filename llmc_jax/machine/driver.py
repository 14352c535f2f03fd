"""The GPUs that JAX is going to use, asked before JAX touches them: by the driver's library, which makes no context.

So that others can still use a card afterwards, where only one process at a time may (compute mode exclusive). Leaves
out the figures that change while it works (nvml.py). Imports JAX only to ask for its settings.
"""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.machine.device import output_of
from llmc_jax.machine.gpus import Machine

DRIVER_VERSION = Path("/sys/module/nvidia/version")
MAJOR, MINOR = 75, 76  # CUDA's numbers of the attributes that are the compute capability
FREE_SHARE = 0.75  # of the memory, that must be free for a trial
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")  # modules


class Card(NamedTuple):
    """What identifies a GPU, or a slice of one (MIG), and its driver."""

    name: str  # NVIDIA H200; of a slice NVIDIA H200 MIG 1g.18gb
    uuid: str  # in hexadecimal digits
    capability: str  # 9.0
    memory: int  # bytes
    driver: str  # its version; empty: it does not say
    pci: str  # where it sits, such as 0000:65:00.0; of a slice, where the whole card does

    @property
    def machine(self) -> Machine:
        """Return the card as the choice of kernels sees it."""
        return Machine("gpu", self.name, self.capability)


def seen_cards(cuda: Any = None) -> list[Card]:
    """Return the GPUs that CUDA shows this process, in its order, which is JAX's; none where JAX will not use them.

    Nor are there any where the driver does not describe each. cuda: the driver's library, where a test has its own.
    """
    if cuda is None and not _jax_uses_cuda():
        return []
    count = ctypes.c_int()
    try:
        cuda = cuda or ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return []
        return [_described(cuda, number) for number in range(count.value)]
    except (OSError, AttributeError):
        return []


def _described(cuda: Any, number: int) -> Card:
    """Return one of several GPUs. Raises OSError where the driver refuses a question."""
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, pci, uuid = (ctypes.create_string_buffer(size) for size in (128, 32, 16))
    memory = ctypes.c_size_t()
    calls: list[tuple[Callable[..., int], tuple[Any, ...]]] = [
        (cuda.cuDeviceGet, (ctypes.byref(device), number)),
        (cuda.cuDeviceGetName, (name, len(name), device)),
        (cuda.cuDeviceGetPCIBusId, (pci, len(pci), device)),
        (cuda.cuDeviceGetUuid_v2, (uuid, device)),
        (cuda.cuDeviceTotalMem_v2, (ctypes.byref(memory), device)),
        (cuda.cuDeviceGetAttribute, (ctypes.byref(major), MAJOR, device)),
        (cuda.cuDeviceGetAttribute, (ctypes.byref(minor), MINOR, device)),
    ]
    if any(call(*arguments) for call, arguments in calls):
        raise OSError
    words, capability = name.value.decode(errors="replace"), f"{major.value}.{minor.value}"
    return Card(words, uuid.raw.hex(), capability, memory.value, driver_version(), pci.value.decode())


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


def busy(card: Card) -> str:
    """Return why nothing should be tried on a card now; empty where it is free, as far as is known."""
    if "MIG" in card.name:  # of a slice nvidia-smi does not tell
        return ""
    asked = "-i", card.pci, "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"
    said = output_of("nvidia-smi", *asked, seconds=20)
    free, total = (int(word) if word.strip().isdigit() else 0 for word in (said + ",").split(",")[:2])
    return f"of the card's memory only {free} of {total} MiB are free" if free < FREE_SHARE * total else ""
