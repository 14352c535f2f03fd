"""The choice of a run as plain data, so that it can be repeated: by the run itself when it resumes, and elsewhere.

It is written before the first step and into each checkpoint. Leaves out the files that hold it (run/folder.py,
run/resume.py).
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base import plain
from llmc_jax.base.errors import FormatError
from llmc_jax.base.files import digest_of_files
from llmc_jax.kernels.choice import (
    NOTHING,
    Choice,
    Findings,
    Preferences,
    Selection,
    Setting,
    choose_one,
    implementations,
    products_wish,
    select,
)
from llmc_jax.kernels.functions import PRODUCTS, operations
from llmc_jax.machine.compiling import Options, of_one_device
from llmc_jax.machine.gpus import Machine

FORMAT = 1
FOR_PEOPLE = ("why", "fell_back")  # fields of a choice on which no bit depends
GONE = {"gelu_fusion", "backward"}  # fields of earlier records, of GELU in NVIDIA's product
FOLDERS = ("pallas_kernels", "llmc_jax/kernels/triton")  # where our kernels' sources are


class MadeFor(NamedTuple):
    """What a choice was made for."""

    target: str  # an architecture ("sm_90"); of a GPU without kernels its kind; cpu
    dtype: str  # fp32, bf16, fp16
    batch_size: int
    sequence_length: int
    num_layers: int
    num_heads: int
    channels: int
    padded_vocab_size: int


class Resolved(NamedTuple):
    """Everything about how a run is computed that the machine, or a measurement on it, decided."""

    made_for: MadeFor
    asked: Preferences
    choices: tuple[Choice, ...]  # one for each operation
    logit_rows: int
    options: Options  # of XLA
    sources: str = ""  # digest of our kernels' sources, where one of them runs
    format: int = FORMAT


def target_of(machine: Machine) -> str:
    """Return what a choice is made for on a machine: on any other it cannot be repeated."""
    return (machine.target or machine.kind) if machine.platform == "gpu" else machine.platform


@cache
def digest_of_sources() -> str:
    """Return what tells our kernels' sources apart, hexadecimal."""
    root = Path(__file__).resolve().parents[2]
    return digest_of_files(path for folder in FOLDERS for path in (root / folder).glob("*.py"))


def sources_of(choices: tuple[Choice, ...]) -> str:
    """Return `digest_of_sources` where one of our kernels runs, else nothing."""
    ours = any(choice.by in ("pallas", "triton") for choice in choices)
    return digest_of_sources() if ours else ""


# ----- from JSON -----------------------------------------------------------------------------------------------------


def from_json(data: Any, place: str) -> Resolved:
    """Return the record that `plain.to_json` gave. A field with a default may be missing.

    Raises FormatError, which names the place, for anything that is no such record.
    """
    try:
        if isinstance(data, Mapping) and type(data.get("format")) is int and data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}; this version reads format {FORMAT}")
        resolved: Resolved = plain.from_json(Resolved, _without_gone(data))
        operations = [choice.operation for choice in resolved.choices]
        if len(set(operations)) < len(operations):
            raise ValueError("choices: an operation is in it twice")
        if resolved.logit_rows < 0:
            raise ValueError("logit_rows is out of range")
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{place}: is not a choice of kernels ({error})") from None
    return resolved


def _without_gone(data: Any) -> Any:
    """Return a record, or its choices, without the fields that only earlier versions have."""
    if isinstance(data, Mapping):
        return {
            name: _without_gone(each) if name == "choices" else each for name, each in data.items() if name not in GONE
        }
    return [_without_gone(each) for each in data] if isinstance(data, list) else data


# ----- repeating a choice -------------------------------------------------------------------------------------------


def here(before: Resolved | None, machine: Machine) -> Resolved | None:
    """Return a record if it was made for such a machine, else None: on another one nothing of it counts."""
    return before if before is not None and before.made_for.target == target_of(machine) else None


def still(before: Resolved | None, asked: Preferences, *names: str) -> bool:
    """Return whether a record decides what these options are about: they are left to the program, or as they were."""
    if before is None:
        return False
    defaults = Preferences()
    return all(getattr(asked, name) in (getattr(defaults, name), getattr(before.asked, name)) for name in names)


def choose_again(
    before: Resolved | None, asked: Preferences, strict: bool, setting: Setting, findings: Findings | None = None
) -> Selection:
    """Repeat a recorded choice. What is now asked for otherwise, and what cannot run here, is chosen anew.

    before: made for such a machine (`here`). findings: what was found out on this card. Raises InputError, if strict,
    for what --kernels or --attention ask for and cannot run.
    """
    setting = setting._replace(untried=findings is not None and not findings.fastest)
    findings = findings or NOTHING
    recorded = {} if before is None else _recorded(before, asked, setting, findings)
    repeated = {operation: choice for operation, (choice, problem) in recorded.items() if not problem}
    choices = {
        each: repeated.get(each) or choose_one(each, asked, setting, findings) for each in operations(setting.optimizer)
    }
    if choices["fc"].by == "pallas" != choices["gelu"].by:  # the backward may compute GELU again: to the same bits
        why = "GELU would have other bits where it is computed again"
        choices["fc"] = Choice("fc", "xla", "xla", why, products_wish("fc", asked) == "pallas")
    return select(list(choices.values()), setting, strict)


def cannot_repeat(
    before: Resolved, asked: Preferences, setting: Setting, findings: Findings = NOTHING
) -> tuple[str, ...]:
    """Return why a recorded choice cannot be repeated here, with a reason for each such operation."""
    if here(before, setting.machine) is None:
        return (f"it was made for {before.made_for.target}, not for {target_of(setting.machine)}",)
    recorded = _recorded(before, asked, setting, findings)
    return tuple(f"{operation}: {problem}" for operation, (_, problem) in recorded.items() if problem)


def _recorded(
    before: Resolved, asked: Preferences, setting: Setting, findings: Findings
) -> dict[str, tuple[Choice | None, str]]:
    """Return what a record has for each operation that it decides, and why that cannot run; empty where it can."""
    # before there were products of ours, XLA's ran
    choices = {name: Choice(name, "xla", "xla", "") for name in PRODUCTS}
    choices |= {choice.operation: choice for choice in before.choices}
    options = dict.fromkeys(PRODUCTS, ("kernels", "products", "gelu_fusion")) | {"attention": ("kernels", "attention")}
    return {
        each: (choices.get(each), _problem(choices.get(each), setting, findings))
        for each in operations(setting.optimizer)
        if still(before, asked, *options.get(each, ("kernels",)))
    }


def _problem(choice: Choice | None, setting: Setting, findings: Findings) -> str:
    """Return why what a record has for an operation cannot run; empty where it can."""
    if choice is None:
        return "the record has nothing for it"
    name = choice.implementation
    if (row := implementations(choice.operation).get(name)) is None:
        return f"this version has no {name!r}"
    problem = row.problem(setting) or findings.problem(choice.operation, name)
    return f"{name}: {problem}" if problem else ""


def differences(then: Resolved, now: Resolved) -> list[str]:
    """Return what differs between two choices beyond the implementations' names and what they were made for."""

    def facts(of: Resolved) -> dict[str, Any]:
        found: dict[str, Any] = {"logit rows": of.logit_rows, "sources of kernels": of.sources}
        return found | dict(of_one_device(of.options))  # how many devices there are is told apart

    one, other = facts(then), facts(now)
    return [
        f"{name} {one.get(name)} -> {other.get(name)}" for name in {**one, **other} if one.get(name) != other.get(name)
    ]
