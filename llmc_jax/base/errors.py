"""The errors that bad input raises.

Whoever reads a file, a flag or the environment raises one of these with a message that names what is wrong, what was
found, what was expected and what to do. The command line prints the message alone (no traceback) and exits with
status 2. Anything else that escapes is a bug of ours and keeps its traceback.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum


class InputError(ValueError):
    """What the user gave (a flag, a path, a shape, the environment) cannot be used as it stands."""


class FormatError(InputError):
    """A file's bytes are not what its format demands: wrong magic or version, truncated, oversized, bad ids."""


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one InputError that lists all problems, one a line; return if there are none."""
    lines = list(dict.fromkeys(problems))
    if len(lines) == 1:
        raise InputError(lines[0])
    if lines:
        raise InputError("\n  ".join([f"{len(lines)} problems:", *lines]))


class ExitCode(IntEnum):
    """The exit status of train.py. 1 is Python's own, for an uncaught exception."""

    DONE = 0
    BAD_INPUT = 2
    DIVERGED = 3
    PEER_LOST = 75
    STOPPED = 130  # 128 + SIGINT, as shells have it


EXIT_MEANINGS: dict[int, str] = {
    ExitCode.DONE: "the run is complete",
    1: "a bug in this program, with a traceback",
    ExitCode.BAD_INPUT: "a flag, a file or the machine cannot be used as it stands; one line says why",
    ExitCode.DIVERGED: "the loss or the gradient was not finite --max-nonfinite times in a row",
    ExitCode.PEER_LOST: "another process of the run died or failed; one line names it",
    ExitCode.STOPPED: "stopped by Ctrl-C, SIGTERM or SIGHUP after a whole step, all saved; a second exits at once",
}


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Name the flag that gave a file in an error about it within the block, unless that begins with a flag already."""
    try:
        yield
    except InputError as error:
        if str(error).startswith("-"):
            raise
        raise type(error)(f"{flag} {error}") from error
