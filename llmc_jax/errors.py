"""The errors that bad input raises.

Whoever reads a file, a flag or the environment raises one of these with a message that names what is wrong, what was
found, what was expected and what to do. The command line prints the message alone (no traceback) and exits with
status 2. Anything else that escapes is a bug of ours and keeps its traceback.
"""


def printable(text: str, keep: str = "") -> str:
    """Return text in which what a terminal would obey, or cannot show, is escaped; characters in keep stay."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class InputError(ValueError):
    """What the user gave (a flag, a path, a shape, the environment) cannot be used as it stands."""


class FormatError(InputError):
    """A file's bytes are not what its format demands: wrong magic or version, truncated, oversized, bad ids."""
