"""Peaks against cores x clock, FLOPs and MFU against llm.c's published figures, memory against shapes written out."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.errors import InputError
from llmc_jax.machine import device as hardware
from llmc_jax.machine.device import (
    Storage,
    check_fits,
    chosen_logit_rows,
    estimated_step_bytes,
    flops_per_token,
    largest_that_fits,
    required_memory_bytes,
)
from llmc_jax.machine.gpus import GPUS, card_memory_bytes, peak_flops
from llmc_jax.models.gpt2.tensors import flat_size, num_parameters

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


# 6N + 6LCT at the model's longest sequence, computed outside this project from llm.c's sources
FLOPS_PER_TOKEN = {
    "d6": 196_300_800,
    "d12": 803_478_528,
    "d24": 2_280_222_720,
    "d36": 4_927_656_960,
    "d48": 9_817_977_600,
    "d60": 17_233_344_000,
    "d72": 45_175_345_920,
    "d84": 75_107_575_296,
    "gpt3:c384": 212_815_872,
    "gpt3:c768": 864_820_224,
    "gpt3:c1024": 2_437_509_120,
    "gpt3:c1536": 5_015_218_176,
    "gpt3:c2048": 8_498_896_896,
    "gpt3:c2560": 16_916_674_560,
    "gpt3:c4096": 41_562_193_920,
}


@pytest.mark.parametrize("descriptor", FLOPS_PER_TOKEN)
def test_flops_per_token_is_llmcs(descriptor: str) -> None:
    config = parse_descriptor(descriptor)
    assert flops_per_token(config, config.max_seq_len) == FLOPS_PER_TOKEN[descriptor]


def test_palm_counts_attention_twice() -> None:
    config = parse_descriptor("d12")
    llmc, palm = flops_per_token(config, 512), flops_per_token(config, 512, definition="palm")
    assert palm - llmc == 6 * 12 * 768 * 512
    assert llmc - flops_per_token(config, 0) == 6 * 12 * 768 * 512


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


SMALL = ModelConfig(max_seq_len=64, vocab_size=257, padded_vocab_size=384, num_layers=3, num_heads=4, channels=32)


def activations_of_a_layer(B: int, T: int) -> int:
    """Elements of SMALL's, the T x T matrix left out."""
    C = SMALL.channels
    shapes = [(B, T, C), (B, T, 3 * C), (B, T, C), (B, T, C), (B, T, 4 * C)]
    return sum(math.prod(shape) for shape in shapes)


def test_required_memory_is_the_sum_of_its_tensors() -> None:
    B, T = 2, 16
    without = required_memory_bytes(SMALL, B, T, Storage(attention_weights=False))
    assert without.activations == 4 * (3 * activations_of_a_layer(B, T) + math.prod((B, T, 384)))
    assert without.state == 5 * 4 * flat_size(SMALL)
    summed = required_memory_bytes(SMALL, B, T, Storage(accumulation=2))
    assert summed.state == 6 * 4 * flat_size(SMALL)  # the sum of the micro-batches' gradients
    assert without.total == without.state + without.activations
    with_weights = required_memory_bytes(SMALL, B, T)
    assert with_weights.activations - without.activations == 4 * 3 * math.prod((B, 4, T, T))


@pytest.mark.parametrize(
    ("storage", "bytes_per_parameter"),
    [
        # parameters, m and v, gradient, the step's slices of the weights, and the sum of several gradients
        (Storage(4), 4 + 8 + 4 + 4),
        (Storage(4, master_weights=False), 4 + 8 + 4 + 4),
        (Storage(4, accumulation=3), 4 + 8 + 4 + 4 + 4),
        (Storage(2), (4 + 2) + 8 + 2 + 2),
        (Storage(2, master_weights=False), 2 + 8 + 2 + 2),
        (Storage(2, accumulation=3), (4 + 2) + 8 + 2 + 2 + 4),
    ],
)
def test_state_by_precision(storage: Storage, bytes_per_parameter: int) -> None:
    assert required_memory_bytes(SMALL, 2, 16, storage).state == bytes_per_parameter * flat_size(SMALL)


def test_activations_by_precision_blocks_and_rows_of_logits() -> None:
    B, T, C, L = 2, 16, SMALL.channels, SMALL.num_layers
    row = activations_of_a_layer(B, T)
    logits = B * T * 384

    def needed(**storage: int) -> int:
        return required_memory_bytes(SMALL, B, T, Storage(attention_weights=False, **storage)).activations

    assert needed(bytes_per_value=2) == 2 * (L * row + logits)
    assert needed(logit_rows=8) == 4 * (L * row + 8 * 384)
    assert needed(logit_rows=1000) == needed()  # there are only 32 rows
    # the inputs of the blocks that are kept, and one stretch of blocks with everything
    assert needed(recompute_blocks=1) == 4 * (3 * B * T * C + row + logits)
    assert needed(recompute_blocks=2) == 4 * (2 * B * T * C + 2 * row + logits)
    assert needed(recompute_blocks=3) == needed(recompute_blocks=99) == 4 * (B * T * C + 3 * row + logits)


def test_what_does_not_fit_is_refused_with_what_it_needs() -> None:
    with pytest.raises(InputError) as caught:
        check_fits(parse_descriptor("gpt3:c12288"), 4, 64, available=24 * GIB)
    message = str(caught.value)
    assert "\n" not in message
    needed = 20 * 174_604_836_864 / GIB
    assert f"{needed:,.1f} GiB" in message  # the state alone: 3,252.3 GiB
    assert "this machine has 24.0 GiB" in message
    assert "174,604,836,864 parameters" in message
    assert "; take -e d36, the largest known model that fits" in message and "-b 1" not in message


def test_a_large_batch_is_refused_with_that_advice() -> None:
    config = parse_descriptor("d12")
    with pytest.raises(InputError) as caught:
        check_fits(config, 512, 1024, available=24 * GIB)
    fitting = [
        B
        for B in (256, 128, 64, 32, 16, 8, 4, 2, 1)
        if required_memory_bytes(config, B, 1024, Storage(accumulation=512 // B)).total <= 24 * GIB
    ]
    assert f"; take -b {fitting[0]}: with -d 524288 the updates stay the same" in str(caught.value)
    check_fits(config, fitting[0], 1024, Storage(accumulation=512 // fitting[0]), available=24 * GIB)


@given(st.integers(1, 3000))
def test_divisors(number: int) -> None:
    assert hardware.divisors(number) == [n for n in range(number, 0, -1) if number % n == 0]


def test_where_not_even_one_row_fits_the_length_is_to_blame() -> None:
    with pytest.raises(InputError, match="lower -b or -t, or take"):
        check_fits(ModelConfig(2**17, 257, 384, 4, 4, 64), 1, 2**17, available=24 * GIB)


def test_where_no_known_model_fits_it_says_so() -> None:
    with pytest.raises(InputError, match="take a smaller model than d6"):
        check_fits(parse_descriptor("d12"), 1, 64, available=100 * 2**20)


def test_what_fits_passes() -> None:
    check_fits(parse_descriptor("d12"), 4, 256, available=int(4.5 * GIB))
    config = parse_descriptor("d12")
    need = required_memory_bytes(config, 4, 64).total
    check_fits(config, 4, 64, available=need)
    with pytest.raises(InputError):
        check_fits(config, 4, 64, available=need - 1)


def test_numbers_are_python_ints_of_any_size() -> None:
    need = required_memory_bytes(parse_descriptor("gpt3:c12288"), 10**9, 2048)
    assert type(need.state) is int and type(need.activations) is int
    assert need.activations > 2**64
    assert type(flops_per_token(parse_descriptor("gpt3:c12288"), 2048)) is int


@given(st.integers(0, 4000), st.integers(1, 64), st.sampled_from([64, 1024, 2048]))
def test_largest_that_fits_fits_and_is_largest(gibibytes: int, batch: int, length: int) -> None:
    available = gibibytes * GIB
    known = ["d6", "d12", "d24", "d36", "d48", "d60", "d72", "d84"]
    known += [f"gpt3:c{c}" for c in (384, 768, 1024, 1536, 2048, 2560, 4096, 12288)]

    def fits(name: str) -> bool:
        config = parse_descriptor(name)
        try:
            check_fits(config, batch, min(length, config.max_seq_len), available=available)
        except InputError:
            return False
        return True

    expected = max((n for n in known if fits(n)), key=lambda n: num_parameters(parse_descriptor(n)), default=None)
    assert largest_that_fits(batch, length, available) == expected


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


# ----- rows of logits -----------------------------------------------------------------------------------------------

BF16 = Storage(2, attention_weights=False, sliced_weights=False)  # on a GPU with our kernels


@pytest.mark.parametrize(
    ("batch", "recompute", "rows", "compiled"),
    [
        (64, 0, 0, 28_325_554_264),
        (64, 0, 32_768, 24_986_380_656),
        (64, 0, 8192, 22_513_838_448),
        (64, 1, 0, 23_941_559_384),
        (64, 2, 0, 21_480_456_280),
    ],
)
def test_a_step_takes_no_more_than_estimated(batch: int, recompute: int, rows: int, compiled: int) -> None:
    """compiled: arguments and temporaries of d12 at T=1024 as JAX 0.12.0.1 compiles it for an H200."""
    d12, storage = parse_descriptor("d12"), BF16._replace(logit_rows=rows)
    assert compiled <= estimated_step_bytes(d12, batch, 1024, storage, recompute) <= 1.4 * compiled


@pytest.mark.parametrize(
    ("card", "model", "batch", "recompute", "rows"),
    [
        ("NVIDIA H200", "d12", 64, 0, 0),
        ("NVIDIA H200", "d48", 16, 0, 0),
        ("NVIDIA H200", "d48", 40, 0, 8192),
        ("NVIDIA A100-SXM4-80GB", "d24", 64, 0, 32_768),
        ("NVIDIA A100-SXM4-80GB", "d24", 64, 1, 0),
        ("NVIDIA GeForce RTX 4090", "d12", 64, 1, 16_384),
        ("NVIDIA GeForce RTX 4090", "d12", 4, 0, 0),
        ("NVIDIA GeForce RTX 4090", "d48", 4, 0, 8192),  # which does not fit either: its message is check_fits' affair
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "d12", 4, 0, 8192),  # nothing says how much memory it has
    ],
)
def test_as_many_rows_of_logits_as_a_card_s_memory_has_room_for(
    card: str, model: str, batch: int, recompute: int, rows: int
) -> None:
    memory = card_memory_bytes(card)
    assert chosen_logit_rows(parse_descriptor(model), batch, 1024, BF16, recompute, memory) == rows


@given(st.integers(1, 200), st.integers(0, 2), st.integers(10**9, 10**12), st.integers(10**9, 10**12))
def test_more_memory_never_makes_the_chunks_smaller(batch: int, recompute: int, memory: int, other: int) -> None:
    def rows(memory: int) -> int:
        return chosen_logit_rows(parse_descriptor("d12"), batch, 1024, BF16, recompute, memory) or batch * 1024

    few, many = sorted((memory, other))
    assert rows(few) <= max(rows(many), 8192)
    assert rows(few) >= 8192 or rows(few) == batch * 1024
