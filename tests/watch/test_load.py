"""How busy the machine is, and that what cannot be read is left out."""

import os
import sys
from typing import Any

import pytest

from llmc_jax.watch.view import Machine


class Lost(Exception):
    value = 15  # the GPU has fallen off the bus: none of the errors that stand for a missing figure


class Nvml:
    """An NVML with two GPUs. Of the first one it tells the load, of the second one nothing."""

    NVMLError = Lost
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 4, 13
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1, 0, 1

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def nvmlInit(self) -> None:
        if self.broken:
            raise Lost

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, index: int) -> Any:
        if index == 1:
            raise Lost
        return type("Rates", (), {"gpu": 87, "memory": 40})

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_the_processors_the_memory_and_a_process() -> None:
    found = Machine(with_gpus=False).read(os.getpid())
    assert 0 <= found.cpu_percent <= 100 and 0 < found.memory_used < found.memory_total
    assert found.process_memory is not None and 0 < found.process_memory < found.memory_total
    assert found.gpus == ()


@pytest.mark.parametrize("pid", [None, 2**31 - 2, 10**30, -1])
def test_a_process_that_is_not_there_has_no_memory(pid: int | None) -> None:
    assert Machine(with_gpus=False).read(pid).process_memory is None


def test_gpus_that_answer_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    (found,) = Machine(with_gpus=True).read(None).gpus
    assert found.compute_percent == 87 and found.power_watts is None


def test_without_nvml_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (None, Nvml(broken=True)):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert Machine(with_gpus=True).read(None).gpus == ()
