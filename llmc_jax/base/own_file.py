"""A Python file of the user's that a flag names: read, told from others by its digest, and run.

Leaves out what such a file defines (models/family.py, training/rules/).
"""

import hashlib
import re
import sys
import traceback
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import reason


def read(flag: str, path: str | Path, what: str) -> tuple[Path, bytes, str]:
    """Return a file's path, what it holds, and the digest of that, hexadecimal. Raises InputError.

    what: it is a file of: a model.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{flag} {path}: cannot be read: {reason(error)}; it takes the Python file of {what}"
        ) from None
    return path, data, hashlib.sha256(data).hexdigest()


def kept_copy(source: str, what: str = "model") -> str:
    """Return the name of the copy of a file in a run's folder, from the file's digest. what: model, optimizer."""
    return f"{what}_{source[:12]}.py"


def defined(flag: str, path: Path, data: bytes, name: str, kind: Any, taken: Container[str], page: str) -> Any:
    """Return what a file defines by a name: a record of a kind, with the file's digest, path and content in it.

    data: what it holds. taken: names that the record cannot have. page: of the documentation.
    Raises InputError where it cannot be run, with the line, and where it defines no such record.
    """
    found = getattr(_run(flag, path, data), name, None)
    if not isinstance(found, kind):
        words = f"defines no {name}" if found is None else f"has {name} of the type {type(found).__name__}"
        raise InputError(f"{flag} {path}: {words}; it must be an {kind.__module__}.{kind.__name__} ({page})")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", found.name) or found.name in taken:
        words = "it must be one of its own, of small letters, digits, '-', '_' and '.'"
        raise InputError(f"{flag} {path}: {name}: the name is {found.name!r}; {words}")
    return found._replace(source=hashlib.sha256(data).hexdigest(), path=path, content=data)


def _run(flag: str, path: Path, data: bytes) -> ModuleType:
    name = f"llmc_jax_own_{hashlib.sha256(data).hexdigest()[:16]}"
    module = sys.modules[name] = ModuleType(name)  # dataclasses look for theirs there
    module.__file__ = str(path)
    try:
        with inside(path, flag):
            exec(compile(data, str(path), "exec"), vars(module))
    except InputError:
        del sys.modules[name]
        raise
    return module


@contextmanager
def inside(path: Path, flag: str = "", otherwise: str = "") -> Iterator[None]:
    """Make of what a user's file raises an InputError of one line: where in the file, or otherwise, and the reason."""
    try:
        yield
    except (Exception, SystemExit) as error:
        file, frames = str(path), traceback.extract_tb(error.__traceback__)
        if isinstance(error, InputError) and file in str(error):
            raise
        ours = [f"{each.filename}, line {each.lineno}" for each in frames if "llmc_jax" in each.filename]
        at, words = f"{otherwise or file}: {ours[-1]}", str(error).strip().partition("\n")[0]
        if own := [each for each in frames if each.filename == file]:
            at = f"{file}: line {own[-1].lineno}" + f": {own[-1].name}" * (own[-1].name[0] != "<")
        if isinstance(error, SyntaxError):
            at, words = f"{file}: line {error.lineno}", error.msg
        raise InputError(f"{flag} {at}: {type(error).__name__}: {words}".strip()) from None
