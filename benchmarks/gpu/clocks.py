"""What the card's clock and power do while an item is measured: read by a thread of the parent, which has no context.

Only readings of a busy card count: while a program compiles, the clock says nothing. Imports no JAX.
"""

import importlib
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmc_jax.machine.nvml import GpuReading, read_gpu
from llmc_jax.trials.children import Figures

EVERY = 0.1  # seconds between readings
BUSY = 50  # percent of the driver's last moments in which a kernel ran
Read = Callable[[], GpuReading]


def reader(pci: str) -> Read | None:
    """Return what reads a card. pci: where it sits, as CUDA says. None where it is not known, or there is no NVML."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci.encode())
        read_gpu(nvml, handle)
    except nvml.NVMLError:
        return None
    return lambda: read_gpu(nvml, handle)


@contextmanager
def sampled(read: Read | None) -> Iterator[list[GpuReading]]:
    """Read the card again and again while the block runs; none without `read`, and no more once it fails."""
    readings: list[GpuReading] = []
    over = threading.Event()

    def sample(read: Read) -> None:
        while not over.wait(EVERY):
            try:
                readings.append(read())
            except Exception:  # an NVMLError: the measurement goes on without
                return

    thread = threading.Thread(target=sample, args=(read,), daemon=True)
    if read is not None:
        thread.start()
    try:
        yield readings
    finally:
        over.set()
        if read is not None:
            thread.join()


def figures_of(readings: Sequence[GpuReading]) -> Figures:
    """Return the clock's and the power's median, the least clock, and what held the clock back in which share."""
    busy = [each for each in readings if (each.compute_percent or 0) >= BUSY]
    clocks = [each.clock_mhz for each in busy if each.clock_mhz is not None]
    watts = [each.power_watts for each in busy if each.power_watts is not None]
    caps = Counter(each.cap for each in busy if each.cap is not None)
    found: Figures = {"SM MHz": statistics.median(clocks), "SM MHz least": min(clocks)} if clocks else {}
    if watts:
        found["W"] = statistics.median(watts)
    if caps:
        held = {cap: count / caps.total() for cap, count in caps.most_common() if cap != "no"}
        found["cap"] = ", ".join(f"{cap} {100 * share:.0f} %" for cap, share in held.items()) or "no"
    return found
