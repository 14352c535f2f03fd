"""The errors that bad input raises.

Whoever reads a file, a flag or the environment raises one of these with a message that names what is wrong, what was
found, what was expected and what to do. The command line prints the message alone (no traceback) and exits with
status 2. Anything else that escapes is a bug of ours and keeps its traceback.
"""


class InputError(ValueError):
    """What the user gave (a flag, a path, a shape, the environment) cannot be used as it stands."""


class FormatError(InputError):
    """A file's bytes are not what its format demands: wrong magic or version, truncated, oversized, bad ids."""
