"""-lg with a stand-in for NVML: which GPU is asked, what is shown and logged, and what happens where one is missing."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.machine import nvml as gpu_info
from llmc_jax.machine.nvml import GpuReading, gpu_line, gpu_numbers, open_monitor

GIB = 2**30
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND_FUNCTION, LOST, NO_LIBRARY = 3, 4, 13, 15, 12  # NVML's own numbers


class FakeNvml:
    """The part of pynvml that is used. answers: by function, a value or an NVMLError to raise."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            self.value = value

        def __str__(self) -> str:
            return {LOST: "GPU is lost", NO_LIBRARY: "NVML Shared Library Not Found"}.get(self.value, "?")

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 4, 13
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1, 0, 1

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetHandleByPciBusId": "handle",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=105 * GIB, total=140 * GIB, free=35 * GIB),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=99, memory=41),
            "nvmlDeviceGetPowerUsage": 612_345,  # mW
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetFanSpeed": 30,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetTemperature": 54,
            "nvmlDeviceGetTemperatureThreshold": 87,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)
        answer = self.answers[name]

        def function(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            if isinstance(answer, FakeNvml.NVMLError):
                raise answer
            return answer

        return function


FULL = GpuReading(99, 41, 105 * GIB, 140 * GIB, 30, 1755, 1980, 612.345, 700.0, 54, 87, "power")


def jax_device(ordinal: int = 0, platform: str = "gpu", version: str = "cuda 12090") -> Any:
    return SimpleNamespace(
        platform=platform, local_hardware_id=ordinal, client=SimpleNamespace(platform_version=version)
    )


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    cards = [SimpleNamespace(pci=f"0000:0{ordinal}:00.0") for ordinal in range(4)]
    monkeypatch.setattr(gpu_info, "seen_cards", lambda: cards)
    return fake


def no_warning(text: str) -> None:
    raise AssertionError(text)


# ----- a reading ----------------------------------------------------------------------------------------------------


def test_reading_line_and_numbers(nvml: FakeNvml) -> None:
    """Of the GPU at its place: the multiprocessors' clock and the chip's temperature. It may be closed twice."""
    monitor = open_monitor(jax_device(ordinal=3))
    reading = monitor.read(no_warning)
    assert reading == FULL
    assert gpu_line(FULL) == (
        "                  compute 99% | memory 105.0 GiB of 140.0 GiB, 41% busy | fan 30% | 1755 of 1980 MHz | "
        "612 of 700 W | 54 of 87 °C | power cap"
    )
    assert gpu_numbers(FULL) == FULL._asdict()
    zero = gpu_line(FULL._replace(compute_percent=0, memory_busy_percent=0, fan_percent=0))
    assert "compute 0% | memory 105.0 GiB of 140.0 GiB, 0% busy | fan 0% |" in zero
    asked = {("nvmlDeviceGetHandleByPciBusId", b"0000:03:00.0")} | {
        (f"nvmlDeviceGet{name}", "handle", which)
        for name, which in (("ClockInfo", 1), ("MaxClockInfo", 1), ("Temperature", 0), ("TemperatureThreshold", 1))
    }
    assert asked <= set(nvml.asked)
    monitor.close()
    assert nvml.asked[-1] == ("nvmlShutdown",)
    nvml.answers["nvmlShutdown"] = FakeNvml.NVMLError(1)  # uninitialised
    monitor.close()


@pytest.mark.parametrize("number", [NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND_FUNCTION])
def test_what_a_card_does_not_say_is_left_out(nvml: FakeNvml, number: int) -> None:
    """A card without fans, in a driver without reasons, and a slice whose load nobody counts."""
    names = ("FanSpeed", "UtilizationRates", "CurrentClocksThrottleReasons", "EnforcedPowerLimit")
    nvml.answers |= {f"nvmlDeviceGet{name}": FakeNvml.NVMLError(number) for name in names}
    reading = open_monitor(jax_device()).read(no_warning)
    assert reading is not None and reading == FULL._replace(
        fan_percent=None, compute_percent=None, memory_busy_percent=None, cap=None, power_limit_watts=None
    )
    assert gpu_line(reading).strip() == "memory 105.0 GiB of 140.0 GiB | 1755 of 1980 MHz | 612 W | 54 of 87 °C"
    assert set(gpu_numbers(reading)) == {name for name, value in reading._asdict().items() if value is not None}


@pytest.mark.parametrize(
    ("reasons", "cap"),
    [(0, "no"), (0x1, "no"), (0x2, "no"), (0x4, "power"), (0x80, "power"), (0x20, "thermal"), (0x40, "thermal"),
     (0x24, "power"), (0x8, "other"), (0x10 | 0x1, "other")],
)  # fmt: skip
def test_caps(nvml: FakeNvml, reasons: int, cap: str) -> None:
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = reasons
    reading = open_monitor(jax_device()).read(no_warning)
    assert reading is not None
    assert reading.cap == cap


def test_a_reading_that_fails_later_warns_once(nvml: FakeNvml) -> None:
    monitor, warnings = open_monitor(jax_device()), []
    good = nvml.answers["nvmlDeviceGetMemoryInfo"]
    nvml.answers["nvmlDeviceGetMemoryInfo"] = FakeNvml.NVMLError(LOST)
    assert monitor.read(warnings.append) is None
    assert monitor.read(warnings.append) is None
    assert len(warnings) == 1
    assert warnings[0].startswith("-lg: ")
    assert "GPU is lost" in warnings[0]
    nvml.answers["nvmlDeviceGetMemoryInfo"] = good
    assert monitor.read(no_warning) == FULL


def test_a_driver_that_does_not_say_which_gpu_it_is(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_info, "seen_cards", list)
    with pytest.raises(InputError, match=r"-lg: the CUDA driver does not say .*leave -lg out"):
        open_monitor(jax_device())


# ----- nothing to read ----------------------------------------------------------------------------------------------


def test_where_there_is_nothing_to_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVIDIA GPU (None: this test's own, which runs on the CPU), NVML that does not work, no package."""
    for device in (None, jax_device(platform="cpu"), jax_device(version="rocm 60300")):
        with pytest.raises(InputError, match=r"^-lg: there is no NVIDIA GPU here"):
            open_monitor(device)
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetHandleByPciBusId", "nvmlInit"):
        nvml.answers[function] = FakeNvml.NVMLError(NO_LIBRARY)
        with pytest.raises(InputError, match=r"-lg: .*NVML Shared Library Not Found"):
            open_monitor(jax_device())
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    with pytest.raises(InputError, match=r"-lg: needs the package nvidia-ml-py"):
        open_monitor(jax_device())


def test_the_package_has_what_is_used() -> None:
    """Every name of the stand-in is one of nvidia-ml-py's, with the same number."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py, which the extras cuda12 and cuda13 bring, is not here")
    assert [name for name in FakeNvml().answers if not callable(getattr(pynvml, name, None))] == []
    for name in [name for name in vars(FakeNvml) if name.startswith("NVML_")]:
        assert getattr(pynvml, name) == getattr(FakeNvml, name)
    assert (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND) == (LOST, NO_LIBRARY)
    assert pynvml.nvmlClocksThrottleReasonSwPowerCap | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown == (
        gpu_info.POWER_CAP
    )
    assert (
        pynvml.nvmlClocksThrottleReasonSwThermalSlowdown | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        == gpu_info.THERMAL_CAP
    )
    assert pynvml.NVMLError(LOST).value == LOST
