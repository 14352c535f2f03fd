"""Peaks against cores x clock, MFU against llm.c's published figures, and what this machine says of itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from llmc_jax.config.model import parse_descriptor
from llmc_jax.machine import device as hardware
from llmc_jax.machine.gpus import GPUS, peak_flops
from llmc_jax.models.gpt2.work import flops_per_token

GIB = 2**30

# CUDA cores and boost clock in MHz, from NVIDIA's product pages: fp32 does 2 operations a core and clock
CORES_AND_CLOCK = {
    "NVIDIA GeForce RTX 3090 Ti": (10752, 1860),
    "NVIDIA GeForce RTX 3090": (10496, 1695),
    "NVIDIA GeForce RTX 3080 Ti": (10240, 1665),
    "NVIDIA GeForce RTX 3080": (8704, 1710),
    "NVIDIA GeForce RTX 3070 Ti": (6144, 1770),
    "NVIDIA GeForce RTX 3070": (5888, 1725),
    "NVIDIA GeForce RTX 3060 Ti": (4864, 1665),
    "NVIDIA GeForce RTX 3060": (3584, 1777),
    "NVIDIA GeForce RTX 4090": (16384, 2520),
    "NVIDIA GeForce RTX 4090 D": (14592, 2520),
    "NVIDIA GeForce RTX 4080 SUPER": (10240, 2550),
    "NVIDIA GeForce RTX 4080": (9728, 2505),
    "NVIDIA GeForce RTX 4070 Ti SUPER": (8448, 2610),
    "NVIDIA GeForce RTX 4070 Ti": (7680, 2610),
    "NVIDIA GeForce RTX 4070 SUPER": (7168, 2475),
    "NVIDIA GeForce RTX 4070": (5888, 2475),
    "NVIDIA GeForce RTX 4060 Ti": (4352, 2535),
    "NVIDIA GeForce RTX 4060": (3072, 2460),
    "NVIDIA GeForce RTX 5090": (21760, 2407),
    "NVIDIA GeForce RTX 5080": (10752, 2617),
    "NVIDIA GeForce RTX 5070 Ti": (8960, 2452),
    "NVIDIA GeForce RTX 5070": (6144, 2512),
    "NVIDIA GeForce RTX 5060 Ti": (4608, 2572),
    "NVIDIA GeForce RTX 5060": (3840, 2497),
}


@pytest.mark.parametrize("name", CORES_AND_CLOCK)
def test_geforce_peaks_are_cores_times_clock(name: str) -> None:
    cores, mhz = CORES_AND_CLOCK[name]
    fp32 = 2 * cores * mhz * 1e6
    assert peak_flops(name, "fp32") == pytest.approx(fp32, rel=0.005)
    assert peak_flops(name, "tf32") == pytest.approx(fp32, rel=0.005)
    # fp32 accumulation: twice the ordinary rate, not four times
    assert peak_flops(name, "bf16") == pytest.approx(2 * fp32, rel=0.005)


@pytest.mark.parametrize(
    ("name", "sms", "mhz", "per_clock"),  # dense bf16 operations per SM and clock: A100 2048, GH100 4096, GA102 1024
    [
        ("NVIDIA A100-SXM4-80GB", 108, 1410, 2048),
        ("NVIDIA A30", 56, 1440, 2048),
        ("NVIDIA H100 80GB HBM3", 132, 1830, 4096),
        ("NVIDIA H200", 132, 1830, 4096),
        ("NVIDIA H100 PCIe", 114, 1620, 4096),
        ("NVIDIA RTX A6000", 84, 1800, 1024),
        ("NVIDIA A40", 84, 1740, 1024),
        ("NVIDIA RTX 6000 Ada Generation", 142, 2505, 1024),
        ("NVIDIA L4", 58, 2040, 1024),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2617, 1024),
    ],
)
def test_data_centre_and_workstation_peaks_are_sms_times_clock(name: str, sms: int, mhz: int, per_clock: int) -> None:
    # data sheets round: the A100's 312 is exact, the L4's 121 stands for 121.2
    assert peak_flops(name, "bf16") == pytest.approx(sms * mhz * 1e6 * per_clock, rel=0.01)


def test_table_is_dense_and_consistent() -> None:
    for name, gpu in GPUS.items():
        if gpu.bf16 is None:
            assert gpu.tf32 is None, name
        else:
            assert gpu.tf32 is not None and gpu.fp16 == gpu.bf16, name
            assert gpu.tf32 == pytest.approx(gpu.bf16 / 2, rel=0.02), name  # a sparse figure would be off by 2
            assert gpu.fp32 <= gpu.tf32 * 1.01, name
        assert 1.98 <= gpu.fp16 / gpu.fp32 < 35, name
        assert 100 <= gpu.bandwidth <= 8000 and 8 <= gpu.memory <= 300, name


def test_peak_needs_the_exact_name_and_a_format_the_hardware_has() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert peak_flops("NVIDIA B200", "bf16") == 2250e12
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("Tesla T4", "fp16") == 65e12
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cpu", ""):
        assert peak_flops(other, "bf16") is None


@pytest.mark.parametrize(
    ("descriptor", "device", "num_devices", "tokens_per_second", "percent"),
    [  # what logs of llm.c print or its scripts state
        ("d12", "NVIDIA H100 80GB HBM3", 8, 524_288 / 0.140, 38),
        ("d48", "NVIDIA H100 80GB HBM3", 8, 381_400, 47.3),
        ("d12", "NVIDIA A100-SXM4-80GB", 8, 524_288 / 0.300, 56),
        ("d12", "NVIDIA A100-SXM4-40GB", 1, 142_800, 36.8),
    ],
)
def test_mfu_of_published_runs(
    descriptor: str, device: str, num_devices: int, tokens_per_second: float, percent: float
) -> None:
    rate = flops_per_token(parse_descriptor(descriptor), 1024) * tokens_per_second
    mfu = hardware.model_flops_utilization(rate, peak_flops(device, "bf16"), num_devices)
    assert mfu is not None and 100 * mfu == pytest.approx(percent, abs=0.5)


def test_mfu_without_a_peak_is_none() -> None:
    assert hardware.model_flops_utilization(1e12, None) is None


def _fake_root(tmp_path: Path, meminfo: str, cgroup: str, limits: dict[str, str]) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(meminfo)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


MEMINFO = "MemTotal:       16384000 kB\nMemFree:         1000 kB\n"


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, 16384000 * 1024),
        ("0::/\n", {}, 16384000 * 1024),
        ("0::/a/b\n", {"memory.max": "max\n", "a/memory.max": "2000000000\n", "a/b/memory.max": "max"}, 2000000000),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "3000000000\n"}, 3000000000),
        ("4:memory:/job\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 16384000 * 1024),
    ],
)  # fmt: skip
def test_host_memory_respects_the_container(tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int) -> None:
    assert hardware.host_memory_bytes(_fake_root(tmp_path, MEMINFO, cgroup, limits)) == expected


def test_this_machine_is_described() -> None:
    device = hardware.describe_device()
    label = hardware.device_label(device)
    assert device.cpu_cores >= 1 and device.num_devices >= 1
    assert device.memory_bytes is None or device.memory_bytes > 2**28
    assert device.kind in label and "\n" not in label


def test_labels() -> None:
    gpu = hardware.Device("gpu", "NVIDIA H200", 8, 105 * GIB, 16, "Linux")
    assert hardware.device_label(gpu) == "1 of 8 x NVIDIA H200, 105.0 GiB"
    cpu = hardware.Device("cpu", "AMD EPYC 7B13", 1, None, 1, "Linux")
    assert hardware.device_label(cpu) == "CPU: AMD EPYC 7B13, 1 core"


def test_importing_the_four_modules_does_not_import_jax_or_pyplot() -> None:
    code = (
        "import sys, llmc_jax.machine.device, llmc_jax.run.folder, llmc_jax.run.console, llmc_jax.run.curves; "
        "print([m for m in ('jax', 'matplotlib') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


CACHES = {  # what Linux says of two cores: index, (level, type, size, shared by)
    0: {0: ("1", "Data", "48K", "0"), 1: ("1", "Instruction", "32K", "0"), 2: ("2", "Unified", "1024K", "0"),
        3: ("3", "Unified", "32M", "0-1")},
    1: {0: ("1", "Data", "48K", "1"), 1: ("1", "Instruction", "32K", "1"), 2: ("2", "Unified", "1024K", "1"),
        3: ("3", "Unified", "32M", "0-1")},
}  # fmt: skip


@pytest.fixture
def cached_root(tmp_path: Path) -> Path:
    for core, caches in CACHES.items():
        for index, facts in caches.items():
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in zip(("level", "type", "size", "shared_cpu_list"), facts, strict=True):
                (folder / name).write_text(f"{text}\n")
    return tmp_path


def test_a_cache_that_cores_share_counts_once(cached_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert hardware.cache_bytes([0], cached_root) == (48 + 1024 + 32 * 1024) * 1024
    assert hardware.cache_bytes([0, 1], cached_root) == (2 * 48 + 2 * 1024 + 32 * 1024) * 1024
    assert hardware.cache_bytes([7], cached_root) == hardware.UNKNOWN_CACHE


@pytest.mark.parametrize(("said", "expected"), [("8388608\n", 8 << 20), ("", hardware.UNKNOWN_CACHE)])
def test_caches_of_a_mac(said: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("subprocess.run", lambda command, **_: subprocess.CompletedProcess(command, 0, stdout=said))
    assert hardware.cache_bytes() == expected
