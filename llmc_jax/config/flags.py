"""Words of the command line to values of `TrainConfig`. Leaves out `--help` and what runs (run/command.py)."""

import shlex
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError, raise_problems
from llmc_jax.base.options import Option, problems_together, read_value, show_value
from llmc_jax.config.checks import validate
from llmc_jax.config.presets import DEFAULT_PRESET, PRESETS
from llmc_jax.config.train import (
    AUTO_BATCH,
    DATA,
    DEVICES,
    EVALUATION,
    OPTIONS,
    OUTPUT,
    PROCESSES,
    START,
    TRACKERS,
    TrainConfig,
)

# Flags that show something and run nothing.
SHOW_ALONE = (
    Option("help", bool, False, ("--help",), START, "this text", switch=True),
    Option("help_markdown", bool, False, ("--help-markdown",), START, "this text as Markdown, as in docs/flags.md",
           switch=True),
    Option("version", bool, False, ("--version",), START, "the versions of this program, Python and JAX", switch=True),
)  # fmt: skip
LIKENESS = 0.82  # of two flags, by difflib: a typing mistake or two


def parse_args(argv: Sequence[str]) -> TrainConfig:
    """Return the configuration that a command line (without the program's name) describes.

    No words at all are the preset `demo`. Otherwise llm.c's defaults hold, a preset changes them, and flags have the
    last word; of a flag that stands twice the later one counts.
    Raises one InputError with all flags that do not exist and all values that their flags cannot have.
    """
    return given_options(argv).config


class Given(NamedTuple):
    """The options that a command line names: by a preset, and by flags, which have the last word."""

    preset: dict[str, Any]
    flags: dict[str, Any]

    @property
    def config(self) -> TrainConfig:
        """Return them and, for all else, llm.c's defaults."""
        return replace(TrainConfig(), **self.preset | self.flags)


def given_options(argv: Sequence[str]) -> Given:
    """Return the options that a command line names; see `parse_args`."""
    values, problems = _read(argv or ["--preset", DEFAULT_PRESET], OPTIONS)
    given = {about.name: value for about, value in values}
    name, preset = given.get("preset"), dict[str, Any]()
    if name in PRESETS:
        preset = {"preset": name} | given_options(shlex.split(PRESETS[name].flags)).flags
    elif name is not None:
        problems.append(f"--preset {name}: unknown preset; known are {', '.join(PRESETS)}")
    raise_problems(problems)
    return Given(preset, given)


def _read(
    argv: Sequence[str], options: Iterable[Option], rest: list[str] | None = None
) -> tuple[list[tuple[Option, Any]], list[str]]:
    """Return the options and values that words give, and problems; where there is a rest, unknown words go there.

    Done by hand because argparse reads `-ge1` and `-ix foo` as `-g e1` and `-i x`, takes some negative values for
    flags, and reports one problem at a time. Here a flag is its exact spelling, and the word after it, or after the
    equals sign, is its value.
    """
    by_flag = {flag: about for about in options for flag in about.flags}
    given, problems = list[tuple[Option, Any]](), list[str]()
    left = deque(argv)
    while left:
        word = left.popleft()
        flag, equals, value = word.partition("=")
        about, following = by_flag.get(flag), left[0] if left else None
        if about is None and rest is not None:
            rest.append(word)
        elif about is None:
            problems.append(_unknown(word))
            while word.endswith(".bin") and left and left[0].endswith(".bin"):  # the shell's words for one pattern
                left.popleft()
            if flag.startswith("-") and not equals and following is not None and not following.startswith("-"):
                left.popleft()  # most likely the value of what is not a flag
        elif not about.switch and not equals and (following is None or following in by_flag):
            problems.append(_without_value(flag, about, following))
        else:
            text = value if equals else "1" if about.switch else left.popleft()
            try:
                given.append((about, read_value(about, flag, text)))
            except InputError as error:
                problems.append(str(error))
    return given, problems


def _unknown(word: str) -> str:
    if not word.startswith("-"):
        pattern = "; quote a pattern, as in -i 'train_*.bin'" if word.endswith(".bin") else ""
        return f"{show_value(word)}: a value without a flag; write every value after its flag, as in -b 4{pattern}"
    import difflib  # here, because only mistakes need it

    flag = word.partition("=")[0]
    known = [each for about in (*OPTIONS, *SHOW_ALONE) for each in about.flags]
    near = difflib.get_close_matches(flag.replace("_", "-"), known, n=1, cutoff=LIKENESS)
    return f"{show_value(flag)}: unknown flag; {f'did you mean {near[0]}? ' if near else ''}--help lists all"


def _without_value(flag: str, about: Option, following: str | None) -> str:
    found = "nothing does" if following is None else f"{following} does"
    advice = ", or --help for help" if flag == "-h" else ""
    return f"{flag}: its value must follow, but {found}; write {flag} {about.value_name}{advice}"


# ----- programs with flags of their own beside train.py's ------------------------------------------------------------


def take_own(argv: Sequence[str], table: Sequence[Option]) -> tuple[SimpleNamespace, list[str]]:
    """Return the values of a program's own flags, by name, and the words that are left for train.py's.

    Raises one InputError with all values that its own flags cannot have, or all flags that cannot be together.
    """
    rest = list[str]()
    given, problems = _read(argv, table, rest)
    values = {about.name: about.default for about in table}
    for about, value in given:
        values[about.name] = [*values[about.name], value] if isinstance(about.default, list) else value
    raise_problems(problems or problems_together(table, {about.name for about, value in given if value is not False}))
    return SimpleNamespace(**values), rest


def models_not_asked_for() -> set[str]:
    """Return what -e is without a user's word: its default, and what presets say."""
    named = (given_options(shlex.split(preset.flags)).flags.get("model") for preset in PRESETS.values())
    return {TrainConfig().model, *filter(None, named)}


# ----- a step alone -------------------------------------------------------------------------------------------------

STEP_MODEL = "d12"  # GPT-2 124M, the shape of the gpt2_124M.bin that llm.c's trainers start from
NOT_HERE = {
    DATA: "reads no data",
    OUTPUT: "writes no run",
    TRACKERS: "writes no run",
    EVALUATION: "evaluates nothing",
    DEVICES: "uses one device",
    PROCESSES: "uses one process",
}


def step_config(words: Sequence[str]) -> TrainConfig:
    """Return the configuration of the step that train.py's flags describe. Raises InputError.

    Without -e the model is the preset's, or STEP_MODEL where none is named.
    """
    given = given_options(["-e", STEP_MODEL, *words])
    groups = {flag: about.group for about in OPTIONS for flag in about.flags}
    for flag in (word.partition("=")[0] for word in words):
        if groups.get(flag) in NOT_HERE:
            raise InputError(f"{flag}: a profile {NOT_HERE[groups[flag]]}; leave it out")
    model = given.preset.get("model", STEP_MODEL)
    if model.endswith(".bin") and not Path(model).exists():  # weights are random here: a shape does for a file
        model = STEP_MODEL
    # what a profile leaves out need not fit the model
    config = replace(parse_args(["-e", model, *words]), sample_every=0, val_every=0, devices=1)
    if config.batch_size == AUTO_BATCH:
        raise InputError("-b auto: a profile takes a number; the table that train.py begins with says which auto is")
    validate(config)
    return config
