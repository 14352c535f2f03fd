"""`llmc-jax checkpoint verify`: which checkpoints a run has, and whether each is whole.

Leaves out the checking itself (checkpoint/store.py). Exit status: 0 done, and every checkpoint is good; 2 a bad one,
none, or bad input; 130 stopped by Ctrl-C.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.kit import print_json
from llmc_jax.base.numbers import plural
from llmc_jax.base.options import own
from llmc_jax.base.parsers import JSON, Parser, commands_line
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.manifest import MANIFEST
from llmc_jax.checkpoint.store import Entry


def make_parser() -> Parser:
    """Return the parser of its command."""
    parser = Parser(
        prog=typed("checkpoint"),
        shown=(("verify runs/plays", "is each checkpoint whole"),),
        description="Look into the checkpoints that training writes (folders like state_00000100 in the run folder).",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    verify = commands.add_parser(
        "verify",
        help="list the checkpoints of a run: step, size, validation loss, health",
        description="List every checkpoint with step, size, validation loss and health. Reads every byte and compares "
        "it with the digests taken when it was saved. Status 0: there is a checkpoint, and all are good; else 2.",
    )
    verify.set_defaults(run=_verify)
    verify.add([
        own("folder", "DIR", None, "a run folder, or one state_... folder of it", type=Path),
        own("--quick", "", False, "compare names and sizes only; a flipped bit stays unseen"),
        JSON,
    ])  # fmt: skip
    return parser


main = commands_line("checkpoint", make_parser)


def _verify(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    checked = _checked(folder, deep=not options.quick)
    found = list(checked) if options.json else _printed(checked, options.quick)
    if options.json:
        rows = [{**e._asdict(), "folder": str(e.folder), "healthy": e.problem is None} for e in found]
        print_json({"folder": str(folder), "contents_read": not options.quick, "checkpoints": rows})
    if not found:
        theirs = any(folder.glob("state_*_*.bin"))
        hint = "; its state_*.bin files are llm.c's: convert_checkpoint.py reads those" if theirs else ""
        raise InputError(f"{folder}: has no checkpoint{hint}")
    bad = [e for e in found if e.problem is not None]
    if not options.json:
        print(f"{plural(len(found), 'checkpoint')}, {len(bad)} bad")
    return ExitCode.BAD_INPUT if bad else ExitCode.DONE


def _checked(folder: Path, deep: bool) -> Iterator[Entry]:
    """Yield the checkpoints of a run folder, or the one that a state folder is, each checked when it is asked for."""
    if not folder.exists():
        raise InputError(f"{folder}: there is no such folder")
    match = re.fullmatch(r"state_(\d{8,})", folder.resolve().name)
    if match:
        yield store.entry(folder.resolve().parent, int(match[1]), deep=deep)._replace(folder=folder)
    elif folder.joinpath(MANIFEST).exists():  # a copy under another name
        yield store.loose_entry(folder, deep=deep)
    else:
        yield from store.entries(folder, deep=deep)


def _printed(checked: Iterator[Entry], quick: bool) -> list[Entry]:
    """Print a row for each entry as soon as it is known, for reading gigabytes takes a while."""
    found: list[Entry] = []
    for e in checked:
        if not found:
            print(f"{'step':>10}  {'size':>10}  {'val loss':>9}  health", flush=True)
        loss = "-" if e.val_loss is None else f"{e.val_loss:.4f}"
        print(f"{e.step:>10}  {decimal(e.bytes, precision=2):>10}  {loss:>9}  {_health(e, quick)}", flush=True)
        found.append(e)
    return found


def _health(e: Entry, quick: bool) -> str:
    if e.problem:
        return f"BAD: {e.problem}"
    found = "complete, contents not read" if quick else "good"
    return found if e.done else f"{found}; DONE_{e.step:08d} is missing, which -y 1 writes again"
