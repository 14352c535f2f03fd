"""The command line: words to a checked TrainConfig, `--help` and docs/flags.md; and how a run begins and ends by its
place among processes: as the only one, as the parent of a worker, or as a worker.

Options are defined in config/train.py, presets in config/presets.py. What a run does is in run/loop.py, what a parent
does in cluster/parent.py; they are imported only when the options are sound.
"""

import os
import shlex
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

from llmc_jax import cluster
from llmc_jax.base.commands import COMMAND, in_environment, program_name, typed
from llmc_jax.base.errors import EXIT_MEANINGS, ExitCode, InputError
from llmc_jax.base.files import read_json_object
from llmc_jax.base.kit import WIDTH, command_line, examples, exit_status, option_lines, two_columns
from llmc_jax.base.options import Option, show_value
from llmc_jax.cluster.agreement import Agreed
from llmc_jax.cluster.launchers import Member, host_name, member_of
from llmc_jax.cluster.worker import joined
from llmc_jax.config.checks import validate
from llmc_jax.config.flags import SHOW_ALONE, Given, given_options
from llmc_jax.config.presets import PRESETS
from llmc_jax.config.train import AUTO_BATCH, BY_NAME, OPTIMIZERS, OPTIONS, TrainConfig, differing
from llmc_jax.logs.files import LARGEST, config_file

FLAG_COLUMN = 36
SHOWN = (OPTIONS[0], *SHOW_ALONE, *OPTIONS[1:])
GROUPS = {group: list(members) for group, members in groupby(SHOWN, attrgetter("group"))}

EXAMPLES = (
    ("python train.py", "the demo: a small model learns Python's own source"),
    ("python train.py --preset llmc-cpu -x 100 -o runs/tuned", "a preset, with flags over it"),
    ('python train.py -e d12 -i "data/train_*.bin" -j "data/val_*.bin" -b 8 -d 65536', "your own token files"),
)


@command_line("train")
def main(words: Sequence[str], others: Sequence[tuple[str, str]] = ()) -> int | None:
    """Run `python train.py` or `llmc-jax train`.

    others: the subcommands beside this one, and what each is for, where `--help` is to list them.
    """
    texts = {"--help": lambda: help_text(others), "--help-markdown": flags_markdown, "--version": _versions}
    shown = next((word for word in words if word in texts), None)
    if shown:
        print(texts[shown]())
        return None
    config, notes = continued(given_options(words))
    try:
        notes += validate(config)
        member = member_of(config, os.environ, host_name(os.environ))
    except InputError as error:  # with the notes so far: what is wrong may come from a config.json
        raise InputError("\n  ".join([str(error), *notes])) from error
    return begin(config, notes, member)


def continued(given: Given) -> tuple[TrainConfig, list[str]]:
    """Return the configuration of a run, and notes on it: with -y 1, what is not given is as the folder of -o has it.

    Its config.json holds the options of the run's last start. Options that this version does not know are left out;
    those that the file lacks have their defaults. A preset other than the run's describes all of another run, so then
    nothing is taken. Raises InputError if the file holds a value that cannot be.
    """
    config = given.config
    if not config.reuse or not config.output_dir:
        return config, []
    place = config_file(Path(config.output_dir))
    stored = None if place is None else read_json_object(place, LARGEST).get("options")
    if place is None or not isinstance(stored, Mapping):
        return config, []
    if given.preset and config.preset != stored.get("preset"):
        return config, [f"-y 1: no options are taken from {place}, which is not of --preset {config.preset}"]
    known = {name: value for name, value in stored.items() if name in BY_NAME and not BY_NAME[name].of_this_start}
    if known.get("optimizer") not in (*OPTIMIZERS, None) and "optimizer" not in given.flags:
        del known["optimizer"]  # a file: no code is loaded that this start does not name
    try:
        before = TrainConfig.from_json(known)
    except InputError as error:
        raise InputError(f"{place}: {error}; mend the file, or give another -o") from error
    flags, notes = dict(given.flags), []
    if flags.get("batch_size") == AUTO_BATCH and "batch_size" in known:  # which it came to then: another has other bits
        del flags["batch_size"]
        notes.append(f"-y 1 -b auto: stays {before.batch_size}, as in {place}")
    merged = replace(before, **flags)
    changed = ", ".join(words for about, words in differing(before, merged) if not about.of_this_start)
    unknown = ", ".join(sorted(set(stored) - set(BY_NAME)))
    if not changed and not unknown and all(about.of_this_start for about, _ in differing(config, merged)):
        return merged, notes  # the same command again
    left_out = f", without {unknown}, which this version does not have" if unknown else ""
    notes.append(f"-y 1: options as in {place}{left_out}" + (f", changed by flags: {changed}" if changed else ""))
    return merged, notes


# ----- its place among processes --------------------------------------------------------------------------------------


def begin(config: TrainConfig, notes: list[str], member: Member | None) -> int:
    """Train, or have a worker train; return the exit status. member: which of several processes this is."""
    group = joined(os.environ)
    if group is not None:
        cluster.enter(group)
        in_group(lambda: _trained(config, notes))
    if member is not None:
        from llmc_jax.cluster.parent import supervise  # here, because a run of one process does without asyncio

        return supervise(member, config.peer_timeout)
    return _trained(config, notes)


def _trained(config: TrainConfig, notes: list[str]) -> int:
    from llmc_jax.run.loop import run  # here, because it imports JAX, which takes a second

    return run(config, notes)


def in_group(work: Callable[[], int]) -> NoReturn:
    """Do the work of one of several processes, and end this one with words for the others on how it went.

    What all have found alike, the first one alone shows. An exchange that broke is nothing to show here: another
    process is lost, and the one that started this one says which.
    """
    group, failed = cluster.here(), list[BaseException]()

    def tried() -> int:
        try:
            return work()
        except BaseException as error:
            failed.append(error)
            if _is_broken(error) or (isinstance(error, Agreed) and group.rank):
                return ExitCode.BAD_INPUT
            raise

    try:
        status = exit_status(program_name("train"), tried)
    except BaseException:  # a mistake of ours
        traceback.print_exc()
        status = 1
    if not failed or isinstance(failed[0], Agreed):
        group.leave(status)
    words = str(failed[0]) or type(failed[0]).__name__
    if isinstance(failed[0], KeyboardInterrupt):
        words = "stopped by Ctrl-C before anything could be saved"
    group.leave(status, words, "broken" if _is_broken(failed[0]) else "failed")


def _is_broken(error: BaseException) -> bool:
    """Return whether an error is of JAX's runtime: of an exchange between processes, most likely."""
    return type(error).__name__ == "JaxRuntimeError"


# ----- what --help prints ---------------------------------------------------------------------------------------------


def help_text(others: Sequence[tuple[str, str]] = ()) -> str:
    """Return what `--help` prints: every option in its group, the presets, the exit statuses and examples.

    others: the subcommands that stand beside training, and what each is for.
    """
    program = typed("train")
    lines = [f"usage: {program} [flag value ...]", ""]
    lines += textwrap.wrap(
        "Trains a GPT-2. Without any flag it runs the demo; with flags, llm.c's defaults hold unless --preset names "
        "other ones. Flags are those of llm.c's train_gpt2cu, each with a long name beside it.",
        WIDTH,
    )
    if others:
        lines += ["", f"Subcommands ({in_environment(COMMAND)} NAME --help explains one):"]
        lines += [line for name, meaning in others for line in two_columns(name, meaning, FLAG_COLUMN)]
    for group, members in GROUPS.items():
        lines += ["", f"{group}:", *(line for about in members for line in option_lines(about, FLAG_COLUMN))]
    presets = [(name, preset.description) for name, preset in PRESETS.items()]
    statuses = [(str(int(code)), meaning) for code, meaning in EXIT_MEANINGS.items()]
    for title, rows in (("Presets", presets), ("Exit status", statuses)):
        lines += ["", f"{title}:", *(line for row in rows for line in two_columns(*row, FLAG_COLUMN))]
    lines += examples((command.replace("python train.py", program), meaning) for command, meaning in EXAMPLES)
    return "\n".join(lines)


def flags_markdown() -> str:
    """Return docs/flags.md, made from the same facts as `--help`."""
    lines = [
        "# Flags of train.py",
        "",
        "Made from `llmc_jax/config/train.py` by `python train.py --help-markdown > docs/flags.md`, and tested so.",
        "",
        "A flag is followed by its value: `-b 8`, `--batch-size 8` or `--batch-size=8`. One- and two-letter names are",
        "those of llm.c's train_gpt2cu. Without any flag the preset `demo` runs; with flags, the defaults below hold",
        "unless `--preset` names other ones.",
    ]
    for group, members in GROUPS.items():
        lines += ["", f"## {group}", "", "| flag | value | unit | default | meaning |", "|---|---|---|---|---|"]
        lines += [_row(about) for about in members]
    lines += ["", "## Presets", "", "| name | what it is | options |", "|---|---|---|"]
    for name, preset in PRESETS.items():
        lines.append(f"| `{name}` | {preset.description} | `{_as_flags(name)}` |")
    lines += ["", "## Exit status", "", "| status | meaning |", "|---|---|"]
    lines += [f"| {int(code)} | {meaning} |" for code, meaning in EXIT_MEANINGS.items()]
    return "\n".join(lines)


def _row(about: Option) -> str:
    def code(text: str) -> str:
        return f"`{text}`" if text else ""

    flags = ", ".join(f"`{flag}`" for flag in about.flags)
    value = code(about.value_name).replace("|", "\\|")
    cells = (flags, value, about.unit, code(about.shown_default), about.meaning)
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _as_flags(preset: str) -> str:
    """Return what a preset stands for, as flags."""
    options = given_options(shlex.split(PRESETS[preset].flags)).flags
    given = {about.flags[0]: show_value(options[about.name]) for about in OPTIONS if about.name in options}
    return " ".join(f"{flag} {shlex.quote(value)}" for flag, value in given.items())


def _versions() -> str:
    from llmc_jax.machine.device import versions

    found = versions()
    return ", ".join(f"{name} {found[name]}" for name in ("llmc-jax", "python", "jax", "jaxlib", "numpy"))
