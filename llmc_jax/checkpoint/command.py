"""`llmc-jax checkpoint`: which checkpoints a run has and whether each is whole, and what is in one.

Leaves out the checking itself (checkpoint/store.py). Exit status: 0 done, and every checkpoint is good; 2 a bad one,
none, or bad input; 130 stopped by Ctrl-C.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.kit import print_json
from llmc_jax.base.options import own
from llmc_jax.base.parsers import JSON, Parser, commands_line
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.manifest import MANIFEST
from llmc_jax.checkpoint.store import Entry

SHOWN_ITEMS = 8  # of a list among the facts


def make_parser() -> Parser:
    """Return the parser of its commands."""
    parser = Parser(
        prog=typed("checkpoint"),
        usual="verify",
        shown=(("verify runs/plays", "is each checkpoint whole"), ("show runs/plays", "what the newest holds")),
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
    show = commands.add_parser("show", help="print what a checkpoint holds: facts and tensors")
    show.set_defaults(run=_show)
    show.add([own("folder", "STATE", None, "a state_... folder, or a run folder: its newest"), JSON])
    return parser


main = commands_line("checkpoint", make_parser)


# ----- verify -------------------------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    checked = _checked(folder, deep=not options.quick)
    found = list(checked) if options.json else _printed(checked, options.quick)
    if options.json:
        rows = [{**e._asdict(), "folder": str(e.folder), "healthy": e.problem is None} for e in found]
        print_json({"folder": str(folder), "contents_read": not options.quick, "checkpoints": rows})
    if not found:
        raise InputError(f"{folder}: has no checkpoint{_hint(folder)}")
    bad = [e for e in found if e.problem is not None]
    if not options.json:
        print(_verdict(found, bad, options.quick))
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


def _verdict(found: list[Entry], bad: list[Entry], quick: bool) -> str:
    count = f"{len(found)} checkpoint{'s' * (len(found) != 1)}"
    if not bad:
        return f"{count}, {'complete; without --quick every byte is compared' if quick else 'all good'}"
    rest = [e.step for e in found if e.problem is None]
    word = "complete" if quick else "good"
    last = f"the newest {word} one is that of step {rest[-1]}" if rest else f"there is no {word} one"
    return f"{count}, {len(bad)} bad; {last}"


def _hint(folder: Path) -> str:
    if any(folder.glob("state_*_*.bin")):
        return "; its state_*.bin files are llm.c's: convert_checkpoint.py reads those"
    return ""


# ----- show ---------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    folder = _one(options.folder)
    checkpoint = store.open_checkpoint(folder)
    stored, tensors = checkpoint.stored, checkpoint.manifest.tensors
    done = store.done_file(folder.resolve().parent, checkpoint.step)
    lacks = folder.resolve().name == store.state_folder(folder, checkpoint.step).name and not done.is_file()
    if options.json:
        arrays = {name: {"shape": tensor.shape, "dtype": tensor.dtype} for name, tensor in tensors.items()}
        print_json({"folder": str(folder), "done": not lacks, "facts": stored, "tensors": arrays})
        return ExitCode.DONE
    print(f"{folder}{f' ({done.name} is missing, which -y 1 writes again)' if lacks else ''}")
    for name, value in _flat(stored):
        print(f"  {name:<40} {value}")
    print(f"\n  {'tensor':<24} {'dtype':<9} {'values':>14}  shape")
    for name, tensor in tensors.items():
        files = f" in {tensor.parts} files" if tensor.parts > 1 else ""
        print(f"  {name:<24} {tensor.dtype:<9} {tensor.size:>14,}  {tensor.shape}{files}")
    return ExitCode.DONE


def _one(folder: Path) -> Path:
    """Return a state folder; of a run, the newest that is complete, as far as that is seen without reading it all."""
    if not folder.is_dir() or folder.joinpath(MANIFEST).exists():
        return folder
    complete = [e.folder for e in store.entries(folder, deep=False) if e.problem is None]
    if not complete:
        raise InputError(f"{folder}: has no complete checkpoint{_hint(folder)}")
    return complete[-1]


def _flat(stored: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield metadata as rows: nested names joined by dots, long lists cut."""
    for name, value in stored.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and len(value) > SHOWN_ITEMS:
            first = ", ".join(json.dumps(item) for item in value[:SHOWN_ITEMS])
            yield f"{prefix}{name}", f"[{first}, ... {len(value):,} items]"
        else:
            yield f"{prefix}{name}", json.dumps(value)
