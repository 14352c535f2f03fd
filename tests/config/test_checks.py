"""Settings together: contradictions, what is not built, what is noted, what does not fit the model."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.config.checks import check_model_fit, validate, with_devices
from llmc_jax.config.model import ModelConfig, divisors, parse_descriptor
from llmc_jax.config.train import AUTO_BATCH, TrainConfig


def problems_of(**changes: Any) -> list[str]:
    """What validate refuses, a line each."""
    with pytest.raises(InputError) as caught:
        validate(TrainConfig(**changes))
    return [line.strip() for line in str(caught.value).split("\n") if not line.endswith("problems:")]


def test_all_problems_come_at_once() -> None:
    problems = problems_of(zero_stage=3, total_batch_size=5000, skip_loss_z=1)
    assert [problem.split(":")[0] for problem in problems] == ["-d 5000", "-z 3"]


@pytest.mark.parametrize(
    ("changes", "flag", "named"),
    [
        ({"dtype": "fp16", "rounding": "stochastic"}, "--rounding stochastic", "--dtype fp16"),  # noise for bf16's bits
        ({"num_processes": 2, "process_rank": 2}, "-pr 2", "-pn 2"),
        ({"num_processes": 4, "devices": 6}, "--devices 6", "-pn 4"),
        ({"schedule": "step", "step_every": 0}, "--step-every 0", "-k constant"),
        ({"gelu_fusion": 0, "products": "pallas"}, "-ge 0", "--products pallas"),
        ({"gelu_fusion": 2, "products": "xla"}, "-ge 2", "--products xla"),
        ({"patience": 3, "val_every": 0}, "--patience 3", "-v 0"),
        ({"zero_stage": 3}, "-z 3", "not built yet; it would split the weights over the devices too. To continue, "),
    ],
)
def test_contradictions_are_refused_with_a_way_on(changes: dict[str, Any], flag: str, named: str) -> None:
    (problem,) = problems_of(**changes)
    assert problem.startswith(f"{flag}: ") and named in problem


def test_fit_of_rows_and_samples_to_the_model() -> None:
    model = ModelConfig(64, 257, 384, 2, 2, 64)
    config = TrainConfig(sequence_length=64, sample_tokens=64)
    assert check_model_fit(config, model) == []
    (note,) = check_model_fit(replace(config, sequence_length=32), model)
    assert "from 32 on do not train" in note
    with pytest.raises(InputError, match=r"^-t 65: the model knows 64 positions"):
        check_model_fit(replace(config, sequence_length=65), model)
    with pytest.raises(InputError, match=r"^-g 65: the model knows 64 positions"):
        check_model_fit(replace(config, sample_tokens=65), model)
    assert check_model_fit(replace(config, sample_tokens=65, sample_every=0), model) == []
    assert check_model_fit(TrainConfig(), parse_descriptor("d12")) == []


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"reuse": True}, "-y 1 without -o"),
        ({"warmup_steps": 6, "max_steps": 5}, "-u 6"),
        ({"dtype": "bf16", "master_weights": False, "rounding": "nearest"}, "--rounding nearest"),
        ({"dtype": "fp16", "master_weights": False}, "-w 0"),
        ({"save": False, "checkpoint_every": 5, "max_steps": 0, "export_llmc": True}, "--no-save"),
        ({"save": False, "reuse": True, "output_dir": "log"}, "--no-save"),
        ({"batch_order": "llmc", "reduction": "fixed"}, "--batch-order llmc"),
        ({"patience": 3}, "--patience 3"),  # no state of the best validation is saved
        ({"patience": 3, "checkpoint_every": 15}, "--patience 3"),
    ],
)
def test_what_does_not_do_what_it_seems_to_is_noted(changes: dict[str, Any], flags: str) -> None:
    (note,) = validate(TrainConfig(**changes))
    assert note.startswith(f"{flags}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"master_weights": False, "rounding": "stochastic"},
        {"gelu_fusion": 1, "recompute_blocks": 2},
        {"gelu_fusion": 2, "recompute": 2},
        {"reuse": True, "output_dir": "log", "keep_checkpoints": 5, "major_every": 50000},
        {"max_steps": 0, "val_every": 0, "sample_every": 0, "checkpoint_every": 0, "print_every": 0},
        {"schedule": "cosine", "warmup_steps": 5, "max_steps": 5, "skip_loss_z": 7.0, "skip_norm_z": 6.5},
        {"warmup_steps": 5, "max_steps": 0},
        {"dtype": "bf16", "master_weights": False},
        {"dtype": "bf16", "rounding": "stochastic"},
        {"dtype": "fp16", "rounding": "nearest"},
        {"num_processes": 2, "process_rank": 1, "init_method": "tcp", "server_ip": "node1:4000", "devices": 4},
        {"num_processes": 2, "process_rank": 0, "init_method": "fs", "fs_path": "/shared", "peer_timeout": 9},
    ],
)
def test_what_does_is_not_noted(changes: dict[str, Any]) -> None:
    assert validate(TrainConfig(**changes)) == []


# ----- several devices ----------------------------------------------------------------------------------------------

UNIT = 4 * 1024  # tokens of a micro-batch of one device, by the defaults


@pytest.mark.parametrize(
    ("asked", "available", "platform", "processes", "devices"),
    [(0, 8, "gpu", 1, 8), (0, 1, "gpu", 1, 1), (0, 8, "cpu", 1, 1), (3, 8, "gpu", 1, 3), (4, 4, "cpu", 1, 4),
     (0, 4, "gpu", 2, 8), (0, 4, "cpu", 2, 2), (6, 4, "gpu", 2, 6), (8, 4, "cpu", 2, 8)],
)  # fmt: skip
def test_devices_that_a_run_takes(asked: int, available: int, platform: str, processes: int, devices: int) -> None:
    config = with_devices(TrainConfig(devices=asked), available, platform, processes)
    assert config == TrainConfig(devices=devices)
    assert (config.tokens_per_step, config.grad_accumulation, config.micro_batches) == (devices * UNIT, 1, devices)


@pytest.mark.parametrize(
    ("asked", "platform", "processes", "words"),
    [
        (5, "gpu", 1, "this machine has 4; take --devices 4 or fewer"),
        (5, "cpu", 1, "XLA_FLAGS allows 4 on this CPU; take --devices 4 or fewer"),
        (9, "gpu", 2, "this machine has 4 for each of 2 processes, 8 in all; take --devices 8 or fewer"),
        (5, "gpu", 2, "2 processes cannot share them evenly; take --devices 4 or --devices 6"),
        (1, "gpu", 2, "2 processes cannot share them evenly; take --devices 2"),
    ],
)
def test_devices_that_a_run_cannot_take(asked: int, platform: str, processes: int, words: str) -> None:
    with pytest.raises(InputError) as caught:
        with_devices(TrainConfig(devices=asked), 4, platform, processes)
    assert str(caught.value) == f"--devices {asked}: {words}"


@given(st.integers(1, 3000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [n for n in range(number, 0, -1) if number % n == 0]


@pytest.mark.parametrize(
    ("devices", "total", "advice"),
    [(1, 5000, "-d 4096 or -d 8192"), (1, 256, "-d 4096, or a smaller -b or -t"),
     (8, 4 * UNIT, "-d 32768, or fewer --devices"), (8, 9 * UNIT + 1, "-d 32768 or -d 65536, or fewer --devices")],
)  # fmt: skip
def test_the_total_batch_is_a_multiple_of_what_is_taken_at_once(devices: int, total: int, advice: str) -> None:
    """Whether --devices names the number or the machine has it."""
    with pytest.raises(InputError, match=rf"^-d {total}: .* {devices * UNIT} .*take {advice}"):
        validate(TrainConfig(devices=devices, total_batch_size=total))
    with pytest.raises(InputError, match=rf"^-d {total}: .* {devices * UNIT} .*take {advice}"):
        with_devices(TrainConfig(total_batch_size=total), devices, "gpu")


def test_a_resume_keeps_its_total_batch() -> None:
    with pytest.raises(InputError, match=r"; take fewer --devices$"):
        with_devices(TrainConfig(total_batch_size=4 * UNIT, reuse=True, output_dir="run"), 8, "gpu")


@pytest.mark.parametrize(
    ("devices", "micro_batches", "stage", "flags"),
    [
        (1, 1, 0, None), (1, 6, 1, None), (2, 6, 1, None), (2, 12, 0, None), (4, 12, 1, None), (8, 8, 2, None),
        (4, 16, 2, None), (1, 6, 2, "-z 2"),
        (3, 6, 0, "--devices"), (6, 6, 1, "--devices"), (4, 12, 2, "-z 2"), (2, 6, 2, "-z 2"),
    ],
)  # fmt: skip
def test_sums_in_a_fixed_order(devices: int, micro_batches: int, stage: int, flags: str | None) -> None:
    changes = {"devices": devices, "zero_stage": stage, "total_batch_size": micro_batches * UNIT}
    assert validate(TrainConfig(**changes)) == []
    if flags is None:
        assert validate(TrainConfig(reduction="fixed", **changes)) == []
    else:
        (problem,) = problems_of(reduction="fixed", **changes)
        assert problem.startswith("--reduction fixed: ") and flags in problem and str(micro_batches) in problem


def test_the_machine_s_devices_are_looked_at_too() -> None:
    """With --devices 0 their number is known late."""
    config = TrainConfig(reduction="fixed", total_batch_size=12 * UNIT)
    assert with_devices(config, 4, "gpu").micro_batches == 12
    for available in (3, 6):
        with pytest.raises(InputError, match=r"^--reduction fixed: "):
            with_devices(config, available, "gpu")


# ----- -b auto --------------------------------------------------------------------------------------------------------


def test_auto_is_checked_as_every_batch_would_be() -> None:
    config = TrainConfig(batch_size=AUTO_BATCH, sequence_length=64, total_batch_size=12 * 64, devices=4)
    assert validate(config) == [] and with_devices(config, 4, "gpu") == config
    assert (config.micro_batches, config.tokens_per_step) == (12, 768)
    (problem,) = problems_of(batch_size=AUTO_BATCH, sequence_length=64, total_batch_size=13 * 64, devices=4)
    assert problem.startswith("-d 832: ") and "-b auto" in problem
    fixed = replace(config, reduction="fixed", zero_stage=2)
    assert validate(fixed) == []
