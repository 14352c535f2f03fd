"""Configurations near one, or along one option: a row of figures for each; and llm.c's four reproductions.

All computed, nothing compiled. Leaves out the figures of one configuration (answer.py), and how rows are shown.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import Option
from llmc_jax.config.flags import given_options
from llmc_jax.config.model import divisors
from llmc_jax.config.train import AUTO_BATCH, OPTIONS, TrainConfig
from llmc_jax.machine.cards import named, short_name
from llmc_jax.machine.gpus import TARGETS
from llmc_jax.plan.answer import Wishes, answer
from llmc_jax.plan.asked import asked_config
from llmc_jax.plan.course import Course
from llmc_jax.plan.interval import Interval
from llmc_jax.plan.planner import place_here, place_named

GPU = "gpu"  # what differs, or is swept, where it is no option
LEVELS = (0, 1, 2)  # of -r
STAGES = (0, 1, 2)  # of -z
MOST_VALUES = 64  # of a sweep


class Figures(NamedTuple):
    """The figures of one configuration on one kind of device."""

    batch_size: int  # what -b auto came to
    fits: bool | None  # None: the device's memory is not known
    program: int  # bytes of the step's program on one device
    available: int | None  # bytes that it may take
    step: Interval  # seconds
    tokens_per_second: Interval
    course: Course | None  # None: nothing says how many steps there are


class Row(NamedTuple):
    """One configuration. Without figures it cannot be, and `problem` says why."""

    differs: str  # from what was asked: gpu, or an option's name; empty: in nothing
    value: str  # of that
    gpu: str | None  # None: the device at hand
    devices: int
    batch_size: int
    recompute: int
    zero_stage: int
    figures: Figures | None
    problem: str


Wish = tuple[str, str, TrainConfig, str | None]  # what differs, its value, the configuration, the GPU


def look(wish: Wish, own: str | None, wanted: Wishes) -> Row:
    """Return what a configuration comes to on a GPU, or why it cannot be; None: on the device at hand.

    own: the GPU that the wishes are of: their price is of that one alone, of another the table's. Raises InputError
    where nothing differs: then it is what is asked.
    """
    differs, value, config, gpu = wish
    row = Row(
        differs, value, gpu, max(1, config.devices), config.batch_size, config.recompute, config.zero_stage, None, ""
    )
    try:
        price = wanted.price if _plain(gpu) == own else None
        found = answer(config, place_named(gpu), wanted._replace(quick=True, price=price), largest=False)
    except InputError as error:
        if not differs:
            raise
        return row._replace(problem="; ".join(line.strip() for line in str(error).splitlines()))
    size, memory, step = found.setting.batch_size, found.memory, found.step
    figures = Figures(
        size, memory.fits, memory.program, memory.available, step.seconds, step.tokens_per_second, found.course
    )
    return row._replace(batch_size=size, figures=figures)


# ----- neighbours -----------------------------------------------------------------------------------------------------


def neighbours(config: TrainConfig, gpu: str | None, wanted: Wishes) -> tuple[Row, ...]:
    """Return the figures of a configuration and of those near it, the asked one first. gpu: None: the device at hand.

    Raises InputError for what is asked; others that cannot be are rows that say so.
    """
    gpu = _plain(gpu)
    return tuple(look(wish, gpu, wanted) for wish in wishes(_counted(config, gpu), gpu))


def _plain(gpu: str | None) -> str | None:
    """Return the short name of a GPU; None: the device at hand. Raises InputError."""
    return None if gpu is None else short_name(named(gpu))


def _counted(config: TrainConfig, gpu: str | None) -> TrainConfig:
    """Return a configuration with its number of devices: one GPU, or those at hand, where it does not say."""
    return replace(config, devices=config.devices or (place_here().devices if gpu is None else 1))


def wishes(config: TrainConfig, gpu: str | None) -> Iterator[Wish]:
    """Yield what is asked; then other GPUs, numbers of them, half and twice the -b, other -r and -z.

    One GPU asks for no -z, since it has nothing to split the state with: several in its place take -z 1.
    """
    yield "", "", config, gpu
    for name in TARGETS:
        if name != gpu:
            yield GPU, name, config, name
    several = replace(config, zero_stage=max(1, config.zero_stage)) if config.devices == 1 else config
    for devices in _powers(config.devices) if gpu is not None else ():
        yield _wish(several, gpu, "devices", devices)
    for size in (config.batch_size // 2, 2 * config.batch_size):
        if size and fitted(changed := replace(config, batch_size=size)) == changed:
            yield _wish(config, gpu, "batch_size", size)
    for level in LEVELS:
        if level != config.recompute and not config.recompute_blocks:
            yield _wish(config, gpu, "recompute", level)
    for stage in STAGES if config.devices > 1 else ():
        if stage != config.zero_stage:
            yield _wish(config, gpu, "zero_stage", stage)


def _powers(devices: int) -> list[int]:
    """Return numbers of devices near one: powers of two from 1 to its double, at least to 8, without itself."""
    return [power for power in (2**n for n in range(16)) if power <= max(8, 2 * devices) and power != devices]


def _wish(config: TrainConfig, gpu: str | None, name: str, value: object, text: str = "") -> Wish:
    return name, text or str(value), fitted(replace(config, **{name: value}), name), gpu  # type: ignore[arg-type]


def fitted(config: TrainConfig, changed: str = "") -> TrainConfig:
    """Return a configuration with the largest -b up to its own that divides its -d, where one is given.

    changed: the option that was changed; batch_size stays as it was asked for, and so does auto.
    """
    rows, left = divmod(config.total_batch_size, config.sequence_length * max(1, config.devices))
    if config.batch_size == AUTO_BATCH or config.total_batch_size == -1 or left or changed == "batch_size":
        return config
    return replace(config, batch_size=next(size for size in divisors(rows) if size <= config.batch_size))


# ----- sweeps ---------------------------------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """An option, or gpu, and the values that it is to have, as they were written."""

    name: str
    values: tuple[str, ...]


def parse_sweep(text: str) -> Sweep:
    """Return the sweep that `devices=1,2,4`, `b=8,16` or `gpu=h100,a100` describes. Raises InputError."""
    word, equals, listed = text.partition("=")
    values = tuple(dict.fromkeys(value.strip() for value in listed.split(",")))
    if not equals or "" in values:
        raise InputError(f"--sweep {text}: expected an option and its values, as in devices=1,2,4,8 or gpu=h100,a100")
    if len(values) > MOST_VALUES:
        raise InputError(f"--sweep {word}: {len(values)} values; expected at most {MOST_VALUES}")
    if word == GPU:
        return Sweep(GPU, values)
    about = _option(word)
    for value in values:
        given_options([about.flags[-1], value])
    return Sweep(about.name, values)


def _option(word: str) -> Option:
    """Return the option with a name, or a flag with or without its dashes. Raises InputError."""
    plain = word.strip().lstrip("-").replace("-", "_")
    for about in OPTIONS:
        if plain in (about.name, *(flag.lstrip("-").replace("-", "_") for flag in about.flags)):
            return about
    raise InputError(f"--sweep {word}: there is no such option; take gpu, or one of train.py's, such as devices, b, r")


def swept(config: TrainConfig, gpu: str | None, sweep: Sweep, wanted: Wishes) -> tuple[Row, ...]:
    """Return the figures of a configuration with each value of a sweep, its -b lowered to what -d allows."""
    own = _plain(gpu)
    config = _counted(config, sweep.values[0] if sweep.name == GPU else own)
    return tuple(look(_valued(config, own, sweep.name, text), own, wanted) for text in sweep.values)


def _valued(config: TrainConfig, gpu: str | None, name: str, text: str) -> Wish:
    if name == GPU:
        return GPU, text, config, text
    return _wish(config, gpu, name, given_options([_option(name).flags[-1], text]).flags[name], text)


# ----- llm.c's reproductions ------------------------------------------------------------------------------------------


class Published(NamedTuple):
    """What llm.c says of one of its reproductions, of another program than this one. None: it does not say."""

    preset: str
    gpu: str
    devices: int
    step: float  # seconds
    steps: int
    hours: float
    usd: float | None
    source: str


# The comments of llm.c's scripts name GPUs, seconds of a step, hours and money.
REPRODUCTIONS = (
    Published("gpt2-124M", "a100", 8, 0.300, 18_865, 94 / 60, 20, "scripts/run_gpt2_124M.sh, discussion #481"),
    Published("gpt2-124M", "h100", 8, 0.140, 19_560, 45 / 60, None, "modded-nanogpt's log of llm.c, 13 October 2024"),
    Published("gpt2-350M", "a100", 8, 0.820, 60_000, 13.7, 200, "scripts/run_gpt2_350M.sh"),
    Published("gpt2-774M", "a100", 8, 1.700, 286_102, 5.6 * 24, 2000, "scripts/run_gpt2_774M.sh"),
    Published("gpt2-1558M", "h100", 8, 2.750, 32_000, 24, 672, "scripts/run_gpt2_1558M.sh, discussion #677"),
)


class Reproduction(NamedTuple):
    """One of llm.c's launches: as it says, and as this program would do it."""

    published: Published
    row: Row


def reproductions() -> Iterator[Reproduction]:
    """Yield llm.c's launches on the GPUs that it had."""
    for each in REPRODUCTIONS:
        config = replace(asked_config(["--preset", each.preset]), devices=each.devices)
        yield Reproduction(each, look(("preset", each.preset, config, each.gpu), each.gpu, Wishes()))
