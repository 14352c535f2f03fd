"""What an option is, a field of `TrainConfig` or a flag of another command: its documentation, check, values.

Leaves out which options there are, and how the words of a command line are told apart (config/flags.py, parsers.py).
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Set
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import check_output

SCREEN = "-"  # in the place of a file to be written: standard output, where a flag takes that
INT_MAX = 2**31 - 1  # llm.c's options are C ints, and the step number is an int32 on the device

# What another value can change: the compiled step; what the step is given beside its tokens (weights, learning rate);
# the tokens that an update takes; all around the step (evaluation, screen, files, processes, when the run ends).
Reach = Literal["program", "numbers", "data", "process"]
# What -y 1 does about a value that is not the checkpoint's: refuses it, reports it, nothing. What an option stands for
# (the model, the data, the dtype, the tokens and the number of steps) is compared for itself, so it is free.
Resume = Literal["must match", "said", "free"]


class Check(NamedTuple):
    """A condition on a value beyond its type."""

    holds: Callable[[Any], bool]
    words: str  # completes "must be ..."


def at_least(low: float, words: str = "") -> Check:
    return Check(lambda value: value >= low, words or f"at least {low:g}")


def minus_one_or_at_least(low: int, minus_one: str) -> Check:
    return Check(lambda value: value == -1 or value >= low, f"at least {low}, or -1 ({minus_one})")


def parse_slice(text: str) -> tuple[int, int] | None:
    """Return `START:STOP` as two step numbers; None if it is none, or empty."""
    match = re.fullmatch("([0-9]+):([0-9]+)", text)
    return (int(match[1]), int(match[2])) if match and int(match[1]) < int(match[2]) else None


def parse_rates(text: str) -> tuple[float, float] | None:
    """Return `LOW:HIGH` as two learning rates that the device's float32 can tell apart; None if it is none."""
    number = r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?)"
    match = re.fullmatch(f"{number}:{number}", text)
    if match is None:
        return None
    low, high = float(match[1]), float(match[2])
    return (low, high) if low >= 1e-12 and 1.01 * low <= high <= 1e3 else None


def parse_address(text: str) -> tuple[str, int] | None:
    """Return the host and the port of `HOST`, `HOST:PORT`, `[::1]` or `[::1]:PORT`; port 0: none given.

    None if it is none of these, or empty.
    """
    match = re.fullmatch(r"([^\s:/\[\]]+)(?::([0-9]{1,5}))?|\[([0-9a-fA-F:.%\w]+)\](?::([0-9]{1,5}))?", text)
    if match is None:
        return (text, 0) if re.fullmatch("[0-9a-fA-F]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*", text) else None
    port = match[2] or match[4]
    if port is not None and not 0 < int(port) < 2**16:
        return None
    return match[1] or match[3], int(port or 0)


ZERO_IS_OFF = at_least(0, "at least 0 (0 = off)")
FRACTION = Check(lambda value: 0 <= value <= 1, "between 0 and 1")
BELOW_ONE = Check(lambda value: 0 <= value < 1, "at least 0 and below 1")
ABOVE_ZERO = Check(lambda value: value > 0, "above 0")
NOT_EMPTY = Check(lambda value: value != "", "given, not empty")
SLICE = Check(
    lambda value: value == "" or parse_slice(value) is not None,
    "two step numbers with a colon between them, the lower one first: 10:15",
)
# In a name that is none: an address, user:password@, a key of many digits. Such a value may be a secret.
CREDENTIAL = re.compile(r"://|[^\s/]:[^\s/]*@|[0-9a-fA-F]{32}|wandb_v\d|api[-_]?key\s*=", re.IGNORECASE)
TRACKED = Check(
    lambda value: value.isprintable() and len(value) <= 200 and not CREDENTIAL.search(value),
    "a name of up to 200 characters, without address, password or key: these belong in the tracker's own environment "
    "(docs/trackers.md)",
)
RATES = Check(
    lambda value: parse_rates(value) is not None,
    "two rates from 1e-12 to 1000 with a colon between them, the lower one first: 1e-6:1",
)
ADDRESS = Check(
    lambda value: value == "" or parse_address(value) is not None,
    "a host, and a port from 1 to 65535 if need be: node1, 10.0.0.1:12345, [fe80::1]:12345",
)


class Option(NamedTuple):
    """All there is to know about one field of TrainConfig, or one flag of another command."""

    name: str
    type: type  # int, float, str, or bool (0 or 1 on the command line)
    default: Any
    flags: tuple[str, ...]  # spellings, llm.c's first; the readable one begins with two dashes
    group: str
    meaning: str
    reaches: frozenset[Reach] = frozenset()
    resume: Resume = "free"
    unit: str = ""
    value: str = ""  # how a value is called in --help, where its type does not say it
    choices: tuple[Any, ...] = ()
    check: Check | None = None
    switch: bool = False  # stands alone, without a value
    auto: int | None = None  # the value that the word auto stands for
    of_this_start: bool = False  # never taken from the start before, where a run resumes
    is_path: bool = False  # its value names a file, a folder or a pattern of them
    # It names a file to be written, whose name ends in one of these, with spaces between; *: anyhow; -: or the screen.
    writes: str = ""
    hides: bool = False  # a value that it cannot have is not shown: it may be a secret
    off_in_test: bool = False  # --find-lr does without it
    most: int = INT_MAX  # of whole numbers
    read: Callable[[str], Any] | None = None  # makes a word a value, in place of what its type does; raises InputError
    alone: Any = None  # its value where it stands without one, if it may
    excludes: str = ""  # names of those that it cannot be given with, with spaces between
    why: str = ""  # it excludes or needs them
    needs: str = ""  # it is given only with one of these

    @property
    def long_flag(self) -> str:
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[-1])

    @property
    def noun(self) -> str:
        return self.long_flag.lstrip("-").replace("-", " ")

    @property
    def value_name(self) -> str:
        """Return how its value is called in --help; empty for a switch."""
        if self.value or self.switch:
            return self.value
        if self.choices:
            return "|".join(map(str, self.choices))
        if self.auto is not None:
            return "N|auto"
        return {int: "N", float: "X", bool: "0|1", str: self.name.upper()}[self.type]

    @property
    def shown_default(self) -> str:
        """Return the default as it is written on the command line; empty where it says nothing."""
        return "" if self.switch or self.default in ("", None, []) else self.show(self.default)

    def show(self, value: object) -> str:
        """Return one of its values as it is written on the command line."""
        if self.hides and value_problem(self, value):
            return "(not shown)"
        return "auto" if self.auto is not None and value == self.auto else show_value(value)


def option(default: Any, flags: str, group: str, reaches: Set[Reach], resume: Resume, meaning: str, **more: Any) -> Any:
    """Return a field of TrainConfig that carries its own documentation and checks; more: further ones of Option's."""
    about = {"flags": tuple(flags.split()), "group": group, "reaches": frozenset(reaches), "resume": resume}
    return field(default=default, metadata={**about, "meaning": meaning, **more})


TYPE_WORDS = {int: "a whole number", float: "a number", bool: "0 or 1", str: "text"}


def value_problem(about: Option, value: object) -> str | None:
    """Return why an option cannot have this value ("must be …"), or None if it can."""
    expected = (int, float) if about.type is float else about.type
    if not isinstance(value, expected) or (isinstance(value, bool) and about.type is not bool):
        return f"must be {TYPE_WORDS[about.type]}{'' if about.auto is None else ' or auto'}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    if isinstance(value, int) and value > about.most:
        return f"must be at most {about.most}"
    if about.choices and value not in about.choices:
        return f"must be one of {', '.join(map(str, about.choices))}"
    if about.check and not about.check.holds(value):
        return f"must be {about.check.words}"
    return None


def field_problem(about: Option, value: object) -> str | None:
    """Return why a field cannot have this value, or None if it can: what auto stands for counts here as well."""
    return None if type(value) is int and value == about.auto else value_problem(about, value)


def show_value(value: object) -> str:
    """Return a value as it is written on the command line; quoted where it would not be visible."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def read_value(about: Option, flag: str, text: str) -> Any:
    """Return the option's value out of the word behind a flag. Raises InputError that says what it must be."""
    try:
        value = about.read(text) if about.read else _value(about, text)
    except InputError as error:
        raise InputError(f"{flag} {about.show(text) if about.hides else show_value(text)}: {error}") from error
    allowed = about.writes.split()
    if allowed and not (text == SCREEN and SCREEN in allowed):
        hint = f"; for the screen put {flag} last" if about.alone == SCREEN else ""
        check_output(flag, Path(value), [each for each in allowed if each.startswith(".")], hint)
    return value


def _value(about: Option, text: str) -> Any:
    """Return the option's value out of a word. Raises InputError that says what it must be.

    That of a switch is mostly left out: `--no-save`, or `--no-save=1`; `--no-save=0` is as without it.
    """
    if about.switch:
        if text not in ("0", "1"):
            raise InputError(f"takes no value but 0 and 1; write {about.flags[0]} alone")
        return bool(about.default) if text == "0" else not about.default
    if about.auto is not None and text == "auto":
        return about.auto
    value = _as_type(about.type, os.path.expanduser(text) if about.is_path else text)
    problem = value_problem(about, value)
    if problem is None:
        return value
    raise InputError(f"{about.noun} {problem}")


_FORMS = {
    int: r"[+-]?[0-9]{1,20}", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", bool: "[01]", str: "(?s:.*)",
    Path: "(?s:.*)",
}  # fmt: skip


def _as_type(kind: type, text: str) -> Any:
    """Return a word as a value of a type; what is none stays text, which value_problem then refuses."""
    if not re.fullmatch(_FORMS[kind], text):
        return text
    return text == "1" if kind is bool else kind(text)


def without_credentials(text: str) -> str:
    """Return text without what stands between :// and @ in addresses: a name, a password, a token."""
    return re.sub(r"(?<=://)[^/\s]+(?=@)", "…", text)


# ----- flags of one command alone -----------------------------------------------------------------------------------

# The types of values, by how --help calls them; all others are text.
KINDS: dict[str, type] = {
    "": bool,
    **dict.fromkeys(("N", "B", "T", "V", "ID", "PORT"), int),
    **dict.fromkeys(("X", "F", "GBIT", "SECONDS"), float),
    **dict.fromkeys(("RUN", "CHECKPOINT", "FOLDER", "STATE", "IN", "OUT"), Path),
}
PATHS = ("FILE", "DIR", "SPEC", "INPUT", "PATH", *(name for name, kind in KINDS.items() if kind is Path))


def own(flags: str, value: str, default: Any, meaning: str, least: float | None = None, **more: Any) -> Option:
    """Return a flag, or an argument, that train.py does not have.

    flags: its spellings, the readable one last; an argument has no dashes. value: how its value is called (see KINDS);
    empty: it takes none; A|B: one of these; FILE...: several; [N]: may be left out. default: a list where a flag may be
    given any number of times. least: of a number; of a whole one 1, where nothing else is said. more: of Option.
    """
    spelled, called = flags.split(), value.strip("[.]")
    kind = more.pop("type", KINDS.get(called, str))
    if least is None and kind is int:
        least = 1
    about = {
        "name": spelled[-1].lstrip("-").replace("-", "_"), "type": kind, "default": default, "flags": tuple(spelled),
        "group": "", "meaning": meaning, "value": value, "check": None if least is None else at_least(least),
        "choices": tuple(map(kind, called.split("|"))) if "|" in called else (), "switch": kind is bool,
        "is_path": called in PATHS,
        "most": 2**63 - 1,
    }  # fmt: skip
    return Option(**{**about, **more})


def problems_together(options: Iterable[Option], given: Set[str]) -> list[str]:
    """Return what is wrong with the flags that were given, by their names, beside each other."""
    by_name, problems = {about.name: about for about in options}, list[str]()
    for about in by_name.values():
        if about.name in given:
            others = [name for name in about.excludes.split() if name in given and name != about.name]
            pairs = (sorted((about.long_flag, by_name[name].long_flag)) for name in others)
            why = f": {about.why}" if about.why else ""
            problems += [f"{one} and {other} exclude each other{why}; leave one out" for one, other in pairs]
            if about.needs and not given & set(about.needs.split()):
                needed = (by_name[name].long_flag for name in about.needs.split())
                problems.append(f"{about.long_flag} needs {' or '.join(needed)}{why}")
    return problems
