"""The table of peaks, MFU against llm.c's published figures, and what this machine says of itself."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import jax
import pytest

from llmc_jax.config.model import parse_descriptor
from llmc_jax.machine import device as hardware
from llmc_jax.machine.device import VARIABLES, environment, git_state
from llmc_jax.machine.gpus import GPUS, peak_flops
from llmc_jax.models.work import flops_per_token

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]


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
    peak = peak_flops(device, "bf16")
    assert peak is not None and 100 * rate / (num_devices * peak) == pytest.approx(percent, abs=0.5)


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, 16_000_000_000),
        ("0::/\n", {}, 16_000_000_000),
        ("0::/a/b\n", {"memory.max": "max\n", "a/memory.max": "2000000000\n", "a/b/memory.max": "max"}, 2_000_000_000),
        ("1:name=systemd:/\n0::/a\n", {"a/memory.max": "3000000000\n"}, 3_000_000_000),
    ],
)
def test_host_memory_respects_the_container(
    cgroup: str, limits: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"../../../proc/self/cgroup": cgroup, **limits}.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=16_000_000_000))
    assert hardware.host_memory_bytes(tmp_path) == expected


def test_machines_are_described() -> None:
    device = hardware.describe_device()
    label = hardware.device_label(device)
    assert device.cpu_cores >= 1 and device.num_devices >= 1
    assert device.memory_bytes is None or device.memory_bytes > 2**28
    assert device.kind in label and "\n" not in label
    gpu = hardware.Device("gpu", "NVIDIA H200", 8, 105 * GIB, 16, "Linux")
    assert hardware.device_label(gpu) == "1 of 8 x NVIDIA H200, 105.0 GiB"
    cpu = hardware.Device("cpu", "AMD EPYC 7B13", 1, None, 1, "Linux")
    assert hardware.device_label(cpu) == "CPU: AMD EPYC 7B13, 1 core"


def test_a_platform_that_is_not_here_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a machine that has them
    code = "import sys; from llmc_jax.base.kit import exit_status; from llmc_jax.machine import device\n"
    code += "ask = (device.first_device, device.describe_device, lambda: device.devices_of(1))\n"
    code += "print([int(exit_status('program', each)) for each in ask])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "[2, 2, 2]\n", done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and all(line.startswith("program: JAX_PLATFORMS=cuda: ") for line in lines)


def test_an_error_of_jax_where_no_platform_was_asked_for_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> NoReturn:
        raise RuntimeError("lost")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(RuntimeError, match="lost"):
        hardware.all_devices()


# ----- the source and the environment ---------------------------------------------------------------------------------


def test_git_state_tells_the_commit_and_changes(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "modified": False}
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state is not None and state["modified"]


def test_of_the_environment_only_named_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other is: some hold credentials, and so may an address."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("JAX_TOKEN", "secret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=s3://me:secret@secret@host/x --a=b")
    found = environment()
    assert found.keys() == {"XLA_FLAGS"} and "secret" not in str(found) and found["XLA_FLAGS"].endswith("@host/x --a=b")
    assert not any(word in name for name in VARIABLES for word in ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"))
