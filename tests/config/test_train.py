"""TrainConfig: llm.c's defaults, ranges, JSON."""

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import RATES, SLICE, Option, value_problem
from llmc_jax.config.checks import validate
from llmc_jax.config.train import OPTIMIZERS, OPTIONS, TrainConfig

# Flags, names and defaults of train_gpt2.cu's main(), written down from its source.
LLMC = {
    "-i": ("train_data", "dev/data/tinyshakespeare/tiny_shakespeare_train.bin"),
    "-j": ("val_data", "dev/data/tinyshakespeare/tiny_shakespeare_val.bin"),
    "-e": ("model", "gpt2_124M_bf16.bin"),
    "-o": ("output_dir", ""),
    "-lg": ("gpu_info_every", -1),
    "-n": ("checkpoint_every", 0),
    "-nk": ("keep_checkpoints", 0),
    "-nm": ("major_every", 0),
    "-y": ("reuse", False),
    "-b": ("batch_size", 4),
    "-t": ("sequence_length", 1024),
    "-d": ("total_batch_size", -1),
    "-x": ("max_steps", -1),
    "-k": ("schedule", "cosine"),
    "-l": ("learning_rate", 3e-4),
    "-u": ("warmup_steps", 0),
    "-q": ("final_lr_fraction", 1.0),
    "-c": ("weight_decay", 0.0),
    "-sl": ("skip_loss_z", 0.0),
    "-sg": ("skip_norm_z", 0.0),
    "-v": ("val_every", 20),
    "-m": ("val_batches", 20),
    "-s": ("sample_every", 20),
    "-g": ("sample_tokens", 64),
    "-h": ("hellaswag", False),
    "-a": ("overfit", False),
    "-f": ("tf32", True),
    "-w": ("master_weights", True),
    "-ge": ("gelu_fusion", -1),
    "-z": ("zero_stage", 0),
    "-r": ("recompute", 1),
    "-pn": ("num_processes", 0),  # llm.c: 1; 0 is that, too, where no launcher says another number
    "-pr": ("process_rank", -1),  # llm.c: 0, whatever a launcher says
    "-pg": ("gpus_per_node", 8),
    "-pi": ("init_method", "mpi"),
    "-pm": ("init_method", "mpi"),
    "-ps": ("server_ip", ""),
    "-pf": ("fs_path", ""),
    "-pp": ("fs_path", ""),
}
BY_NAME = {about.name: about for about in OPTIONS}
slices = st.tuples(st.integers(0, 999), st.integers(1, 999)).map(lambda pair: f"{pair[0]}:{sum(pair)}")


def valid_values(about: Option) -> st.SearchStrategy:
    """Values that this option may have on its own."""
    if about.choices:
        return st.sampled_from(about.choices)
    if about.check is SLICE:
        return st.sampled_from(["", "00:007"]) | slices
    if about.name == "optimizer":
        return st.sampled_from([*OPTIMIZERS, "own.py"])
    if about.check is RATES:
        return st.sampled_from(["1e-6:1", "0.001:0.1", "1e-12:1000"])
    kinds: dict[type, st.SearchStrategy] = {
        bool: st.booleans(),
        int: st.integers(-1, 2**31 - 1) | st.integers(10, 999),
        float: st.floats(0, 1e6) | st.floats(0, 1),
        str: st.text(st.characters(blacklist_categories=["Cs"])),
    }
    return kinds[about.type].filter(lambda value: value_problem(about, value) is None)


configs = st.builds(
    TrainConfig, **{about.name: valid_values(about) for about in OPTIONS if about.name not in ("preset", "save")}
)


def test_every_llmc_flag_has_its_name_and_default() -> None:
    found = {
        flag: (about.name, about.default) for about in OPTIONS for flag in about.flags if len(flag.lstrip("-")) < 3
    }
    assert found == LLMC


def test_what_llmc_holds_fixed_is_the_default() -> None:
    """AdamW's numbers, the clipping, the data order and its seed."""
    fixed = TrainConfig(beta1=0.9, beta2=0.95, eps=1e-8, grad_clip=1.0, decay="matrices", shuffle="llmc", seed=42)
    assert fixed == TrainConfig()


def test_every_flag_stands_once_and_has_a_readable_name() -> None:
    flags = [flag for about in OPTIONS for flag in about.flags]
    assert len(set(flags)) == len(flags)
    for about in OPTIONS:
        assert sum(flag.startswith("--") and len(flag) > 4 for flag in about.flags) == 1, about.name
        assert about.meaning and about.group


def test_defaults_and_every_choice_are_valid() -> None:
    for about in OPTIONS:
        assert value_problem(about, about.default) is None, about.name
        assert isinstance(about.default, about.type), about.name
        for choice in about.choices:
            assert value_problem(about, choice) is None, (about.name, choice)
    assert validate(TrainConfig()) == []


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("batch_size", [1, 512], [0, -2]),
        ("max_steps", [-1, 0, 1, 2**31 - 1], [-2, 2**31]),
        ("val_batches", [-1, 1], [0, -2]),
        ("val_every", [0, 7], [-1]),
        ("learning_rate", [0, 0.0, 3e-4, 1], [-1e-9, math.nan, math.inf]),
        ("final_lr_fraction", [0.0, 1.0], [-0.1, 1.1]),
        ("beta2", [0.0, 0.999], [1.0, -0.1]),
        ("eps", [1e-30], [0.0]),
        ("step_factor", [0.5, 1.0], [0.0, 1.5]),
        ("recompute", [0, 1, 2], [3, -1]),
        ("train_data", ["stdlib", "a*.bin"], [""]),
        ("overfit", [True, False], [2, "yes", 1]),
        ("model", ["d12"], [12, None]),
        ("dtype", ["auto", "fp32", "bf16", "fp16"], ["fp8", "", 16]),
        ("loss_scale_factor", [1.0, 2.0], [0.5, 0.0, True]),
        ("logit_rows", [-1, 0, 1], [-2, True]),
        ("profile", ["", "0:1", "10:15"], ["5", "5:5", "15:10", "a:b", "-1:3", "1:2:3"]),
    ],
)
def test_ranges(name: str, allowed: list, refused: list) -> None:
    for value in allowed:
        assert value_problem(BY_NAME[name], value) is None, value
        assert isinstance(validate(replace(TrainConfig(), **{name: value})), list)
    for value in refused:
        with pytest.raises(InputError, match=BY_NAME[name].flags[0]):
            validate(replace(TrainConfig(), **{name: value}))


def test_out_of_range_values_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        validate(TrainConfig(batch_size=0, learning_rate=-1.0, schedule="cosin"))
    head, *problems = str(caught.value).split("\n")
    assert head == "3 problems:"
    assert [problem.split(":")[0].strip() for problem in problems] == ["-b 0", "-k cosin", "-l -1"]


def test_tokens_and_micro_batches_of_a_step() -> None:
    config = TrainConfig(batch_size=4, sequence_length=64)
    assert (config.tokens_per_step, config.grad_accumulation) == (256, 1)
    config = replace(config, total_batch_size=1024)
    assert (config.tokens_per_step, config.grad_accumulation) == (1024, 4)
    config = replace(config, devices=2)
    assert (config.tokens_per_step, config.grad_accumulation, config.micro_batches) == (1024, 2, 4)
    config = replace(config, total_batch_size=-1)
    assert (config.tokens_per_step, config.grad_accumulation, config.micro_batches) == (512, 1, 2)


def test_json_holds_every_field_and_missing_ones_are_defaults() -> None:
    assert list(TrainConfig().to_json()) == [each.name for each in fields(TrainConfig)]
    assert TrainConfig.from_json({}) == TrainConfig()
    learning_rate = TrainConfig.from_json({"learning_rate": 1}).learning_rate
    assert learning_rate == 1.0 and isinstance(learning_rate, float)


def test_json_with_unknown_or_wrong_fields_is_refused_as_a_whole() -> None:
    with pytest.raises(InputError) as caught:
        TrainConfig.from_json({"batchsize": 4, "batch_size": "4", "learning_rate": None, "seed": 1})
    lines = str(caught.value).split("\n")
    assert lines[0] == "3 problems:"
    assert "'batchsize'" in lines[1] and "batch_size is '4'" in lines[2] and "learning_rate is None" in lines[3]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.filter_too_much])  # one field's odd value rejects a whole example
@given(configs)
def test_any_configuration_passes_through_json_and_is_accepted_or_refused(config: TrainConfig) -> None:
    """One draw for both: to draw 50 options a hundred times takes most of the time."""
    text = json.dumps(config.to_json(), allow_nan=False)
    assert TrainConfig.from_json(json.loads(text)) == config
    try:
        notes = validate(config)
    except InputError:
        return
    assert all(isinstance(note, str) for note in notes)
    assert config.tokens_per_step == config.grad_accumulation * config.batch_size * config.sequence_length
