"""How files are found, opened and written, never half there; where an open one is; where caches live."""

import errno
import fcntl
import glob
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llmc_jax.base.errors import FormatError, InputError


def cache_folder() -> Path:
    """Return this user's folder of caches: $LLMC_JAX_CACHE, else llmc-jax in $XDG_CACHE_HOME or the usual place."""
    if own := os.environ.get("LLMC_JAX_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "llmc-jax"
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.path.expanduser("~")) / usual / "llmc-jax"


def quoted(path: str | Path) -> str:
    """Return a path as one types it: quoted for the shell, and with `./` before a `~` that our flags would expand."""
    import shlex  # here, as the modules below

    return shlex.quote(f"./{path}" if str(path).startswith("~") else str(path))


def matching(pattern: str, *, recursive: bool = False) -> list[str]:
    """Return the paths that a glob pattern names, sorted byte by byte as C's glob() sorts.

    recursive: `**` stands for any folders.
    What exists is taken as it is: a path, or of a pattern the folders that it begins with. So `exp[12]/*.bin` names the
    files in the folder `exp[12]` where there is one.
    """
    if os.path.lexists(pattern):
        return [pattern]
    folder = pattern
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    names = glob.glob(pattern[len(folder) :].lstrip("/"), root_dir=folder or None, recursive=recursive)
    return sorted((os.path.join(folder, name) for name in names), key=os.fsencode)


@contextmanager
def refusing(what: str, advice: str = "", kind: type[InputError] = InputError) -> Iterator[None]:
    """Turn an OSError of the block into an InputError: what could not be done, the cause, and what to do, if anything.

    kind: the error's type.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what} ({reason(error)}); {advice}" if advice else f"{what}: {reason(error)}") from error


class Stamp(NamedTuple):
    """What tells whether a file is still the one that was looked at."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds


def stamp_of(file: BinaryIO) -> Stamp:
    """Return the stamp of an open file."""
    found = os.fstat(file.fileno())
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@contextmanager
def opened(path: Path, stamp: Stamp | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading; with a stamp, the same file as then.

    Raises FormatError if there is none, it cannot be read, it is a folder or a pipe, or it changed since `stamp`.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a folder, or something like a pipe that could block or never end
            raise FormatError(f"{path}: {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}; expected a file")
        file = path.open("rb")
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, InputError):
            raise
        raise FormatError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    with file:
        if stamp is not None and stamp_of(file) != stamp:
            raise FormatError(f"{path}: changed while it was being read; is something writing to it?")
        yield file


def read_json_object(path: Path, largest: int) -> dict[str, Any]:
    """Return the object in a JSON file of at most `largest` bytes. Raises FormatError if there is none."""
    with opened(path) as file:
        size = stamp_of(file).size
        if size > largest:
            raise FormatError(f"{path}: {size:,} bytes; expected a file of JSON with at most {largest:,}")
        with refusing(f"{path}: cannot be read", kind=FormatError):
            raw = file.read(size)
    try:
        found = json.loads(raw.decode())
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{path}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path}: is not a JSON object, but {type(found).__name__}")
    return found


def json_text(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON file as transformers writes it."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@contextmanager
def complete_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; what the block writes there takes its place if it ends without an error.

    It may also make a folder there, where there is nothing at `path`. The new content is on the disk before its name
    shows it. On an error what is temporary is removed and whatever stood at `path` is untouched. Raises OSError.
    """
    import secrets  # here, as other modules below: --help does without, and they take longer than all of ours
    import shutil

    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # two processes never share a name
    try:
        yield temporary
        for each in (*temporary.rglob("*"), temporary):
            sync(each)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file that appears under its name only when complete. Raises OSError."""
    with complete_file(path) as temporary:
        temporary.write_bytes(data)


def write_atomic(path: str | Path, data: bytes) -> None:
    """Write a file that appears under its name only when complete. Raises InputError, naming the file."""
    refuse_irregular(Path(path))
    with refusing(f"{path}: cannot be written", "write elsewhere or free space"):
        write_bytes(path, data)


def refuse_irregular(path: Path) -> None:
    """Check that a rename to `path` would take nothing but a file's place, no device's or pipe's. Raises InputError."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "not a regular file"
        raise InputError(f"{path}: cannot be written: it is {what}; give a file name")


def check_output(flag: str, path: Path, endings: Sequence[str] = (), hint: str = "") -> None:
    """Check, before any work, that a flag's path can be that of a file that is written. Raises InputError.

    endings: of its name, for in `--json a.log b.log` argparse takes a.log for the file. hint: what to do without one.
    """
    if endings and path.suffix.lower() not in endings:
        *others, last = endings
        words = f"{', '.join(others)} or {last}" if others else last
        raise InputError(f"{flag} {path}: the name must end in {words}{hint}")
    folder = path.resolve().parent
    if not folder.is_dir():
        named = folder if path.is_symlink() else path.parent
        raise InputError(f"{flag} {path}: there is no folder {named} to write it into")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{flag} {path}: cannot be written: no file can be made in {path.parent}; name another folder")
    refuse_irregular(path)


def refuse_existing(path: Path, force: bool) -> None:
    """Check that nothing would be written over, unless --force says so. Raises InputError."""
    if os.path.lexists(path) and not force:
        raise InputError(f"{path}: exists already; --force replaces it")


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder and those above it; at the end, remove those of them in which nothing came to lie."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in new:
            with suppress(OSError):
                path.rmdir()


def write_problem(folder: Path) -> str | None:
    """Make a folder if need be; return why no file can be made in it, None if one can."""
    import tempfile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return reason(error)


def digest_of_files(paths: Iterable[Path]) -> str:
    """Return what tells these files apart, whatever their order: 16 hexadecimal digits. Raises OSError."""
    import hashlib

    digest = hashlib.sha256()
    for path in sorted(paths):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def reason(error: BaseException | str) -> str:
    """Return an OSError's cause in words, without its number and path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def leads_to(path: str | Path, descriptor: int) -> bool:
    """Return whether a path is still that of an open file or folder; True where the system cannot tell."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for somebody to write to it
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool | None:
    """Take the system's lock on an open file or folder, unless another process has it; return whether it is ours.

    None: this file system has no locks. A lock dies with the process, however that ends. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        return None
    return True
