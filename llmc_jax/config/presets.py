"""Named sets of options for `--preset`: the demo, small CPU runs, and llm.c's own trainers and launches.

A preset is only what differs from llm.c's defaults. llm.c's launches stand here without what is not built yet: no
HellaSwag, one process, a run folder of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmc_jax.config.train import TrainConfig
from llmc_jax.errors import InputError

DEFAULT_PRESET = "demo"  # what `python train.py` without any flag runs


@dataclass(frozen=True)
class Preset:
    description: str  # one line
    options: Mapping[str, Any]  # fields of TrainConfig


def _fineweb(folder: str, prefix: str) -> dict[str, str]:
    """Token files as llm.c's dev/data/fineweb.py names them."""
    return {
        "train_data": f"dev/data/{folder}/{prefix}_train_*.bin",
        "val_data": f"dev/data/{folder}/{prefix}_val_*.bin",
    }


# What the launches of llm.c's scripts/run_gpt2_*.sh have in common.
LLMC_LAUNCH = {
    "sequence_length": 1024,
    "total_batch_size": 524288,
    "warmup_steps": 700,
    "final_lr_fraction": 0.0,
    "weight_decay": 0.1,
    "val_every": 250,
    "sample_tokens": 144,
    "recompute": 0,
}

# train_gpt2.c and train_gpt2_fp32.cu: every parameter treated alike, a constant rate, no clipping.
LLMC_EARLY = {
    "model": "gpt2_124M.bin",
    "schedule": "constant",
    "beta2": 0.999,
    "decay": "all",
    "grad_clip": 0.0,
}

PRESETS: dict[str, Preset] = {
    "demo": Preset(
        "a small GPT-2 learns Python's own source, byte by byte; on a CPU, without any download",
        {
            "train_data": "stdlib",
            "val_data": "stdlib",
            "model": "L4-NH4-C128-V257-T128",
            "batch_size": 4,  # each micro-batch is one stretch of text: four small ones show more of the corpus
            "sequence_length": 128,
            "total_batch_size": 2048,
            "max_steps": 850,
            "learning_rate": 4e-3,
            "warmup_steps": 50,
            "final_lr_fraction": 0.1,
            "weight_decay": 0.1,
            "val_every": 100,
            "val_batches": 80,
            "sample_every": 170,
            "sample_tokens": 128,
            "recompute": 0,
            "print_every": 20,
        },
    ),
    "tinyshakespeare": Preset(
        "a small GPT-2 on tinyshakespeare, in GPT-2's tokens; for a CPU",
        {
            "model": "L4-NH4-C128-T128",
            "batch_size": 8,
            "sequence_length": 128,
            "max_steps": 1000,
            "learning_rate": 1e-3,
            "warmup_steps": 50,
            "final_lr_fraction": 0.1,
            "weight_decay": 0.1,
            "val_every": 100,
            "sample_every": 250,
            "sample_tokens": 128,
        },
    ),
    "llmc-cpu": Preset(
        "train_gpt2.c: 41 updates of GPT-2 124M on tinyshakespeare",
        LLMC_EARLY
        | {
            "sequence_length": 64,
            "max_steps": 41,  # its loop runs from step 0 to step 40 and updates in both
            "learning_rate": 1e-4,
            "val_every": 10,
            "val_batches": 5,
            "sample_every": 20,
            "sampling": "train_gpt2.c",
        },
    ),
    "llmc-fp32": Preset(
        "train_gpt2_fp32.cu: one epoch of GPT-2 124M on tinyshakespeare",
        LLMC_EARLY | {"sampling": "train_gpt2_fp32.cu"},
    ),
    "gpt2-124M": Preset(
        "llm.c's run_gpt2_124M.sh: GPT-2 124M from random weights, one epoch of FineWeb 10B",
        LLMC_LAUNCH
        | _fineweb("fineweb10B", "fineweb")
        | {
            "model": "d12",
            "batch_size": 64,
            "learning_rate": 6e-4,
            "sample_every": 20000,
            "checkpoint_every": 5000,
        },
    ),
    "gpt2-350M": Preset(
        "llm.c's run_gpt2_350M.sh: 60,000 steps on FineWeb 100B",
        LLMC_LAUNCH
        | _fineweb("fineweb100B", "fineweb")
        | {
            "model": "d24",
            "batch_size": 64,
            "max_steps": 60000,
            "learning_rate": 3e-4,
            "sample_every": 100000,
            "checkpoint_every": 2000,
        },
    ),
    "gpt2-774M": Preset(
        "llm.c's run_gpt2_774M.sh: 286,102 steps on FineWeb 100B",
        LLMC_LAUNCH
        | _fineweb("fineweb100B", "fineweb")
        | {
            "model": "d36",
            "batch_size": 32,
            "max_steps": 286102,
            "learning_rate": 2.5e-4,
            "sample_every": 300000,
            "checkpoint_every": 4000,
        },
    ),
    "gpt2-1558M": Preset(
        "llm.c's run_gpt2_1558M.sh: 32,000 steps on FineWeb-EDU 100B",
        LLMC_LAUNCH
        | _fineweb("edu_fineweb100B", "edu_fineweb")
        | {
            "model": "d48",
            "batch_size": 16,
            "total_batch_size": 1048576,
            "max_steps": 32000,
            "learning_rate": 6e-4,
            "final_lr_fraction": 0.1,
            "sample_every": 300000,
            "sample_tokens": 384,
            "checkpoint_every": 2000,
        },
    ),
}


def preset_options(name: str) -> dict[str, Any]:
    """Return what a preset changes of llm.c's defaults. Raises InputError, with the known ones, for another."""
    if name not in PRESETS:
        raise InputError(f"--preset {name}: there is no such preset; known are {', '.join(PRESETS)}")
    return {"preset": name, **PRESETS[name].options}


def preset_config(name: str) -> TrainConfig:
    """Return llm.c's defaults, with what the preset changes."""
    return replace(TrainConfig(), **preset_options(name))
