"""The machine as the choice of kernels sees it: its platform, its kind, its compute capability."""

import re
from typing import NamedTuple

from llmc_jax.machine.gpus import GPUS


class Machine(NamedTuple):
    """What the choice depends on."""

    platform: str  # cpu, gpu
    kind: str  # as JAX names the device
    capability: str = ""  # of an NVIDIA GPU: "9.0"; of an AMD one nothing, or "gfx942"

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
    from llmc_jax.machine.device import first_device

    device = first_device()
    capability = getattr(device, "compute_capability", "") if device.platform == "gpu" else ""
    return Machine(device.platform, device.device_kind, str(capability))
