"""Configurations near one, or along one option: a row of figures for each; and llm.c's four reproductions.

All computed, nothing compiled; as tables of text, and a sweep as a picture: speed, memory and cost beside each other,
with the ends of each estimate. matplotlib is imported when it is drawn, without pyplot. Leaves out the figures of one
configuration (answer.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base import text
from llmc_jax.base.errors import InputError
from llmc_jax.base.pictures import PALETTE, drawable, save_figure
from llmc_jax.config.flags import given_options
from llmc_jax.config.model import divisors
from llmc_jax.config.train import AUTO_BATCH, OPTIONS, TrainConfig
from llmc_jax.machine.cards import named, short_name
from llmc_jax.machine.gpus import TARGETS
from llmc_jax.plan.answer import Wishes, answer, place_here
from llmc_jax.plan.asked import asked_config
from llmc_jax.plan.course import Course
from llmc_jax.plan.interval import Interval, certain
from llmc_jax.plan.report import amount, three
from llmc_jax.plan.search import STAGES

GPU = "gpu"  # what differs, or is swept, where it is no option
LEVELS = (0, 1, 2)  # of -r
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
    """Return what a configuration takes on a GPU, or why it cannot be; None: on the device at hand.

    own: the GPU that the wishes are of: their price is of that one alone, of another the table's. Raises InputError
    where nothing differs: then it is what is asked.
    """
    differs, value, config, gpu = wish
    row = Row(
        differs, value, gpu, max(1, config.devices), config.batch_size, config.recompute, config.zero_stage, None, ""
    )
    try:
        price = wanted.price if _plain(gpu) == own else None
        found = answer(config, gpu, wanted._replace(quick=True, price=price), largest=False)
    except InputError as error:
        if not differs:
            raise
        return row._replace(problem="; ".join(line.strip() for line in str(error).splitlines()))
    size, memory, step = found.setting.batch_size, found.memory, found.step
    figures = Figures(
        size, memory.fits, memory.program, memory.available, step.seconds, step.tokens_per_second, found.course
    )
    return row._replace(batch_size=size, figures=figures)


def _plain(gpu: str | None) -> str | None:
    """Return the short name of a GPU; None: the device at hand. Raises InputError."""
    return None if gpu is None else short_name(named(gpu))


def _counted(config: TrainConfig, gpu: str | None) -> TrainConfig:
    """Return a configuration with its number of devices: one GPU, or those at hand, where it does not say."""
    return replace(config, devices=config.devices or (place_here().devices if gpu is None else 1))


def fitted(config: TrainConfig, changed: str = "") -> TrainConfig:
    """Return a configuration with the largest -b up to its own that divides its -d, where one is given.

    changed: the option that was changed; batch_size stays as it was asked for, and so does auto.
    """
    rows, left = divmod(config.total_batch_size, config.sequence_length * max(1, config.devices))
    if config.batch_size == AUTO_BATCH or config.total_batch_size == -1 or left or changed == "batch_size":
        return config
    return replace(config, batch_size=next(size for size in divisors(rows) if size <= config.batch_size))


# ----- neighbours and sweeps ------------------------------------------------------------------------------------------


def neighbours(config: TrainConfig, gpu: str | None, wanted: Wishes) -> tuple[Row, ...]:
    """Return the figures of a configuration and of those near it, the asked one first. gpu: None: the device at hand.

    Raises InputError for what is asked; others that cannot be are rows that say so.
    """
    gpu = _plain(gpu)
    return tuple(look(wish, gpu, wanted) for wish in wishes(_counted(config, gpu), gpu))


def wishes(config: TrainConfig, gpu: str | None) -> Iterator[Wish]:
    """Yield what is asked; then other GPUs, numbers of them, half and twice the -b, other -r and -z.

    One GPU asks for no -z, since it has nothing to split the state with: several in its place take -z 1.
    """
    yield "", "", config, gpu
    yield from ((GPU, name, config, name) for name in TARGETS if name != gpu)
    alone, most = config.devices == 1, max(8, 2 * config.devices)
    sizes = [size for size in (config.batch_size // 2, 2 * config.batch_size) if size]
    near: dict[str, Iterable[int]] = {
        "devices": [power for power in (2**n for n in range(16)) if power <= most] if gpu is not None else (),
        "batch_size": [size for size in sizes if fitted(replace(config, batch_size=size)).batch_size == size],
        "recompute": LEVELS if not config.recompute_blocks else (),
        "zero_stage": STAGES if not alone else (),
    }
    several = replace(config, zero_stage=max(1, config.zero_stage)) if alone else config
    for name, values in near.items():
        base = several if name == "devices" else config
        for value in (each for each in values if each != getattr(config, name)):
            change: dict[str, Any] = {name: value}
            yield name, str(value), fitted(replace(base, **change), name), gpu


Sweep = tuple[str, dict[str, Any]]  # an option, or gpu, and its values by how they were written


def parse_sweep(text: str) -> Sweep:
    """Return the sweep that `devices=1,2,4`, `b=8,16` or `gpu=h100,a100` describes. Raises InputError."""
    word, equals, listed = text.partition("=")
    values = dict.fromkeys(value.strip() for value in listed.split(","))
    if not equals or "" in values:
        raise InputError(f"--sweep {text}: expected an option and its values, as in devices=1,2,4,8 or gpu=h100,a100")
    if len(values) > MOST_VALUES:
        raise InputError(f"--sweep {word}: {len(values)} values; expected at most {MOST_VALUES}")
    if word == GPU:
        return GPU, {value: value for value in values}
    plain = word.strip().lstrip("-").replace("-", "_")
    for about in OPTIONS:
        if plain in (about.name, *(flag.lstrip("-").replace("-", "_") for flag in about.flags)):
            read = {value: given_options([about.flags[-1], value]).flags[about.name] for value in values}
            return about.name, read
    raise InputError(f"--sweep {word}: there is no such option; take gpu, or one of train.py's, such as devices, b, r")


def swept(config: TrainConfig, gpu: str | None, sweep: Sweep, wanted: Wishes) -> tuple[Row, ...]:
    """Return the figures of a configuration with each value of a sweep, its -b lowered to what -d allows."""
    (name, values), own = sweep, _plain(gpu)
    config = _counted(config, next(iter(values)) if name == GPU else own)
    if name == GPU:
        return tuple(look((GPU, each, config, each), own, wanted) for each in values)
    changed = ((text, fitted(replace(config, **{name: value}), name)) for text, value in values.items())
    return tuple(look((name, text, each, own), own, wanted) for text, each in changed)


# ----- as a table -----------------------------------------------------------------------------------------------------

HEADINGS = ("", "GPU", "GPUs", "-b", "-r", "-z", "fits", "GiB", "step ms", "tok/s", "hours", "kWh", "USD")
OPTIONAL = ("-z", "kWh", "GiB", "step ms")


def rows_table(rows: Sequence[Row], width: int | None = None) -> str:
    """Return rows as a table, what was asked marked, with what could not be and why below it."""
    table = text.table(HEADINGS, map(_cells, rows), left=("", "GPU", "fits"), optional=OPTIONAL, width=width)
    notes = [f"{row.differs} {row.value}: {row.problem}" for row in rows if row.problem]
    runs = [row.figures.course for row in rows if row.figures and row.figures.course]
    days = sorted({run.price.date for run in runs if run.price and run.price.date})
    of = f", at prices of {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""
    notes.append(f"Typical values{of}; --json has the low and the high ones too.")
    return "\n".join([table, "", *(text.wrapped(each, width) for each in notes)])


def _cells(row: Row) -> list[str]:
    what = f"{row.differs} {row.value}" if row.differs else "asked"
    begin = [what, row.gpu or "here", str(row.devices), str(row.batch_size), str(row.recompute), str(row.zero_stage)]
    found = row.figures
    if found is None:
        return [*begin, "cannot be"]
    run, size = found.course, found.program / 2**30
    return [
        *begin, {True: "yes", False: "no", None: "?"}[found.fits], f"{size:,.1f}" if size >= 1 else three(size),
        three(1e3 * found.step.typical), amount(found.tokens_per_second.typical),
        *(map(_typical, (run.seconds.times(1 / 3600), run.kwh, run.usd)) if run else ()),
    ]  # fmt: skip


def _typical(value: Interval | None) -> str:
    return "" if value is None else three(value.typical)


# ----- a sweep as a picture -------------------------------------------------------------------------------------------

FITS, TOO_LARGE, LIMIT = PALETTE[:3]
MEMORY = "memory of a step, GiB"
# What stands beside each other: heading and values.
PANELS: dict[str, Callable[[Figures], Interval | None]] = {
    "tokens a second, thousands": lambda each: each.tokens_per_second.times(1e-3),
    MEMORY: lambda each: certain(each.program / 2**30),
    "the run, hours": lambda each: each.course and each.course.seconds.times(1 / 3600),
    "the run, USD": lambda each: each.course and each.course.usd,
}


def title_of(over: str, model: str, gpu: str | None) -> str:
    """Return what all of a sweep has in common: its model and its GPU, without the one that it is over."""
    common = {"model": model, "gpu": gpu or "the device at hand"}
    return " on ".join(value for name, value in common.items() if name != over)


def draw_sweep(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the rows of a sweep into a PNG, SVG or PDF. Raises InputError where none of them can be."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [(drawable(row.value), row.figures) for row in rows if row.figures is not None]
    if not bars:
        raise InputError(f"--picture {path}: none of the sweep can run; {rows[0].problem}")
    panels = [heading for heading, value in PANELS.items() if any(value(figures) for _, figures in bars)]
    figure = Figure(figsize=(max(7.5, 3.4 * len(panels) + 0.25 * len(bars)), 4.4), dpi=110, layout="constrained")
    for axes, heading in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, bars, heading)
        axes.set_xlabel(rows[0].differs)
    unfit = [Patch(color=TOO_LARGE, label="does not fit")] if any(each.fits is False for _, each in bars) else []
    handles: list[Any] = [
        Patch(color=FITS, label="typical"), *unfit,
        Line2D([], [], color=LIMIT, marker="|", ms=9, lw=0, label="from low to high"),
        Line2D([], [], color=LIMIT, lw=1.6, label="memory that JAX may take"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncol=len(handles), frameon=False, fontsize=8.5)
    figure.suptitle(drawable(title), fontsize=11, fontweight="bold")
    save_figure(figure, path)


def _draw_panel(axes: Any, bars: Sequence[tuple[str, Figures]], heading: str) -> None:
    for at, (_, figures) in enumerate(bars):
        if (found := PANELS[heading](figures)) is None:
            continue
        axes.bar(at, found.typical, width=0.62, color=TOO_LARGE if figures.fits is False else FITS)
        if found.low < found.high:
            axes.vlines(at, found.low, found.high, color=LIMIT, lw=1.1)
        if heading == MEMORY and figures.available is not None:
            axes.hlines(figures.available / 2**30, at - 0.42, at + 0.42, color=LIMIT, lw=1.6)
    names = [name for name, _ in bars]
    tilted = {"rotation": 45, "ha": "right"} if max(map(len, names)) * len(names) > 24 else {}
    axes.set_xticks(range(len(names)), names, fontsize=8.5, **tilted)
    axes.set_title(heading, fontsize=10)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


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


def reproductions() -> Iterator[tuple[Published, Row]]:
    """Yield what llm.c says of each of its launches, on the GPUs that it had, and what this program would take."""
    for each in REPRODUCTIONS:
        config = replace(asked_config(["--preset", each.preset]), devices=each.devices)
        yield each, look(("preset", each.preset, config, each.gpu), each.gpu, Wishes())


def reproductions_table(found: Sequence[tuple[Published, Row]], width: int | None = None) -> str:
    """Return llm.c's launches as a table: what it says beside what this program would take, and what says so."""
    headings = ("preset", "on", "steps", "step s", "llm.c's", "hours", "llm.c's ", "USD", "llm.c's  ", "-b", "GiB")
    table = text.table(headings, [_reproduction(*each) for each in found], left=("preset", "on"), width=width)
    notes = [f"{said.preset} on {said.gpu}: {row.problem}" for said, row in found if row.problem]
    notes += ["llm.c's figures:", *(f"{said.preset} on {said.gpu}: {said.source}" for said, _ in found)]
    return "\n".join([table, "", *(text.wrapped(each, width) for each in notes)])


def _reproduction(said: Published, row: Row) -> list[str]:
    begin, found = [said.preset, f"{said.devices} x {said.gpu}"], row.figures
    if found is None or found.course is None:
        return [*begin, "", "", f"{said.step:.3f}", "", three(said.hours)]
    run = found.course
    return [
        *begin, f"{run.length.steps:,}", f"{found.step.typical:.3f}", f"{said.step:.3f}",
        three(run.seconds.typical / 3600), three(said.hours), _typical(run.usd),
        "" if said.usd is None else three(said.usd), str(row.batch_size), f"{found.program / 2**30:,.1f}",
    ]  # fmt: skip
