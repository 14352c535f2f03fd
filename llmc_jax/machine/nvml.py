"""What an NVIDIA GPU says of itself while it trains (-lg): memory, clocks, power, temperature, load.

Read from the driver through NVML, the library behind nvidia-smi, with the package nvidia-ml-py, which is imported when
a monitor is opened. Leaves out what a model needs (device.py) and where its time goes (profiles).
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.machine.device import first_device, gib
from llmc_jax.machine.driver import seen_cards

# Bits of NVML's reasons for a clock below the highest one, grouped as llm.c does; the bits for an idle GPU and for
# clocks that somebody has set are no cap.
POWER_CAP = 0x4 | 0x80  # the power limit; the power supply's brake
THERMAL_CAP = 0x20 | 0x40  # the driver's and the hardware's slowdown
NO_CAP = 0x1 | 0x2 | 0x100  # idle; clocks set by the user; clocks of the display


class GpuReading(NamedTuple):
    """One reading of the whole card, other processes included. None: the card or the driver does not say."""

    compute_percent: int | None  # share of the last moments in which a kernel ran
    memory_busy_percent: int | None  # share in which memory was read or written
    memory_used_bytes: int | None  # what JAX's allocator keeps counts as used: nearly all of the card
    memory_total_bytes: int | None
    fan_percent: int | None
    clock_mhz: int | None  # of the multiprocessors
    max_clock_mhz: int | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: int | None
    slowdown_celsius: int | None  # from where on the hardware slows down
    cap: str | None  # what holds the clock back: power, thermal, other, no


class GpuMonitor:
    """The open NVML of one GPU. `open_monitor` makes one."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._warned = False

    def read(self, warn: Callable[[str], None]) -> GpuReading | None:
        """Return a reading; None where it fails, with one warning in the life of the monitor. Never raises for that."""
        try:
            return read_gpu(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            if not self._warned:
                warn(f"-lg: the GPU's figures cannot be read ({error}); training continues without them")
            self._warned = True
            return None

    def close(self) -> None:
        """Give NVML back. May be called twice."""
        with contextlib.suppress(self._nvml.NVMLError):  # closed already, or the driver is gone
            self._nvml.nvmlShutdown()


def open_monitor(device: Any = None) -> GpuMonitor:
    """Open NVML for the GPU of a JAX device (None: the first one) and read it once.

    Raises InputError, naming -lg and what to do, where there is no NVIDIA GPU, no nvidia-ml-py or no NVML.
    """
    device = device or first_device()
    if device.platform != "gpu" or "rocm" in getattr(device.client, "platform_version", ""):
        raise InputError("-lg: there is no NVIDIA GPU here; leave it out")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise InputError(
            "-lg: needs the package nvidia-ml-py: run `python -m pip install nvidia-ml-py`, or leave -lg out"
        ) from error
    # JAX counts as CUDA does, NVML counts all cards of the machine, and in another order.
    cards = seen_cards()
    if device.local_hardware_id >= len(cards):
        raise InputError("-lg: the CUDA driver does not say which GPU this is; leave -lg out")
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByPciBusId(cards[device.local_hardware_id].pci.encode())
        read_gpu(nvml, handle)
    except nvml.NVMLError as error:
        raise InputError(
            f"-lg: NVML, NVIDIA's management library, says {str(error)!r}; it belongs to the driver: see whether "
            "nvidia-smi works, or leave -lg out"
        ) from error
    return GpuMonitor(nvml, handle)


def read_gpu(nvml: Any, handle: Any) -> GpuReading:
    """Return a reading. What the card does not support is None; raises NVMLError where it does not answer at all."""
    absent = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError as error:
            if error.value not in absent:
                raise
            return None

    def watts(name: str) -> float | None:
        milliwatts = ask(name)
        return None if milliwatts is None else milliwatts / 1000

    memory = ask("nvmlDeviceGetMemoryInfo")
    load = ask("nvmlDeviceGetUtilizationRates")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return GpuReading(
        compute_percent=getattr(load, "gpu", None),
        memory_busy_percent=getattr(load, "memory", None),
        memory_used_bytes=getattr(memory, "used", None),
        memory_total_bytes=getattr(memory, "total", None),
        fan_percent=ask("nvmlDeviceGetFanSpeed"),
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        max_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        power_watts=watts("nvmlDeviceGetPowerUsage"),
        power_limit_watts=watts("nvmlDeviceGetEnforcedPowerLimit"),
        temperature_celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        slowdown_celsius=ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        cap=None if reasons is None else _cap(reasons),
    )


def _cap(reasons: int) -> str:
    """Return what holds the clock back, in llm.c's words but the last one: `power`, `thermal`, `other`, `no`."""
    if reasons & POWER_CAP:
        return "power"
    if reasons & THERMAL_CAP:
        return "thermal"
    return "other" if reasons & ~NO_CAP else "no"


def gpu_line(reading: GpuReading) -> str:
    """Return a reading as a line for the screen, indented as llm.c's; what is not known is left out.

    `compute 99% | memory 105.3 GiB of 139.8 GiB, 41% busy | 1755 of 1980 MHz | 612 of 700 W | 54 of 87 °C | power cap`
    Source: llm.c train_gpt2.cu, end of the training loop, and mfu.h.
    """
    r = reading
    memory = [
        _part("memory {}", r.memory_used_bytes, r.memory_total_bytes, gib),
        _part("{}% busy", r.memory_busy_percent),
    ]
    parts = [
        _part("compute {}%", r.compute_percent),
        ", ".join(filter(None, memory)),
        _part("fan {}%", r.fan_percent),
        _part("{} MHz", r.clock_mhz, r.max_clock_mhz),
        _part("{} W", r.power_watts, r.power_limit_watts, round),
        _part("{} °C", r.temperature_celsius, r.slowdown_celsius),
        _part("{} cap", r.cap),
    ]
    return " " * 18 + " | ".join(filter(None, parts))


def _part(words: str, value: Any, most: Any = None, shown: Callable[[Any], object] = str) -> str:
    """Return the words with `value of most` in them, or the value where most is None; nothing where the value is."""
    if value is None:
        return ""
    return words.format(shown(value) if most is None else f"{shown(value)} of {shown(most)}")


def gpu_numbers(reading: GpuReading) -> dict[str, int | float | str]:
    """Return what is known of a reading, for metrics.jsonl: the fields' names carry the units."""
    return {name: value for name, value in reading._asdict().items() if value is not None}
