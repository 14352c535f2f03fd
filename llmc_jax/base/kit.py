"""What every command line needs: an exit status for each end, one line for each error, columns of --help, JSON.

Leaves out the flags of each, and the streams themselves (streams.py).
"""

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from llmc_jax.base.commands import program_name
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.files import reason
from llmc_jax.base.options import Option
from llmc_jax.base.plain import to_json
from llmc_jax.base.streams import discard_rest, escape_what_cannot_be_written, open_missing_streams, print_error

WIDTH = 100  # columns of --help
OWN_COLUMN = 24
NO_BREAK = "\u00a0"


def exit_status(program: str, run: Callable[[], int | None]) -> int:
    """Run a command line and return its exit status: what `run` returns, where nothing (None) that of success.

    Bad input, and what the system refuses, is one line on standard error that begins with the program's name. A reader
    of the output that went away is no error. Any other exception is a mistake of ours and keeps its traceback.
    """
    open_missing_streams()
    escape_what_cannot_be_written()
    try:
        status = run()
        sys.stdout.flush()
        return int(status or ExitCode.DONE)
    except BrokenPipeError:
        return ExitCode.DONE
    except InputError as error:
        print_error(f"{program}: {error}")
        return ExitCode.BAD_INPUT
    except OSError as error:
        if type(error) is OSError and error.errno is None:  # not the system's
            raise
        file = error.filename2 or error.filename  # of a rename the second: the first is a temporary name
        place = "" if file is None else f"{file}: "
        print_error(f"{program}: {place}{reason(error)}")
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print_error(f"{program}: stopped")
        return ExitCode.STOPPED
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # lost: what it still holds is dropped, or Python would complain at exit
            discard_rest(sys.stdout)


def command_line(name: str) -> Callable[[Callable[..., int | None]], Callable[..., int]]:
    """Return what makes a function of a list of words a command line, by default this process's, with an exit status.

    The status is 0 for what was done, 2 for bad input, which standard error says, 130 where Ctrl-C stopped it.
    """

    def made(run: Callable[..., int | None]) -> Callable[..., int]:
        @wraps(run)
        def main(argv: Sequence[str] | None = None, *more: Any) -> int:
            words = list(sys.argv[1:] if argv is None else argv)
            return exit_status(program_name(name), lambda: run(words, *more))

        return main

    return made


def print_json(content: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(to_json(content), indent=1))


def two_columns(left: str, right: str, column: int) -> list[str]:
    """Return a flag and its meaning, which begins at a column, as lines of --help."""
    gap = " " * column
    lines = textwrap.wrap(right, WIDTH, initial_indent=gap, subsequent_indent=gap, break_on_hyphens=False)
    lines = [line.replace(NO_BREAK, " ") for line in lines]
    left = f"  {left}"
    return [left, *lines] if len(left) + 2 > column else [left + lines[0][len(left) :], *lines[1:]]


def option_lines(about: Option, column: int) -> list[str]:
    """Return an option's flags, and its meaning, unit and default from a column on, as lines of --help."""
    facts = [fact for fact in (about.unit, about.shown_default and f"default {about.shown_default}") if fact]
    bracket = f" [{'; '.join(facts)}]".replace(" ", NO_BREAK).replace(NO_BREAK, " ", 1) if facts else ""
    return two_columns(f"{', '.join(about.flags)} {about.value_name}".rstrip(), about.meaning + bracket, column)


def help_page(program: str, about: str, table: Iterable[Option], commands: Iterable[tuple[str, str]]) -> str:
    """Return what --help prints of a program that takes train.py's flags and its own. commands: words, what for."""
    usage = f"usage: {program} [flags of train.py] [flags below]"
    flags = [line for each in table for line in option_lines(each, OWN_COLUMN)]
    lines = [usage, "", *textwrap.wrap(about, WIDTH), "", *flags]
    return "\n".join([*lines, *examples((f"{program} {words}", meaning) for words, meaning in commands)])


def examples(commands: Iterable[tuple[str, str]]) -> list[str]:
    """Return commands and what each is for as the last lines of --help."""
    return ["", "Examples:", *(line for command, meaning in commands for line in (f"  {command}", f"      {meaning}"))]
