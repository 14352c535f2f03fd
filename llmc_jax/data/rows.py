"""Rows of public data files, each with its place: of jsonl, csv and parquet, by themselves, in a folder, zip or tar.

What a file is is told by how it begins, not by its name. Nothing is unpacked to the disk, and a row at a time is in
memory. Leaves out what rows mean (tasks.py), and long documents (documents.py).
"""

import csv
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import refusing
from llmc_jax.data.documents import json_object, open_parquet, parquet_rows, refuse_utf16, text_lines

LONGEST_LINE = 1 << 24
try:
    from lzma import LZMAError
except ImportError:  # a Python that was built without
    LZMAError = EOFError  # type: ignore[misc, assignment]

SNIFFED = 512
AGAIN = "copy or download it again"
UNREADABLE = (
    zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, LZMAError, struct.error, RuntimeError,
    NotImplementedError, UnicodeDecodeError,  # a member's name
)  # fmt: skip
HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/)")


class Row(NamedTuple):
    """A row. where: file and place, for messages. source: the name of its file, without folders. number: in it, from 0.

    fields: by name; of a csv file without a header by column, from 0.
    """

    where: str
    source: str
    number: int
    fields: dict[Any, Any]


Opener = Callable[[], Any]  # returns an IO[bytes]; the type of tarfile's allows for members that are no files


class Source(NamedTuple):
    """A file to read rows from: where (for messages), its name, and what opens it anew."""

    where: str
    name: str
    open: Opener


def read_rows(path: Path, wanted: re.Pattern[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file; of those in a folder, zip or tar whose paths `wanted` finds, sorted by path.

    Raises InputError that names file and place for what cannot be read or understood.
    """
    with refusing(f"{path}: cannot be read", "check the path and its permissions"), _container(path) as found:
        if isinstance(found, Source):
            yield from _rows_of(found)
            return
        names = sorted(name for name in found if wanted and wanted.search(name) and not HIDDEN.search(name))
        if not names:
            raise InputError(f"{path}: has no file of this task; {_some(list(found))}")
        for name in names:
            yield from _rows_of(Source(f"{path}:{name}", name.rpartition("/")[2], found[name]))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"it holds {shown}" if names else "it is empty"


@contextmanager
def _container(path: Path) -> Iterator[Source | dict[str, Opener]]:
    """Yield a file as a source; of a folder, zip or tar, what opens each file in it."""
    if path.is_dir():
        yield {str(file.relative_to(path)): partial(file.open, "rb") for file in path.rglob("*") if file.is_file()}
    elif not path.is_file() and path.exists():
        raise InputError(f"{path}: is not a regular file; give a file, a folder, a zip or a tar")
    elif _begins(path, b"PK\3\4"):
        with understood(path), zipfile.ZipFile(path) as archive:
            yield {info.filename: partial(archive.open, info) for info in archive.infolist() if not info.is_dir()}
    elif _is_tar(path):
        with understood(path), tarfile.open(path) as tar:
            yield {member.name: partial(tar.extractfile, member) for member in tar if member.isfile()}
    else:
        yield Source(str(path), path.name, partial(path.open, "rb"))


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _is_tar(path: Path) -> bool:
    with understood(path):  # compressed, it may end early
        return tarfile.is_tarfile(path)


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turn what the readers of archives raise in the block into one line. Raises FormatError."""
    try:
        yield
    except UNREADABLE as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise FormatError(f"{path}: cannot be unpacked ({said}); {AGAIN}") from error


def _rows_of(source: Source) -> Iterator[Row]:
    with source.open() as file:
        begin = file.read(SNIFFED)
        file.seek(0)
        if (magic := int.from_bytes(begin[:4], "little")) in magics.MEANINGS and len(begin) >= 4:
            raise FormatError(f"{source.where}: is {magics.MEANINGS[magic]}; expected jsonl, csv or parquet")
        if not begin.startswith(b"PAR1"):
            refuse_utf16(begin, source.where)
        if begin.startswith(b"PAR1"):
            yield from _parquet_rows(source, file)
        elif begin.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
            yield from _jsonl_rows(source, file)
        elif source.name.lower().endswith(".csv"):
            yield from _csv_rows(source, file)
        else:
            what = "is empty" if not begin else "is neither jsonl nor csv, parquet, zip or tar"
            raise FormatError(f"{source.where}: {what}; give the file as it was published")


def _jsonl_rows(source: Source, file: IO[bytes]) -> Iterator[Row]:
    lines = (
        (f"{source.where}:{number}", line)
        for number, line, _ in text_lines(file, source.where, LONGEST_LINE, advice=AGAIN)
        if line.strip()
    )
    for row, (where, line) in enumerate(lines):
        yield Row(where, source.name, row, json_object(line, where))


def _csv_rows(source: Source, file: IO[bytes]) -> Iterator[Row]:
    reader = csv.reader(line for _, line, _ in text_lines(file, source.where, LONGEST_LINE, advice=AGAIN))
    try:
        for row, fields in enumerate(fields for fields in reader if fields):  # blank lines are no rows
            yield Row(f"{source.where}:{reader.line_num}", source.name, row, dict(enumerate(fields)))
    except csv.Error as error:
        raise FormatError(f"{source.where}:{reader.line_num}: is not csv ({error})") from error


def _parquet_rows(source: Source, file: IO[bytes]) -> Iterator[Row]:
    with open_parquet(source.where, file) as table:
        for number, fields in enumerate(parquet_rows(table)):
            yield Row(f"{source.where}: row {number}", source.name, number, fields)
