"""The plan's command line: python -m llmc_jax.plan --help."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmc_jax.cli.kit import exit_status, print_json
from llmc_jax.cli.plan_flags import OWN, PROGRAM, STDOUT, check_own, help_text
from llmc_jax.config.flags import take_own
from llmc_jax.errors import ExitCode, InputError
from llmc_jax.files import plain, refuse_irregular, write_atomic
from llmc_jax.machine.jax_setup import typed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0 also where it does not fit, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_status(typed(PROGRAM), lambda: _run(words))


def _run(words: list[str]) -> int:
    if "--help" in words:
        print(help_text())
        return ExitCode.DONE
    own, rest = take_own(words, OWN)
    check_own(own)
    _check_file(own.json)
    _answer(rest, own)
    return ExitCode.DONE


def _check_file(path: str | None) -> None:
    """Check that --json can be written, before anything is computed. Raises InputError."""
    if path is None or path == STDOUT:
        return
    refuse_irregular(Path(path))
    if not Path(path).resolve().parent.is_dir():
        raise InputError(f"--json {path}: there is no folder {Path(path).parent} to write it into")


def _answer(words: list[str], own: SimpleNamespace) -> None:
    """Print the answer to one configuration: the default."""
    from llmc_jax.plan import report
    from llmc_jax.plan.answer import Wishes, answer, as_json, place_named
    from llmc_jax.plan.asked import asked_config

    config = asked_config(words)
    found = answer(config, place_named(own.gpu), Wishes(own.quick, own.tokens, own.price, own.network))
    _write(own.json, as_json(found))
    if own.json != STDOUT:
        print(report.as_text(found, operations=own.operations))


def _write(path: str | None, content: dict[str, Any]) -> None:
    """Write --json's file, or print it."""
    if path == STDOUT:
        print_json(plain(content))
    elif path is not None:
        write_atomic(Path(path), (json.dumps(plain(content), indent=1) + "\n").encode())
