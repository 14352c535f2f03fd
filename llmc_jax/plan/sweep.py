"""A sweep: a configuration with each of some values of an option, or on each of some GPUs, as a table.

All computed, nothing compiled. Leaves out the figures of one configuration (answer.py).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llmc_jax.base import text
from llmc_jax.base.errors import InputError
from llmc_jax.config.flags import given_options
from llmc_jax.config.model import divisors
from llmc_jax.config.train import AUTO_BATCH, OPTIONS, TrainConfig
from llmc_jax.machine.cards import name_of, named
from llmc_jax.plan.answer import Answer, Wishes, answer, place_of
from llmc_jax.plan.report import amount, three

GPU = "gpu"  # what is swept where it is no option
MOST_VALUES = 64

Sweep = tuple[str, dict[str, Any]]  # an option, or gpu, and its values by how they were written


class Row(NamedTuple):
    """One configuration of a sweep. Without an answer it cannot be, and `problem` says why."""

    value: str  # of what is swept, as it was written
    gpu: str | None  # None: the device at hand
    config: TrainConfig
    answer: Answer | None
    problem: str = ""


def parse_sweep(text: str) -> Sweep:
    """Return the sweep that `devices=1,2,4`, `b=8,16` or `gpu=h100,a100` describes. Raises InputError."""
    word, equals, listed = text.partition("=")
    values = dict.fromkeys(value.strip() for value in listed.split(","))
    if not equals or "" in values or len(values) > MOST_VALUES:
        raise InputError(
            f"--sweep {text}: expected an option and at most {MOST_VALUES} values, as in devices=1,2,4,8 or "
            "gpu=h100,a100"
        )
    if word == GPU:
        return GPU, {value: value for value in values}
    plain = word.strip().lstrip("-").replace("-", "_")
    for about in OPTIONS:
        if plain in (about.name, *(flag.lstrip("-").replace("-", "_") for flag in about.flags)):
            read = {value: given_options([about.flags[-1], value]).flags[about.name] for value in values}
            return about.name, read
    raise InputError(f"--sweep {word}: there is no such option; take gpu, or one of train.py's, such as devices, b, r")


def swept(config: TrainConfig, gpu: str | None, sweep: Sweep, wanted: Wishes) -> tuple[Row, ...]:
    """Return a configuration with each value of a sweep. gpu: None: the device at hand.

    Its number of devices is one GPU, or those at hand, where it does not say; its -b is lowered to what -d allows.
    Of a wished price, other GPUs than `gpu` take the table's.
    """
    name, values = sweep
    own = None if gpu is None else name_of(named(gpu).device_kind)
    config = replace(config, devices=config.devices or (place_of(None).devices if own is None and name != GPU else 1))
    rows = []
    for written, value in values.items():
        on = value if name == GPU else own
        one = config if name == GPU else fitted(replace(config, **{name: value}), name)
        try:
            price = wanted.price if name != GPU or name_of(named(value).device_kind) == own else None
            rows.append(Row(written, on, one, answer(one, on, wanted._replace(quick=True, price=price), largest=False)))
        except InputError as error:
            rows.append(Row(written, on, one, None, "; ".join(line.strip() for line in str(error).splitlines())))
    return tuple(rows)


def fitted(config: TrainConfig, changed: str = "") -> TrainConfig:
    """Return a configuration with the largest -b up to its own that divides its -d, where one is given.

    changed: the option that was changed; batch_size stays as it was asked for, and so does auto.
    """
    rows, left = divmod(config.total_batch_size, config.sequence_length * max(1, config.devices))
    if config.batch_size == AUTO_BATCH or config.total_batch_size == -1 or left or changed == "batch_size":
        return config
    return replace(config, batch_size=next(size for size in divisors(rows) if size <= config.batch_size))


# ----- as a table -----------------------------------------------------------------------------------------------------

OPTIONAL = ("-z", "GiB", "step ms")


def rows_table(name: str, rows: Sequence[Row], width: int | None = None) -> str:
    """Return the rows of a sweep over `name` as a table, with what could not be and why below it."""
    headings = (name, "GPU", "GPUs", "-b", "-r", "-z", "fits", "GiB", "step ms", "tok/s", "hours", "USD")
    table = text.table(headings, map(_cells, rows), left=(name, "GPU", "fits"), optional=OPTIONAL, width=width)
    notes = [f"{name} {row.value}: {row.problem}" for row in rows if row.problem]
    notes.append("Typical values, at the prices of llmc_jax/plan/prices.toml; --json has low and high ones too.")
    return "\n".join([table, "", *(text.wrapped(each, width) for each in notes)])


def _cells(row: Row) -> list[str]:
    config, found = row.config, row.answer
    size = config.batch_size if found is None else found.setting.batch_size
    begin = [row.value, row.gpu or "here", *map(str, (config.devices, size, config.recompute, config.zero_stage))]
    if found is None:
        return [*begin, "cannot be"]
    run, taken = found.course, found.memory.program / 2**30
    shown = (run.seconds.times(1 / 3600), run.usd) if run else ()
    return [
        *begin, {True: "yes", False: "no", None: "?"}[found.memory.fits], three(taken),
        three(1e3 * found.step.seconds.typical), amount(found.step.tokens_per_second.typical),
        *("" if each is None else three(each.typical) for each in shown),
    ]  # fmt: skip
