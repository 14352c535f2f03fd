"""The plan's command line: llmc-jax plan --help."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmc_jax.base.commands import program_name
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.files import plain, write_atomic
from llmc_jax.base.kit import command_line, print_json
from llmc_jax.config.flags import take_own
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine.jax_setup import settle
from llmc_jax.plan.asked import asked_config
from llmc_jax.plan.flags import OWN, STDOUT, help_text

if TYPE_CHECKING:
    from llmc_jax.plan.answer import Wishes
    from llmc_jax.plan.neighbours import Row


@command_line("plan")
def main(words: list[str]) -> int:
    """Run `llmc-jax plan`. The exit status is 0 also where it does not fit."""
    if "--help" in words:
        print(help_text())
        return ExitCode.DONE
    own, rest = take_own(words, OWN)
    if own.reproductions and rest:
        raise InputError(f"--reproductions: takes llm.c's launches as they are; leave out {' '.join(rest)}")
    for note in settle():
        _say(note)
    if own.reproductions:
        _reproductions(own)
    elif own.sweep:
        _sweep(rest, own)
    else:
        _answer(rest, own)
    return ExitCode.DONE


def _wishes(own: SimpleNamespace) -> "Wishes":
    from llmc_jax.plan.answer import Wishes

    return Wishes(own.quick, own.tokens, own.price, own.network)


def _answer(words: list[str], own: SimpleNamespace) -> None:
    """Print the answer to one configuration, and its neighbours where they are asked for."""
    from llmc_jax.plan import report
    from llmc_jax.plan.answer import answer, as_json
    from llmc_jax.plan.planner import place_named

    config = asked_config(words)
    found = answer(config, place_named(own.gpu), _wishes(own), _say)
    rows, table = _neighbours(replace(config, batch_size=found.setting.batch_size), own) if own.neighbours else ((), "")
    _write(own.json, as_json(found) | ({"neighbours": rows} if rows else {}))
    if own.json != STDOUT:
        print(report.as_text(found, operations=own.operations, more=table))


def _neighbours(config: TrainConfig, own: SimpleNamespace) -> tuple[tuple["Row", ...], str]:
    """Return the neighbours of a configuration, and their table."""
    from llmc_jax.plan.near import rows_table
    from llmc_jax.plan.neighbours import neighbours

    rows = neighbours(config, own.gpu, _wishes(own))
    return rows, rows_table(rows)


def _say(words: str) -> None:
    """Say what takes seconds, where it does not mix with the answer."""
    print(f"{program_name('plan')}: {words}", file=sys.stderr, flush=True)


def _sweep(words: list[str], own: SimpleNamespace) -> None:
    """Print the table of --sweep, and draw it where --picture says so."""
    from llmc_jax.plan import near
    from llmc_jax.plan.neighbours import parse_sweep, swept

    sweep, config = parse_sweep(own.sweep), asked_config(words)
    rows = swept(config, own.gpu, sweep, _wishes(own))
    if own.picture:
        near.draw_sweep(rows, Path(own.picture), near.title_of(sweep.name, config.model, own.gpu))
    _write(own.json, {"sweep": rows})
    if own.json != STDOUT:
        print(near.rows_table(rows))


def _reproductions(own: SimpleNamespace) -> None:
    """Print llm.c's reproductions."""
    from llmc_jax.plan.near import reproductions_table
    from llmc_jax.plan.neighbours import reproductions

    found = list(reproductions())
    _write(own.json, {"reproductions": found})
    if own.json != STDOUT:
        print(reproductions_table(found))


def _write(path: str | None, content: dict[str, Any]) -> None:
    """Write --json's file, or print it."""
    from llmc_jax.kernels.plain import to_json

    if path == STDOUT:
        print_json(plain(to_json(content)))
    elif path is not None:
        write_atomic(Path(path), (json.dumps(plain(to_json(content)), indent=1) + "\n").encode())
