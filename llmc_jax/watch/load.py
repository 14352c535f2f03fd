"""How busy this machine is: processors, memory, GPUs. Leaves out the run's own figures."""

import importlib
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from llmc_jax.machine.nvml import GpuReading, read_gpu

FIRST = 0.2  # seconds that the first reading of the processors takes


class Load(NamedTuple):
    """How busy this machine is."""

    cpu_percent: float  # of all cores, since the last reading
    memory_used: int  # bytes
    memory_total: int
    process_memory: int | None = None  # bytes of the run's process; None where it is not seen
    gpus: tuple[GpuReading, ...] = ()


class Machine:
    """Reads how busy this machine is. It makes no GPU context, and changes nothing."""

    def __init__(self, with_gpus: bool) -> None:
        self._nvml: Any
        self._nvml, self._handles = _open_gpus() if with_gpus else (None, [])
        self._interval: float | None = FIRST  # None: since the last reading

    def read(self, pid: int | None) -> Load:
        """Return a reading. pid: of the run's process, if it is on this machine."""
        interval, self._interval = self._interval, None
        memory, own, gpus = psutil.virtual_memory(), None, list[GpuReading]()
        with suppress(psutil.Error, OverflowError, ValueError):
            own = None if pid is None else psutil.Process(pid).memory_info().rss
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                gpus.append(read_gpu(self._nvml, handle))
        used = memory.total - memory.available
        return Load(psutil.cpu_percent(interval), used, memory.total, own, tuple(gpus))


def _open_gpus() -> tuple[Any, list[Any]]:
    """Return NVML and the handles of this machine's GPUs; none where there is no NVML."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, []
    try:
        nvml.nvmlInit()
        return nvml, [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return nvml, []
