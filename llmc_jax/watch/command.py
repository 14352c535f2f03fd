"""`llmc-jax watch`: a live view of a run, or of all runs in a folder. Leaves out the view (watch/).

Exit status: 0 it was shown; 2 bad input; 130 ended by Ctrl-C.
"""

import os
import sys

from llmc_jax.base.commands import typed
from llmc_jax.base.kit import command_line
from llmc_jax.base.options import Check, own
from llmc_jax.base.parsers import Parser

DESCRIPTION = """\
Show a run while it trains: progress, time left, losses, the last sample, events. It only reads, so it can be
started and stopped at any time, by anyone who can read the folder, on any machine that sees it.
A pipe, a file and a terminal without control sequences get the view once; so does a run that has ended.
"""
OPTIONS = (
    own("path", "RUN", None, "a run folder, or a folder of them: a table, the newest first"),
    own("--once", "", False, "print the view once, as plain lines"),
    own("--every", "SECONDS", 1.0, "between two looks (default 1)",
        check=Check(lambda value: 0.1 <= value <= 3600, "from 0.1 to 3600")),
)  # fmt: skip
KEYS = "Keys: q quits."


def make_parser() -> Parser:
    """Return the parser."""
    shown = (("runs/plays", "a run while it trains"), ("runs", "a table of the runs in a folder"))
    parser = Parser(prog=typed("watch"), description=DESCRIPTION, epilog=KEYS, shown=shown)
    parser.add(OPTIONS)
    return parser


@command_line("watch")
def main(words: list[str]) -> int:
    """Show a run, or the runs in a folder."""
    options = make_parser().parse_args(words)
    from llmc_jax.watch import live  # here, because --help does without

    page = live.page_of(options.path)
    if options.once or not _is_screen() or (isinstance(page, live.RunPage) and page.ended()):
        live.show_once(page)
        return 0
    return live.show_live(page, options.every)


def _is_screen() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
