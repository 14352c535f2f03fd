"""Which settings go together: values out of range, contradictions, what is not built, what has no effect.

Leaves out the options themselves (train.py) and what only files and devices tell.
"""

from collections.abc import Callable
from typing import NamedTuple

from llmc_jax.config.model import ModelConfig
from llmc_jax.config.options import show_value, value_problem
from llmc_jax.config.train import DEVICES, OPTIONS, TrainConfig
from llmc_jax.errors import raise_problems


def _given(config: TrainConfig, name: str) -> str:
    """A flag and its value as one would type them: `-b 4`."""
    about = next(each for each in OPTIONS if each.name == name)
    return f"{about.flags[0]} {show_value(getattr(config, name))}"


class NotBuilt(NamedTuple):
    """A value of llm.c's that this program understands but cannot do yet."""

    name: str
    asked: Callable[[TrainConfig], bool]
    would: str
    without: str


NOT_BUILT = (
    NotBuilt(
        "hellaswag",
        lambda config: config.hellaswag,
        "measure HellaSwag accuracy at every validation",
        "leave -h out: the validation loss is measured all the same",
    ),
    NotBuilt(
        "num_processes",
        lambda config: config.num_processes > 1,
        "split every batch over several processes, one device each",
        "leave out -pn and -pr: one process makes the same updates, with more gradient accumulation for the same -d",
    ),
    NotBuilt(
        "zero_stage",
        lambda config: config.zero_stage > 1 or (config.zero_stage == 1 and config.num_processes > 1),
        "split the optimizer's state over the processes",
        "write -z 0: the results are the same, with more memory per device",
    ),
)


def validate(config: TrainConfig) -> list[str]:
    """Check a configuration as far as that is possible without its files and devices.

    Returns notes for the user: what has no effect, or another one than in llm.c.
    Raises one InputError that lists every value out of range, every contradiction, and every value that asks for
    something not built yet.
    """
    problems = []
    for about in OPTIONS:
        words = value_problem(about, getattr(config, about.name))
        if words:
            problems.append(f"{_given(config, about.name)}: {about.noun} {words}")
    raise_problems(problems)  # what follows counts on sane values
    raise_problems([*_contradictions(config), *_not_built(config)])
    return _notes(config)


def _contradictions(config: TrainConfig) -> list[str]:
    problems = []
    unit = config._tokens_at_once
    if config.tokens_per_step % unit:
        below, above = config.tokens_per_step // unit * unit, -(-config.tokens_per_step // unit) * unit
        choice = f"-d {below} or -d {above}" if below else f"-d {above}, or a smaller -b or -t"
        product = f"{_given(config, 'batch_size')} times {_given(config, 'sequence_length')}"
        if config.num_processes > 1:
            product += f" times {_given(config, 'num_processes')}"
        problems.append(
            f"{_given(config, 'total_batch_size')}: an update's tokens must be a multiple of {unit} ({product}); "
            f"take {choice}"
        )
    if config.gelu_fusion == 2:
        problems.append(
            "-ge 2: XLA cannot let NVIDIA's library compute GELU's gradient in a product; write -ge 1: GELU itself is "
            "computed in one, its gradient by a kernel"
        )
    if config.gelu_fusion == 1 and config.recompute and not config.recompute_blocks:
        problems.append(
            f"-ge 1: GELU in the product has other bits than one that {_given(config, 'recompute')} computes again; "
            "write -r 0, which takes more memory, or leave -ge out"
        )
    if config.gelu_fusion == 1 and config.triton_gemm == "on":
        problems.append(
            "-ge 1: GELU is computed in a product of NVIDIA's library, not in one by Triton; leave --triton-gemm out"
        )
    if config.dtype == "fp16" and config.rounding == "stochastic":
        problems.append("--rounding stochastic: is for bf16 only; with --dtype fp16 weights are rounded to nearest")
    if config.process_rank >= config.num_processes:
        problems.append(
            f"{_given(config, 'process_rank')}: process rank must be below the number of processes "
            f"({_given(config, 'num_processes')}); ranks count from 0"
        )
    if config.schedule == "step" and config.step_every == 0:
        problems.append("--step-every 0: -k step needs at least 1; for a rate that never falls write -k constant")
    return problems


def _not_built(config: TrainConfig) -> list[str]:
    return [
        f"{_given(config, missing.name)}: not built yet; it would {missing.would}. To go on, {missing.without}"
        for missing in NOT_BUILT
        if missing.asked(config)
    ]


def _notes(config: TrainConfig) -> list[str]:
    notes = []
    notes += _precision_notes(config)
    if config.reuse and not config.output_dir:
        notes.append("-y 1 without -o: this run gets a new folder of its own; name one with -o to go on in it")
    notes += _saving_notes(config)
    notes += _device_notes(config)
    if config.warmup_steps and config.schedule == "constant":
        notes.append(f"{_given(config, 'warmup_steps')}: has no effect with -k constant, which does not warm up")
    elif 0 < config.max_steps <= config.warmup_steps:
        notes.append(
            f"{_given(config, 'warmup_steps')}: the run of {_given(config, 'max_steps')} ends before the learning rate "
            "reaches -l"
        )
    defaults = TrainConfig()
    for name in ("step_every", "step_factor"):
        if config.schedule != "step" and getattr(config, name) != getattr(defaults, name):
            notes.append(f"{_given(config, name)}: has no effect without -k step")
    # a preset names the rule of its trainer for whoever adds -c
    if config.decay != defaults.decay and config.weight_decay == 0 and not config.preset:
        notes.append(f"{_given(config, 'decay')}: has no effect with -c 0, where nothing decays")
    return notes


def _saving_notes(config: TrainConfig) -> list[str]:
    """Settings of checkpoints that have no effect."""
    notes = []
    if config.major_every and not config.keep_checkpoints:
        notes.append(f"{_given(config, 'major_every')}: has no effect without -nk, where every checkpoint is kept")
    if not config.save and (not config.checkpoint_every or config.max_steps == 0):
        why = "-x 0" if config.checkpoint_every else "without -n"
        if config.export_llmc:
            notes.append(f"--export-llmc: has no effect with --no-save and {why}, where nothing is saved")
        if config.reuse:
            notes.append(f"-y 1: nothing is saved with --no-save and {why}, so the next start begins anew too")
    return notes


def _device_notes(config: TrainConfig) -> list[str]:
    """Settings for several processes, which mean nothing to one."""
    about_devices = [about for about in OPTIONS if about.group == DEVICES]
    given = [about.name for about in about_devices if getattr(config, about.name) != about.default]
    if not given:
        return []
    flags = ", ".join(_given(config, name) for name in given)
    return [f"{flags}: no effect, since this is one process; training on several devices is not built yet"]


def _precision_notes(config: TrainConfig) -> list[str]:
    """Settings of precision that have no effect. What -e or the device decides is not known here."""
    notes = []
    defaults = TrainConfig()
    if config.dtype != "fp16":
        for name in ("loss_scale", "loss_scale_steps", "loss_scale_factor"):
            if getattr(config, name) != getattr(defaults, name):
                notes.append(f"{_given(config, name)}: has no effect without --dtype fp16")
    if config.dtype == "fp32" and not config.master_weights:
        notes.append("-w 0: has no effect with --dtype fp32, where the weights are in fp32 anyway")
    if config.dtype == "fp32" and config.rounding == "stochastic":
        notes.append("--rounding stochastic: has no effect with --dtype fp32, where nothing is rounded")
    if config.dtype == "bf16" and not config.master_weights and config.rounding == "nearest":
        notes.append("--rounding nearest: with -w 0 small updates round to nothing and training may stall")
    if config.dtype == "fp16" and not config.master_weights:
        notes.append("-w 0: with --dtype fp16 small updates round to nothing and training may stall")
    if config.recompute_blocks and config.recompute != defaults.recompute:
        notes.append(f"{_given(config, 'recompute')}: has no effect with --recompute-blocks, which computes all again")
    return notes


def check_model_fit(config: TrainConfig, model: ModelConfig) -> list[str]:
    """Check the settings that depend on the model's shape, once it is known. Returns notes for the user.

    Raises InputError if rows (-t) or samples (-g) are longer than the positions that the model knows.
    """
    known = f"the model knows {model.max_seq_len} positions"
    problems = []
    if config.sequence_length > model.max_seq_len:
        problems.append(f"{_given(config, 'sequence_length')}: {known}; take -t {model.max_seq_len} or less")
    if config.sample_every and config.sample_tokens > model.max_seq_len:
        problems.append(
            f"{_given(config, 'sample_tokens')}: {known}; take -g {model.max_seq_len} or less, or -s 0 for no samples"
        )
    raise_problems(problems)
    if config.sequence_length < model.max_seq_len:
        return [f"{_given(config, 'sequence_length')}: {known}; those from {config.sequence_length} on do not train"]
    return []
