"""What each option says that it reaches: the step's program, the numbers it is given, the tokens that it takes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from llmc_jax.base.options import Option, Reach, Resume, value_problem
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import BY_NAME, OPTIONS, TrainConfig
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.plan.compiled import arguments, plan_for
from llmc_jax.plan.plan import step_numbers
from llmc_jax.run.inputs import open_data
from llmc_jax.training.step import train_step

TINY = TrainConfig(model="L1-NH2-C16-V32-T16", batch_size=1, sequence_length=8, devices=1)
# Loss scale, weight decay, several micro-batches; stochastic rounding, a range test: each brings numbers of its own.
BASES = [
    replace(TINY, total_batch_size=16, dtype="fp16", weight_decay=0.1, schedule="step"),
    replace(TINY, dtype="bf16", master_weights=False, find_lr=True),
]
CANDIDATES = (True, False, 12, 3, 0.25, 3.0, "1e-5:0.1", "10:15", "muon", "x")


def another(about: Option, value: Any) -> Any:
    """Return another value that an option may have; not its first choice, for which auto often stands."""
    possible = (each for each in (*about.choices[::-1], *CANDIDATES) if type(each) is about.type and each != value)
    return next(each for each in possible if value_problem(about, each) is None)


def culprit(base: TrainConfig, options: Sequence[Option], made: Callable[[TrainConfig], Any]) -> str | None:
    """Return an option another value of which makes something else; None where even all of them together do not."""
    before = made(base)

    def matters(some: Sequence[Option]) -> bool:
        changed = replace(base, **{about.name: another(about, getattr(base, about.name)) for about in some})
        return bool(made(changed) != before)

    if not matters(options):
        return None
    while len(options) > 1:
        half, rest = options[: len(options) // 2], options[len(options) // 2 :]
        options = half if matters(half) else rest
    return options[0].name


def program(config: TrainConfig) -> Any:
    """Return the step as it is handed to the compiler: its text and the compiler's options."""
    plan = plan_for("cpu", config)
    text = train_step.lower(*arguments(plan), plan.model, plan.step_options).as_text()
    return text, plan.execution.compiler_options


def numbers(config: TrainConfig) -> Any:
    """Return what the step is given beside the tokens, but for the weights."""
    return step_numbers(config, plan_for("cpu", config).optimizer, config.max_steps), config.loss_scale


def data(config: TrainConfig) -> Any:
    """Return the tokens of the first updates."""
    train = open_data(config, parse_descriptor(config.model)).train
    assert train is not None
    return [[each.tolist() for each in train.next_batch(config.micro_batches)] for _ in range(3)]


def check(
    reach: Reach, base: TrainConfig, made: Callable[[TrainConfig], Any], options: Sequence[Option] = OPTIONS
) -> None:
    """Check that the options that do not say so do not reach something; those that reach the program are let off."""
    name = culprit(base, [about for about in options if not about.reaches & {reach, "program"}], made)
    assert name is None, f"{name}: reaches the step's {reach}, and llmc_jax/config/train.py does not say so"


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.dtype)
@pytest.mark.parametrize(("reach", "made"), [("program", program), ("numbers", numbers)])
def test_a_step_is_reached_only_by_options_that_say_so(
    reach: Reach, made: Callable[[TrainConfig], Any], base: TrainConfig
) -> None:
    check(reach, base, made)


def test_the_data_is_reached_only_by_options_that_say_so(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_token_file(path, np.arange(320) % 32)
    check("data", replace(TINY, train_data=str(path), val_data=str(path)), data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule", "recompute", "total_batch_size", "decay", "master_weights", "rounding"])
def test_an_option_that_does_not_say_so_is_named(name: str) -> None:
    silent = BY_NAME[name]._replace(reaches=frozenset())
    with pytest.raises(AssertionError, match=f"^{name}: "):
        check("program", replace(BASES[0], dtype="bf16"), program, [BY_NAME["seed"], silent, BY_NAME["patience"]])


def test_each_option_says_what_it_reaches_and_what_a_resume_does() -> None:
    assert all(about.reaches <= {*get_args(Reach)} and about.resume in get_args(Resume) for about in OPTIONS)
