"""The command line of models of one's own: `llmc-jax model check FILE.py`. Leaves out the checks (check.py)."""

import argparse
from typing import Any

from llmc_jax.base import text
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.numbers import plural, small
from llmc_jax.base.options import SCREEN, own
from llmc_jax.base.parsers import DIFFERS, JSON_FILE, Parser, commands_line, write_json
from llmc_jax.base.streams import print_error
from llmc_jax.machine.device import first_device
from llmc_jax.machine.jax_setup import configure, settle
from llmc_jax.models import family as families

SHAPE = "L2-NH2-C16-V61-T16"
DESCRIPTION = """\
Check a model of your own: whether its file fits, whether its backward gives JAX's gradients at every level of
recomputation, whether its decoder gives the logits of its forward. docs/models.md explains each line.

Exit status: 0 everything agrees, 2 the file cannot be used as it stands (one line says why), 4 something differs."""
HEADINGS = ("function", "at", "worst", "error", "allowed", "verdict")
LEFT = ("function", "at", "worst", "verdict")


def make_parser() -> Parser:
    """Return the parser of its command."""
    parser = Parser(
        prog=typed("model"),
        shown=(("check post_ln.py", "are its gradients right, and its decoder"),),
        description="Look into a model of your own: a Python file that defines FAMILY (docs/models.md).",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    raw = argparse.RawDescriptionHelpFormatter
    check = commands.add_parser("check", help="is it right", description=DESCRIPTION, formatter_class=raw)
    check.add([
        own("file", "FILE", None, "the Python file that defines FAMILY"),
        own("-e", "SHAPE", SHAPE, f"a small shape, as the family writes it [default {SHAPE}]"),
        JSON_FILE,
    ])  # fmt: skip
    check.set_defaults(run=_check)
    return parser


main = commands_line("model", make_parser)


def _check(options: argparse.Namespace) -> int:
    for note in settle():
        print_error(f"note: {note}")
    try:
        family = families.load(options.file)
    except InputError as error:
        raise InputError(str(error).removeprefix("--model ")) from None
    configure(tf32=False)
    first_device()
    from llmc_jax.models.check import check

    compared, notes = check(family, options.e)
    wrong = [each for each in compared if each.wrong]
    if options.json != SCREEN:
        table = text.table(HEADINGS, map(_row, compared), left=LEFT)
        print(f"{options.file}: {family.name} at {options.e}\n\n{table}\n")
        for line in (*notes, f"{len(wrong)} of {plural(len(compared), 'comparison')} differ" if wrong else "all agree"):
            print(text.wrapped(line))
    if options.json is not None:
        found = {"file": options.file, "family": family.name, "shape": options.e, "agrees": not wrong, "notes": notes}
        rows = [{**each._asdict(), "worst": each.worst, "wrong": each.wrong} for each in compared]
        write_json({**found, "comparisons": rows}, options.json)
    return DIFFERS if wrong else ExitCode.DONE


def _row(each: Any) -> list[str]:
    names = ", ".join(each.wrong[:4]) + (f" and {len(each.wrong) - 4} more" if each.wrong[4:] else "")
    verdict = f"DIFFERS: {names}" if names else "ok"
    return [each.function, each.level, each.worst, small(each.errors[each.worst]), small(each.limit), verdict]
