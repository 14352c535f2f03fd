"""The configuration of a learning-rate range test (--find-lr): a run's own, without what a test has no use for.

Leaves out the test itself (run/find_lr.py) and its rates (training/schedule.py).
"""

import shlex
from dataclasses import replace
from typing import Any

from llmc_jax.config.flags import given_options
from llmc_jax.config.train import OPTIONS, TrainConfig

# What a test does without, whatever the run has: it looks at training losses alone, and leaves no model. A loss that is
# not finite ends it, and an update that is an outlier is what it looks for.
WITHOUT: dict[str, Any] = {about.name: about.type() for about in OPTIONS if about.off_in_test}

REPLACED = ("preset", "learning_rate", "find_lr", "find_lr_range", "find_lr_steps")  # in the command that uses a rate


def of_test(config: TrainConfig) -> TrainConfig:
    """Return the configuration as the test of it runs; any other one as it is."""
    return replace(config, **WITHOUT, max_steps=config.find_lr_steps) if config.find_lr else config


def as_asked(config: TrainConfig, asked: TrainConfig) -> dict[str, Any]:
    """Return the options of a configuration, those that a test does without as they were asked for."""
    return config.to_json() | {name: getattr(asked, name) for name in (*WITHOUT, "max_steps", "devices")}


def flags_with_rate(asked: TrainConfig, learning_rate: str) -> str:
    """Return the flags of the run that a test was made for, with a learning rate."""
    base = given_options(["--preset", asked.preset]).config if asked.preset else TrainConfig()
    words = ["--preset", asked.preset] if asked.preset else []
    for about in OPTIONS:
        value = getattr(asked, about.name)
        if value != getattr(base, about.name) and about.name not in REPLACED and not about.of_this_start:
            shown = value if about.type is str else about.show(value)
            words += [about.flags[0]] if about.switch else [about.flags[0], shown]
    return shlex.join([*words, "-l", learning_rate])
