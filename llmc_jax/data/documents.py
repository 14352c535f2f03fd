"""Documents out of text, jsonl and parquet files, read as streams.

Leaves out what becomes of them (prepare.py), and compressed text.
"""

import codecs
import itertools
import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import matching, refusing

READ_BYTES = 1 << 20
LONGEST_DOCUMENT = 1 << 28  # characters
LONGEST_LINE = 1 << 28
LONGEST_LIST = 1 << 29  # bytes
LARGEST_TEXT = 1 << 28  # bytes, of what is read as a whole
NOT_TEXT = "leave the file out if it is not text, convert it, or replace such bytes with --errors replace"
BLANK_LINE = re.compile(r"(?:\r\n|\n)\r?\n")  # as fast again as with \r? in front
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # all else is text


class Reading(NamedTuple):
    """How files are read.

    format: auto (by the file's ending), text, jsonl, json (one list of objects) or parquet. field: of all but text,
    what holds the text. split_on: the separator that ends a document in a text file; None: one document per file.
    drop_separator: leave it out of the documents. errors: strict, or replace bytes that are not UTF-8 by U+FFFD. strip:
    leave out the white space around a document; shuffle: the seed of the order in which a list's documents come; both
    for json alone.
    """

    format: str = "auto"
    field: str = "text"
    split_on: re.Pattern[str] | None = None
    drop_separator: bool = False
    errors: str = "strict"
    strip: bool = False
    shuffle: int | None = None


def find_inputs(inputs: list[str]) -> list[Path]:
    """Return the files that the inputs name, each once: in the order given, those of a folder or pattern sorted.

    Raises InputError if an input names no file.
    """
    found: dict[Path, None] = {}
    for item in inputs:
        names = matching(item, recursive=True)
        if names == [item] and os.path.isdir(item):
            folder = Path(item)
            shown = (p for p in folder.rglob("*") if not any(n.startswith(".") for n in p.relative_to(folder).parts))
            files = sorted(path for path in shown if path.is_file())
        else:
            files = sorted(Path(name) for name in names if name == item or os.path.isfile(name))
        if not files:
            what = "is a folder without files" if os.path.isdir(item) else "no such file"
            raise InputError(f"{item}: {what}; name text, jsonl or parquet files, folders of them, or a pattern")
        found.update(dict.fromkeys(files))
    return list(found)


def size_of(path: Path) -> int:
    """Return the size of an input in bytes; 0 if it is not known, which reading it will explain."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Document(NamedTuple):
    """A document. read: bytes of input it took."""

    text: str
    read: int


def read_documents(path: Path, reading: Reading) -> Iterator[Document]:
    """Yield the documents of one file.

    Raises InputError naming file and place for what cannot be read, decoded or understood.
    """
    kind = FORMATS.get(path.suffix.lower(), "text") if reading.format == "auto" else reading.format
    with refusing(f"{path}: cannot be read", "check the path and its permissions"):
        if kind == "parquet":
            yield from _parquet_documents(path, reading.field)
            return
        with open(path, "rb") as file:
            if kind == "json":
                yield from _json_documents(path, file, reading)
            elif kind == "jsonl":
                yield from _jsonl_documents(path, file, reading)
            else:
                blocks = _decoded(path, file, reading.errors)
                yield from cut_documents(blocks, reading.split_on, reading.drop_separator, str(path))


def read_text(file: IO[bytes], where: str, advice: str = "shorten it") -> bytes:
    """Return the bytes of a text as a whole, without its byte order mark.

    Raises InputError that says where for UTF-16, and with advice for more than LARGEST_TEXT bytes.
    """
    data = file.read(LARGEST_TEXT + 1)  # a file without an end must not fill the memory
    if len(data) > LARGEST_TEXT:
        raise InputError(f"{where}: has more than {LARGEST_TEXT:,} bytes; {advice}")
    refuse_utf16(data, where)
    return data.removeprefix(codecs.BOM_UTF8)


MARKS = {codecs.BOM_UTF32_LE: "UTF-32LE", codecs.BOM_UTF16_LE: "UTF-16LE", codecs.BOM_UTF16_BE: "UTF-16BE"}


def refuse_utf16(data: bytes, where: str) -> None:
    """Check that a text does not begin as UTF-16 or UTF-32. Raises InputError."""
    if form := next((form for mark, form in MARKS.items() if data.startswith(mark)), ""):
        raise InputError(f"{where}: is {form}; expected UTF-8: convert it with `iconv -f {form} -t UTF-8`")


def _decoded(path: Path, file: IO[bytes], errors: str) -> Iterator[tuple[str, int]]:
    """Yield the text of a file in blocks, and how many bytes each took. A byte order mark at the start is left out."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset = 0
    while True:
        block = file.read(READ_BYTES)
        if offset == 0:
            refuse_utf16(block, str(path))
        pending = len(decoder.getstate()[0])  # bytes of a character that the last block began
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(str(path), offset - pending, error, NOT_TEXT) from error
        yield text.removeprefix("\ufeff") if offset == 0 else text, len(block)
        if not block:
            return
        offset += len(block)


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError, advice: str) -> InputError:
    found = f"{error.object[error.start]:#04x} is not UTF-8 ({error.reason})"
    return InputError(f"{where}: byte {offset + error.start}: {found}; {advice}")


def cut_documents(
    blocks: Iterable[tuple[str, int]], separator: re.Pattern[str] | None, drop: bool = False, where: str = ""
) -> Iterator[Document]:
    """Yield the documents of a text that comes in blocks, each with its bytes.

    drop: leave separators out; else each stays at the end of its document. separator: its pattern must not be shorter
    than what it matches; without one there is one document. Newlines alone behind the last one are no document. With
    BLANK_LINE the documents are those of llm.c's dev/data/tinyshakespeare.py. Raises InputError for one that is too
    long to be in memory.
    """
    beginning = 0 if separator is None else len(separator.pattern) - 1  # of a separator, at the end of a block
    held, first, read = "", True, 0
    for text, count in blocks:
        new_from = len(held)
        held += text
        read += count
        done = 0
        for found in separator.finditer(held, max(0, new_from - beginning)) if separator else ():
            yield Document(held[done : found.start() if drop else found.end()], read)
            first, read, done = False, 0, found.end()
        held = held[done:]
        if len(held) > LONGEST_DOCUMENT:
            words = f"a document has more than {LONGEST_DOCUMENT:,} characters"
            raise InputError(f"{where}: {words}; cut it with --split-on")
    if first or held.strip("\r\n"):
        yield Document(held, read)


def text_lines(
    file: IO[bytes], where: str, longest: int = LONGEST_LINE, errors: str = "strict", advice: str = NOT_TEXT
) -> Iterator[tuple[int, str, int]]:
    """Yield the lines of a file in UTF-8, each with its number from 1 and its bytes; the first without its mark.

    Raises InputError that says where for one of `longest` bytes, and with advice for bytes that are no such text.
    """
    offset = 0
    for number, line in enumerate(iter(lambda: file.readline(longest), b""), 1):
        if len(line) == longest:
            raise InputError(f"{where}:{number}: more than {longest} bytes without an end of line; is it text?")
        if number == 1:
            refuse_utf16(line, where)
        try:
            text = line.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            raise _not_utf8(where, offset, error, advice) from error
        yield number, text.removeprefix("\ufeff") if number == 1 else text, len(line)
        offset += len(line)


def _jsonl_documents(path: Path, file: IO[bytes], reading: Reading) -> Iterator[Document]:
    for number, text, size in text_lines(file, str(path), errors=reading.errors):
        where = f"{path}:{number}"
        if text.lstrip().startswith("[") and path.suffix.lower() == ".json":
            raise InputError(f"{where}: is a list, where jsonl has an object per line; read it with --format json")
        if text.strip():
            yield Document(_text_in(json_object(text, where), reading.field, where), size)


def json_object(text: str, where: str) -> dict[str, Any]:
    """Return what a line of jsonl holds. Raises InputError that names the line if it is no JSON, or no object."""
    return _object(_parsed(text, where, "one object per line"), where)


def _parsed(text: str | bytes, where: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        said = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{where}: is not JSON ({said}); expected {expected}") from error


def _object(item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InputError(f"{where}: is a JSON {type(item).__name__}; expected an object with named fields")
    return item


def _json_documents(path: Path, file: IO[bytes], reading: Reading) -> Iterator[Document]:
    """Yield the documents of a file that is one list; it is in memory as a whole."""
    data = file.read(LONGEST_LIST + 1)
    refuse_utf16(data, str(path))
    if len(data) > LONGEST_LIST:
        raise InputError(f"{path}: more than {LONGEST_LIST} bytes in one list; write one object per line, as jsonl")
    items = _parsed(data, str(path), "a list of objects")
    if not isinstance(items, list):
        raise InputError(f"{path}: is a JSON {type(items).__name__}; expected a list of objects")
    numbered = list(enumerate(items))
    if reading.shuffle is not None:
        random.Random(reading.shuffle).shuffle(numbered)
    for place, (number, item) in enumerate(numbered):
        where = f"{path}: item {number}"
        text = _text_in(_object(item, where), reading.field, where)
        read = len(data) * (place + 1) // len(items) - len(data) * place // len(items)
        yield Document(text.strip() if reading.strip else text, read)


def _text_in(item: Mapping[str, object], field: str, where: str) -> str:
    """Return the text that a line or row holds in a field; none of it where that is null."""
    if field not in item:
        names = ", ".join(map(repr, itertools.islice(item, 8))) + (", …" if len(item) > 8 else "")
        raise InputError(f"{where}: has no field {field!r}; it has {names or 'none'}; choose one with --field")
    value = item[field]
    if not isinstance(value, str | None):
        raise InputError(
            f"{where}: field {field!r} holds a {type(value).__name__}; expected text; choose another with --field"
        )
    return value or ""


def _parquet_documents(path: Path, field: str) -> Iterator[Document]:
    with open_parquet(str(path), path) as file:
        _text_in(dict.fromkeys(file.schema_arrow.names), field, str(path))  # is there such a column?
        share = path.stat().st_size / max(1, file.metadata.num_rows)
        for row, item in enumerate(parquet_rows(file, [field]), 1):
            read = int(row * share) - int((row - 1) * share)
            yield Document(_text_in(item, field, f"{path}: row {row}"), read)


@contextmanager
def open_parquet(where: str, source: Path | IO[bytes]) -> Iterator[Any]:
    """Yield a pyarrow.parquet.ParquetFile; what its reading raises becomes one line that says where.

    Raises InputError without pyarrow, FormatError for what is no parquet, and the system's OSError.
    """
    check_parquet(where)
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source) as file:
            yield file
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's; pyarrow's own have no number
            raise
        said = str(error).partition("\n")[0]
        raise FormatError(f"{where}: cannot be read as parquet ({said}); copy or download it again") from error


def parquet_rows(file: Any, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of an open parquet file, some or all columns of them."""
    for batch in file.iter_batches(batch_size=256, columns=columns):
        yield from batch.to_pylist()


def check_parquet(where: str) -> None:
    """Check that parquet can be read here. Raises InputError."""
    try:
        from pyarrow import parquet  # noqa: F401
    except ImportError as error:
        raise InputError(f"{where}: reading parquet needs pyarrow: pip install pyarrow") from error
