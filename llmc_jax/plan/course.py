"""The course of a run: its steps and tokens, how long they take, and money.

Leaves out saves, samples, HellaSwag and compiling, which a few minutes hold as a rule, and hours in which nothing runs.
"""

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import matching
from llmc_jax.base.numbers import Interval, total
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.tokenfile import expand_pattern, open_token_file

if TYPE_CHECKING:
    from llmc_jax.plan.time import StepTime

HOUR = 3600.0
LEFT_OUT = ("saves", "samples", "HellaSwag", "compiling")
Source = Literal["--tokens", "-x", "files", "published"]


class Data(NamedTuple):
    """How many tokens the training data has. source: its files' headers, or what is published of files not here."""

    tokens: int
    source: Source
    note: str  # which files, or who says so


class Price(NamedTuple):
    """What an hour of one GPU costs."""

    usd: float
    provider: str
    date: str  # on which it was read, YYYY-MM-DD; empty for one of --price
    source: str


class Length(NamedTuple):
    """The number of steps that a run makes. source: what says so."""

    steps: int
    tokens: int
    epochs: float | None  # None: how much data there is is not known
    source: Source
    note: str


class Course(NamedTuple):
    """Steps, time and cost of a run."""

    length: Length
    validations: int  # passes over -m batches, forward alone
    seconds: Interval  # training and validations
    validating: Interval  # of these, validations
    gpu_hours: Interval
    usd: Interval | None
    price: Price | None
    left_out: tuple[str, ...]  # validations with -m -1 too, whose batches depend on -j


def course(
    step: Interval,
    config: TrainConfig,
    forward: Interval,
    *,
    tokens: float | None = None,
    data: Data | None = None,
    price: Price | None = None,
) -> Course | None:
    """Return steps, time and cost of a run; None where nothing says how many steps it makes.

    step: seconds of one. forward: seconds of a micro-batch's forward. tokens: to train on, in place of -x.
    data: `data_of(config)`. price: None: money is not known.
    Raises InputError for tokens that make no step.
    """
    length = length_of(config, tokens, data)
    if length is None:
        return None
    every, steps = config.val_every, length.steps
    validations = steps // every + 1 + (steps % every > 0) if every else 0
    batches = -(-max(0, config.val_batches) * config.reading_processes // max(1, config.devices))
    validating = forward.times(validations * batches)
    seconds = total([step.times(steps), validating])
    gpu_hours = seconds.times(max(1, config.devices) / HOUR)
    return Course(
        length, validations, seconds, validating, gpu_hours,
        None if price is None else gpu_hours.times(price.usd), price,
        LEFT_OUT if config.val_batches >= 0 or not validations else (*LEFT_OUT, "validations"),
    )  # fmt: skip


def forward_of(step: "StepTime", micro_batches: int) -> Interval:
    """Return the seconds of the forward of one micro-batch, its share of the gaps between kernels included."""
    found = [each for each in step.operations if each.phase == "forward"]
    gaps = step.gaps.times(sum(each.launches for each in found) / max(1, step.launches))
    return total([gaps, *(each.seconds for each in found)]).times(1 / micro_batches)


# ----- steps ----------------------------------------------------------------------------------------------------------

# Tokens of the files that -i names where they are not here, by a part of their path.
PUBLISHED = {
    "fineweb10B/fineweb_train": (10_255_073_280, "llm.c's log of a run of one epoch: 19,560 steps of 524,288 tokens"),
    "edu_fineweb10B/edu_fineweb_train": (10_000_000_000, "FineWeb-Edu's sample 10BT, as it is named"),
    "edu_fineweb100B/edu_fineweb_train": (100_000_000_000, "FineWeb-Edu's sample 100BT, as it is named"),
    "fineweb100B/fineweb_train": (100_000_000_000, "FineWeb's sample 100BT, as it is named"),
    "TinyStories_train": (925_653_391, "llm.c's dev/data/tinystories.py"),
    "tiny_shakespeare_train": (305_260, "llm.c's dev/data/tinyshakespeare.py"),
    "openwebtext/openwebtext_train": (9_000_000_000, "llm.c and nanoGPT: about 9 G tokens"),
}


def length_of(config: TrainConfig, tokens: float | None = None, data: Data | None = None) -> Length | None:
    """Return how many steps a run makes, by --tokens, -x or one epoch of its data; None where nothing says it."""
    each = config.tokens_per_step
    source: Source
    if tokens is not None:
        if not each <= tokens < math.inf:
            raise InputError(f"--tokens {tokens:g}: expected at least one update's tokens, which are {each}")
        steps, source, note = int(tokens // each), "--tokens", f"--tokens {tokens:,.0f}"
    elif config.max_steps >= 0:
        steps, source, note = config.max_steps, "-x", f"-x {config.max_steps}"
    elif data is None:
        return None
    elif data.tokens < each:
        raise InputError(
            f"-d {each}: one update takes more tokens than the training data holds ({data.tokens}); lower -d, give "
            "more data, or say how many steps to make with -x"
        )
    else:
        steps, source, note = data.tokens // each, data.source, data.note
    return Length(steps, steps * each, None if data is None else steps * each / data.tokens, source, note)


def data_of(config: TrainConfig) -> Data | None:
    """Return how much a run's training data is, by its files' headers, or by what is published of files not here.

    None: nothing says it, as where no data is named: what train.py then takes is not what a plan is about. The built-in
    corpus is made if it is not there yet and the run's length depends on it.
    Raises InputError and FormatError for files that cannot be read.
    """
    name, flag = (config.val_data, "-j") if config.overfit else (config.train_data, "-i")
    if name in (TrainConfig().train_data, TrainConfig().val_data) and not config.preset:
        return None
    if name == "stdlib":
        if config.max_steps >= 0:
            return None
        from llmc_jax.data.corpora import stdlib_corpus  # here, because no other data needs it

        corpus = stdlib_corpus()
        return Data(_tokens_of(corpus.val if config.overfit else corpus.train), "files", corpus.description)
    if matching(name):
        paths = expand_pattern(name, flag)
        return Data(sum(map(_tokens_of, paths)), "files", f"{flag} {name}")
    found = (Data(tokens, "published", said) for part, (tokens, said) in PUBLISHED.items() if part in name)
    return next(found, None)


def _tokens_of(path: Path) -> int:
    with open_token_file(path) as file:
        return file.num_tokens


# ----- money ----------------------------------------------------------------------------------------------------------


def price_of(name: str | None, own: float | None = None) -> Price | None:
    """Return what an hour of a GPU costs by its short name; None for one without a row. own: of --price, counts more.

    Raises InputError for a price that is none.
    """
    if own is None:
        return prices().get(name or "")
    if not 0 <= own < math.inf:
        raise InputError(f"--price {own:g}: expected USD for an hour of one GPU, 0 or more")
    return Price(own, "--price", "", "--price")


@cache
def prices() -> dict[str, Price]:
    """Return prices by short name, as prices.toml has them."""
    read = tomllib.loads(Path(__file__).with_name("prices.toml").read_text("utf-8"))
    return {
        row["name"]: Price(row["usd"], row["provider"], row["date"].isoformat(), row["source"]) for row in read["gpu"]
    }
