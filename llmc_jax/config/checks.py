"""Checks of settings together: values out of range, contradictions, what is not built, what is worth a note.

Leaves out the options themselves (train.py) and what only files and devices tell.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from llmc_jax.base.errors import InputError, raise_problems
from llmc_jax.base.options import field_problem
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import AUTO_BATCH, BY_NAME, OPTIONS, TrainConfig


class Rule(NamedTuple):
    """What is said of the configurations to which it applies: {dtype} in the words stands for `--dtype fp16`."""

    applies: Callable[[TrainConfig], bool]
    words: str


CONTRADICTIONS = (
    Rule(
        lambda c: c.gelu_fusion >= 0 and c.products != "auto",
        "{gelu_fusion}: says what computes the products beside GELU, and {products} does too; leave one of them out",
    ),
    Rule(
        lambda c: c.dtype == "fp16" and c.rounding == "stochastic",
        "{rounding}: is for bf16 only; with --dtype fp16 weights are rounded to nearest",
    ),
    Rule(
        lambda c: c.process_rank >= c.num_processes > 0,
        "{process_rank}: process rank must be below the number of processes ({num_processes}); ranks count from 0",
    ),
    Rule(
        lambda c: c.num_processes > 1 and c.devices % c.num_processes != 0,
        "{devices}: is over all processes, so it must be a multiple of {num_processes}",
    ),
    Rule(
        lambda c: c.schedule == "step" and c.step_every == 0,
        "{step_every}: -k step needs at least 1; for a rate that never falls write -k constant",
    ),
    Rule(
        lambda c: c.patience > 0 and c.val_every == 0,
        "{patience}: counts validations, and with {val_every} there are none; give -v a number of steps",
    ),
    Rule(
        lambda c: c.zero_stage == 3,
        "{zero_stage}: not built yet; it would split the weights over the devices too. To continue, write -z 2: the "
        "results are the same, with more memory per device",
    ),
)


def _in_any_order(config: TrainConfig) -> bool:
    """Return whether the devices cannot take equal subtrees of a tree of sums over the micro-batches."""
    n = max(1, config.devices)
    return bool(n & (n - 1)) or config.micro_batches % n != 0


# What the number of devices decides: looked at once that is known.
OF_DEVICES = (
    Rule(
        lambda c: c.reduction == "fixed" and _in_any_order(c),
        "{reduction}: the number of devices must be a power of two that divides the micro-batches of an update "
        "({micro_batches}), not {num_devices}; take another --devices or -d",
    ),
    Rule(
        lambda c: (
            c.reduction == "fixed"
            and c.zero_stage == 2
            and c.batch_size != AUTO_BATCH  # which keeps to the rule
            and bool(c.micro_batches & (c.micro_batches - 1))
        ),
        "{reduction}: with {zero_stage} the micro-batches of an update must be a power of two, not {micro_batches}; "
        "take another -d, or -z 1",
    ),
)


def _saves_nothing(config: TrainConfig) -> bool:
    return not config.save and (not config.checkpoint_every or config.max_steps == 0)


# What does not do what it seems to; what -e or the device decides is not known here.
NOTES = (
    Rule(
        lambda c: c.dtype == "bf16" and not c.master_weights and c.rounding == "nearest",
        "{rounding}: with -w 0 small updates round to nothing and training may stall",
    ),
    Rule(
        lambda c: c.dtype == "fp16" and not c.master_weights,
        "{master_weights}: with {dtype} small updates round to nothing and training may stall",
    ),
    Rule(
        lambda c: c.reuse and not c.output_dir,
        "{reuse} without -o: this run gets a new folder of its own; name one with -o to resume it",
    ),
    Rule(
        lambda c: c.patience > 0 and c.save and (c.checkpoint_every == 0 or c.val_every % c.checkpoint_every != 0),
        "{patience}: the state of the best validation is kept only if one is saved then; -n {every_val} saves one at "
        "each",
    ),
    Rule(
        lambda c: (c.export_llmc or c.reuse) and _saves_nothing(c),
        "--no-save: nothing is saved, so --export-llmc writes no model, and with -y 1 the next start begins from "
        "scratch too",
    ),
    Rule(
        lambda c: c.batch_order == "llmc" and c.reduction == "fixed" and not c.overfit,
        "{batch_order}: another number of devices takes other tokens, so {reduction} cannot give it the same bits",
    ),
    Rule(
        lambda c: c.schedule != "constant" and 0 < c.max_steps < c.warmup_steps,
        "{warmup_steps}: the run of {max_steps} ends before the learning rate reaches -l",
    ),
)


def validate(config: TrainConfig) -> list[str]:
    """Check a configuration as far as that is possible without its files and devices.

    Returns notes for the user: what does not do what it seems to.
    Raises one InputError that lists every value out of range, every contradiction, and every value that asks for
    something not built yet.
    """
    wrong = ((about, field_problem(about, getattr(config, about.name))) for about in OPTIONS)
    # what follows counts on sane values
    raise_problems(f"{_given(config, about.name)}: {about.noun} {words}" for about, words in wrong if words)
    problems = [*_total_batch(config), *_said(config, CONTRADICTIONS)]
    raise_problems(problems or _of_devices(config))
    return _said(config, NOTES)


def with_devices(config: TrainConfig, available: int, platform: str, processes: int = 1) -> TrainConfig:
    """Return the configuration with its number of devices resolved. Raises InputError as `validate` does.

    available: that JAX has for this process, of a platform ("gpu"); each of the processes has as many. On a CPU a
    process takes one if the run names no number.
    """
    devices, most = config.devices or processes * (1 if platform == "cpu" else available), processes * available
    if devices > most:
        there = f"this machine has {available}" if platform != "cpu" else f"XLA_FLAGS allows {available} on this CPU"
        if processes > 1:
            there += f" for each of {processes} processes, {most} in all"
        raise InputError(f"--devices {devices}: {there}; take --devices {most} or fewer")
    devices_of_each(devices, processes)
    config = replace(config, devices=devices)
    raise_problems(_total_batch(config) or _of_devices(config))
    return config


def devices_of_each(devices: int, processes: int) -> int:
    """Return the devices of each process of a run that has so many in all. Raises InputError for uneven shares."""
    if devices % processes:
        choice = " or ".join(f"--devices {n}" for n in _multiples(devices, processes))
        raise InputError(f"--devices {devices}: {processes} processes cannot share them evenly; take {choice}")
    return devices // processes


def _multiples(number: int, unit: int) -> list[int]:
    """Return the multiples of a unit on both sides of a number that is none."""
    return [n for n in (number // unit * unit, -(-number // unit) * unit) if n]


def _of_devices(config: TrainConfig) -> list[str]:
    """Return what contradicts the number of devices, where it is known."""
    return _said(config, OF_DEVICES) if config.devices or config.reduction == "fixed" else []


def _given(config: TrainConfig, name: str) -> str:
    """Return a flag and its value as one would type them: `-b 4`."""
    return f"{BY_NAME[name].flags[0]} {BY_NAME[name].show(getattr(config, name))}"


def _said(config: TrainConfig, rules: Iterable[Rule]) -> list[str]:
    """Return the words of the rules that apply to a configuration."""
    applying = [rule for rule in rules if rule.applies(config)]
    if not applying:
        return []
    words = {about.name: _given(config, about.name) for about in OPTIONS}
    words["micro_batches"], words["num_devices"] = str(config.micro_batches), str(config.devices)
    words["every_val"] = str(config.val_every)
    return [rule.words.format_map(words) for rule in applying]


def _total_batch(config: TrainConfig) -> list[str]:
    """Return what is wrong with the tokens of an update, and the nearest numbers that are right."""
    unit = config.tokens_at_once
    if config.tokens_per_step % unit == 0:
        return []
    product = " times ".join(_given(config, name) for name in ("batch_size", "sequence_length"))
    product += f" times {config.devices} devices" if config.devices > 1 else ""
    choice = " or ".join(f"-d {n}" for n in _multiples(config.tokens_per_step, unit))
    others = "fewer --devices, or a smaller -b or -t" if config.devices > 1 else "a smaller -b or -t"
    advice = f"{choice}, or {others}"
    if config.reuse and config.devices > 1:  # a resume keeps the -b, -t and -d of its checkpoint
        advice = "fewer --devices"
    return [
        f"{_given(config, 'total_batch_size')}: an update's tokens must be a multiple of {unit} ({product}); "
        f"take {advice}"
    ]


def check_model_fit(config: TrainConfig, model: ModelShape) -> list[str]:
    """Check the settings that depend on the model's shape, once it is known. Returns notes for the user.

    Raises InputError if rows (-t) or samples (-g) are longer than the positions that it knows.
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
