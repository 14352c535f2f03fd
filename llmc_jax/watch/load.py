"""How busy this machine is: processors, memory, GPUs. Leaves out the run's own figures."""

import contextlib
import importlib
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
        memory = psutil.virtual_memory()
        return Load(
            cpu_percent=psutil.cpu_percent(interval),
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            process_memory=None if pid is None else self._memory_of(pid),
            gpus=tuple(self._gpus()),
        )

    def _memory_of(self, pid: int) -> int | None:
        try:
            resident: int = psutil.Process(pid).memory_info().rss
            return resident
        except (psutil.Error, OverflowError, ValueError):
            return None

    def _gpus(self) -> list[GpuReading]:
        found = []
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                found.append(read_gpu(self._nvml, handle))
        return found


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
