"""The command line of the report: `llmc-jax report`. Leaves out reading runs and drawing pages (report/)."""

import argparse
import os
from pathlib import Path

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import check_output, refusing, write_atomic
from llmc_jax.base.kit import command_line
from llmc_jax.base.options import own
from llmc_jax.base.parsers import Parser
from llmc_jax.base.streams import escaped
from llmc_jax.logs.files import MAIN_LOG, METRICS, REPORT, holds, runs_in

MARK = b"llmc-jax report"  # in the first bytes of every page: what lacks it is not replaced
MOST_RUNS = 26  # of a page, which no more looks could be told apart on

DESCRIPTION = """\
Write one self-contained page about a run, or about several over each other: curves, samples, events, what ran it.

A RUN is a run folder, its metrics.jsonl, a folder of run folders, a main.log of llm.c, or a file with what a trainer
printed: train.py, llm.c's trainers, its train_gpt2.py, nanoGPT's train.py. The page of one folder is report.html in
it; of several runs, or of a file, report.html in the current folder. docs/report.md says more."""
OPTIONS = (
    own("runs", "RUN...", None, "what the page shows"),
    own("-o --output", "FILE", None, "write the page to FILE (*.html)", type=Path, writes=".html"),
    own("--title", "TEXT", "", "title of the page [the names]"),
    own("--quiet", "", False, "print nothing but errors"),
)


def make_parser() -> Parser:
    """Return the parser of its flags."""
    parser = Parser(
        prog=typed("report"),
        shown=(("runs/plays", "a run's page"), ("runs/a runs/b -o both.html", "two runs over each other")),
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add(OPTIONS)
    return parser


def run(words: list[str]) -> None:
    """Read the runs, write the files, say where they are. Bad input is told before anything is written."""
    args = make_parser().parse_args(words)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy starts threads when it is imported, of no use here
    from llmc_jax.report.gather import content_of, read_runs
    from llmc_jax.report.page import page

    paths = [each for path in args.runs for each in runs_at(path)]
    if len(paths) > MOST_RUNS:
        raise InputError(f"{len(paths)} runs: a page shows {MOST_RUNS} at most; name fewer")
    folder = args.runs[0] if len(args.runs) == 1 and args.runs[0].is_dir() else Path()
    output = args.output or folder / REPORT
    check_page(output)
    content = content_of(read_runs(paths), args.title)
    document = page(content)
    write_atomic(output, document)
    if not args.quiet:
        for each in content.runs:
            for line in (f"{each.kind}; {each.status.words}", *each.notes):
                print(escaped(f"{each.name}: {line}"))
        print(escaped(f"written: {output} ({len(document) / 1e6:.1f} MB)"))


main = command_line("report")(run)


# ----- what is asked for ----------------------------------------------------------------------------------------------


def runs_at(path: Path) -> list[Path]:
    """Return a run, a file or a folder with a log, or else the run folders in it. Raises InputError where none is."""
    logs = METRICS, MAIN_LOG
    if not path.is_dir() or holds(path, logs):
        return [path]
    found = runs_in(path, logs)
    if not found:
        raise InputError(f"{path}: neither a run folder nor a folder of them: no {METRICS} and no {MAIN_LOG} there")
    return found


def check_page(path: Path) -> None:
    """Refuse a file that cannot be written, or is no earlier page of ours, before any work. Raises InputError."""
    check_output("--output", path)
    if not path.is_file():
        return
    with refusing(f"{path}: cannot read it"), path.open("rb") as file:
        is_ours = MARK in file.read(1000)
    if not is_ours:
        raise InputError(f"{path}: exists and is no report of ours; choose another --output")
