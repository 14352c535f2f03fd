"""Several versions of a step in turns: another implementation or precision.

Each runs in a process of its own (trials/children.py), which compiles its step and then waits to be asked for steps, so
that all see the same machine; a figure is the median of the ratios of neighbouring blocks. Leaves out what a step is
made of.
"""

import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import cache
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.text import table
from llmc_jax.config.flags import step_config
from llmc_jax.config.train import OPTIONS, TrainConfig
from llmc_jax.machine import jax_setup
from llmc_jax.trials.children import Children, NotMeasured, Task

LONGEST = 86400.0  # seconds that compiling may take, and then so many steps


Variant = tuple[str, TrainConfig]  # one version to run, and its name


def parse_variant(text: str, words: Sequence[str]) -> TrainConfig:
    """Return the version of train.py's words with another flag, `NAME=VALUE`. Raises InputError for what is none."""
    name, _, value = text.partition("=")
    if not value:
        raise InputError(f"--vs {text}: must be NAME=VALUE, such as kernels=xla, dtype=bf16")
    flag = name.replace("_", "-")
    about = next((each for each in OPTIONS if flag in (each.long_flag[2:], *(f[1:] for f in each.flags))), None)
    if about is None:
        raise InputError(f"--vs {text}: there is no flag --{flag}; train.py --help lists them")
    return step_config([*words, f"{about.long_flag}={value}"])


# ----- one process per variant --------------------------------------------------------------------------------------


def measure(config: TrainConfig, steps: int) -> tuple[int, float]:
    """Return the tokens of a step of a configuration, and the median seconds of some after one more.

    A task of trials/children.py, whose process compiles the step once.
    """
    try:
        bench = _bench(config)
    except InputError as error:
        raise NotMeasured(str(error)) from error
    return bench.tokens, statistics.median(bench.steps(steps, 1))


@cache
def _bench(config: TrainConfig) -> Any:
    jax_setup.configure(tf32=config.tf32)
    from llmc_jax.profile.measure import prepared  # here, because the process that compares does without

    return prepared(config)


def _measured(variant: Variant, worker: Children, steps: int) -> tuple[int, float]:
    """Return what `measure` does of a variant, in a process of its own. Raises InputError for what it cannot do."""
    label, config = variant
    outcome = worker.measure(Task(label, __name__, {"config": config, "steps": steps}, LONGEST))
    if outcome.kind != "DONE":
        raise InputError(f"{label}: {outcome.content}")
    found: tuple[int, float] = outcome.content
    return found


# ----- in turns -----------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """How one variant did."""

    label: str
    seconds: float  # median over the blocks
    low: float  # least block
    high: float  # slowest block
    ratio: float  # of its speed to the first variant's, median over the rounds: above 1 is faster
    ratio_low: float
    ratio_high: float
    tokens: int  # of a step


def ratios(first: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, least and greatest of how many times as fast the other is, round by round."""
    found = sorted(a / b for a, b in zip(first, other, strict=True))
    return statistics.median(found), found[0], found[-1]


def compare(variants: Sequence[Variant], rounds: int, steps: int) -> list[Result]:
    """Run the variants in turns: in each round a block of steps of each; the first is what the others are held to."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(Children(environment, None))) for _ in variants]
        pairs = list(zip(variants, workers, strict=True))
        tokens = [_measured(*pair, steps)[0] for pair in pairs]  # first, since compilations disturb each other
        turns = [[_measured(*pair, steps)[1] for pair in pairs] for _ in range(rounds)]
    blocks = list(zip(*turns, strict=True))
    return [
        Result(label, statistics.median(found), min(found), max(found), *ratios(blocks[0], found), count)
        for (label, _), found, count in zip(variants, blocks, tokens, strict=True)
    ]


def as_text(results: Sequence[Result]) -> str:
    """Return the comparison as a table for the screen."""
    rows = [
        [
            each.label, f"{1e3 * each.seconds:.2f}", f"({1e3 * each.low:.2f} - {1e3 * each.high:.2f})",
            f"{each.tokens / each.seconds:,.0f}",
            f"{each.ratio:.3f}", f"({each.ratio_low:.3f} - {each.ratio_high:.3f})",
        ]
        for each in results
    ]  # fmt: skip
    headings = ["", "ms", "(least - most)", "tok/s", "times as fast", "(lowest - highest)"]
    return table(headings, rows, left=[""], optional=("tok/s", "(least - most)"))
