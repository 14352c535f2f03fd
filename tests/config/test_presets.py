"""Presets: valid, fitting their models, and equal to the launches of llm.c that they name."""

import shlex
from dataclasses import replace

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.config.checks import check_model_fit, validate
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.presets import PRESETS
from llmc_jax.config.train import TrainConfig

# The flags of llm.c's scripts/run_gpt2_*.sh, less -o, -y 1 (a folder of its own) and -ge 1 (kernels of Hopper alone).
LAUNCHES = {
    "gpt2-124M": "-i 'dev/data/fineweb10B/fineweb_train_*.bin' -j 'dev/data/fineweb10B/fineweb_val_*.bin' "
    "-h 1 -v 250 -s 20000 -g 144 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -e d12",
    "gpt2-350M": "-i 'dev/data/fineweb100B/fineweb_train_*.bin' -j 'dev/data/fineweb100B/fineweb_val_*.bin' "
    "-h 1 -v 250 -s 100000 -g 144 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0003 -q 0.0 -u 700 -n 2000 -x 60000 "
    "-e d24",
    "gpt2-774M": "-i 'dev/data/fineweb100B/fineweb_train_*.bin' -j 'dev/data/fineweb100B/fineweb_val_*.bin' "
    "-h 1 -v 250 -s 300000 -g 144 -b 32 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.00025 -q 0.0 -u 700 -n 4000 "
    "-x 286102 -e d36",
    "gpt2-1558M": "-i 'dev/data/edu_fineweb100B/edu_fineweb_train_*.bin' "
    "-j 'dev/data/edu_fineweb100B/edu_fineweb_val_*.bin' -h 1 -v 250 -s 300000 -g 384 -b 16 -t 1024 -d 1048576 -r 0 "
    "-z 1 -c 0.1 -k cosine -l 0.0006 -q 0.1 -u 700 -n 2000 -x 32000 -e d48",
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_changes_defaults_is_valid_and_fits_its_model(name: str) -> None:
    config = parse_args(["--preset", name])
    assert config.preset == name
    assert validate(config) == []
    model = "d12" if config.model.endswith(".bin") else config.model
    check_model_fit(config, parse_descriptor(model))
    assert "\n" not in PRESETS[name].description


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_preset_is_the_launch_that_it_names(name: str) -> None:
    launch = parse_args(shlex.split(LAUNCHES[name]))
    assert parse_args(["--preset", name]) == replace(launch, preset=name, batch_order="llmc")  # whose only order it is


def test_llmcs_early_trainers() -> None:
    """Numbers in the source of train_gpt2.c and train_gpt2_fp32.cu."""
    early = TrainConfig(
        model="gpt2_124M.bin", beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, grad_clip=0.0, decay="all",
        schedule="constant", devices=1,
    )  # fmt: skip
    c_trainer = replace(
        early, preset="llmc-cpu", batch_size=4, sequence_length=64, learning_rate=1e-4, max_steps=41, val_every=10,
        val_batches=5, sample_every=20, sample_tokens=64, sampling="train_gpt2.c", shuffle="llmc", seed=42,
    )  # fmt: skip
    fp32_trainer = replace(
        early, preset="llmc-fp32", batch_size=4, sequence_length=1024, learning_rate=3e-4, val_every=20,
        val_batches=20, sample_every=20, sample_tokens=64, sampling="train_gpt2_fp32.cu", shuffle="llmc", max_steps=-1,
    )  # fmt: skip
    assert parse_args(["--preset", "llmc-cpu"]) == c_trainer
    assert parse_args(["--preset", "llmc-fp32"]) == fp32_trainer


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"--preset dem: .*demo, tinyshakespeare, "):
        parse_args(["--preset", "dem"])
