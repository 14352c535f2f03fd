"""Documents out of text, jsonl and parquet files, read as streams: a long document comes in parts.

Leaves out what becomes of them (prepare.py), and compressed text.
"""

import codecs
import glob
import itertools
import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from llmc_jax.errors import FormatError, InputError
from llmc_jax.files import refusing

READ_BYTES = 1 << 20
PIECE_CHARS = 1 << 20  # longer documents are cut
LONGEST_LINE = 1 << 28
LONGEST_LIST = 1 << 29  # bytes
FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}  # all else is text


class Reading(NamedTuple):
    """How files are read.

    format: auto (by the file's ending), text, jsonl, json (one list of objects) or parquet. field: of all but text,
    what holds the text. split_on: what ends a document in a text file; None: one document per file. errors: strict, or
    replace bytes that are not UTF-8 by U+FFFD. strip: leave out the white space around a document; shuffle: the seed
    of the order in which a list's documents come; both for json alone. longest: characters of a text file's document
    from which on it is cut.
    """

    format: str = "auto"
    field: str = "text"
    split_on: str | None = None
    errors: str = "strict"
    strip: bool = False
    shuffle: int | None = None
    longest: int = PIECE_CHARS


def find_inputs(inputs: list[str]) -> list[Path]:
    """Return the files that the inputs name, each once: in the order given, those of a folder or pattern sorted.

    Raises InputError if an input names no file.
    """
    found: dict[Path, None] = {}
    for item in inputs:
        if os.path.isdir(item):
            folder = Path(item)
            shown = (p for p in folder.rglob("*") if not any(n.startswith(".") for n in p.relative_to(folder).parts))
            files = sorted(path for path in shown if path.is_file())
        elif os.path.lexists(item):
            files = [Path(item)]
        else:
            files = sorted(Path(match) for match in glob.glob(item, recursive=True) if os.path.isfile(match))
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


class Piece(NamedTuple):
    """A document, or a part of a long one. begins: it is the document's first part. read: bytes of input it took."""

    begins: bool
    text: str
    read: int


def read_pieces(path: Path, reading: Reading) -> Iterator[Piece]:
    """Yield the documents of one file, long ones in parts whose tokens, one after the other, are those of the whole.

    Raises InputError naming file and place for what cannot be read, decoded or understood.
    """
    kind = FORMATS.get(path.suffix.lower(), "text") if reading.format == "auto" else reading.format
    with refusing(f"{path}: cannot be read", "check the path and its permissions"):
        if kind == "parquet":
            yield from _parquet_pieces(path, reading.field)
            return
        with open(path, "rb") as file:
            if kind == "json":
                yield from _json_pieces(path, file, reading)
            elif kind == "jsonl":
                yield from _jsonl_pieces(path, file, reading)
            else:
                yield from cut_documents(_decoded(path, file, reading.errors), reading.split_on, reading.longest)


def _decoded(path: Path, file: IO[bytes], errors: str) -> Iterator[tuple[str, int]]:
    """Yield the text of a file in blocks, and how many bytes each took. A byte order mark at the start is left out."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset = 0
    while True:
        block = file.read(READ_BYTES)
        pending = len(decoder.getstate()[0])  # bytes of a character that the last block began
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset - pending, error) from error
        yield text.removeprefix("\ufeff") if offset == 0 else text, len(block)
        if not block:
            return
        offset += len(block)


def _not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> InputError:
    at = offset + error.start
    return InputError(
        f"{path}: byte {at}: {error.object[error.start]:#04x} is not UTF-8 ({error.reason}); leave the file out if it "
        "is not text, convert it, or replace such bytes with --errors replace"
    )


def cut_documents(
    blocks: Iterable[tuple[str, int]], separator: str | None, longest: int = PIECE_CHARS
) -> Iterator[Piece]:
    """Yield blocks of text and their bytes as pieces of documents; a separator stays at the end of its document.

    With a separator the documents are those of llm.c's dev/data/tinyshakespeare.py; without one there is one document.
    Of parts, none is much longer than `longest` characters unless it has no space or newline to cut before.
    """
    held = ""
    begins = first = True
    read = 0
    for text, count in blocks:
        new_from = len(held)
        held += text
        read += count
        if separator is not None and separator in held[max(0, new_from - len(separator) + 1) :]:
            *complete, held = held.split(separator)
            for part in complete:
                yield Piece(begins, part + separator, read)
                begins, first, read = True, False, 0
            new_from = 0
        if len(held) > longest:
            end = len(held) - (len(separator) - 1 if separator else 0)  # the rest may begin a separator
            cut = _last_boundary(held, max(0, new_from - 1), end)
            if cut:
                yield Piece(begins, held[:cut], read)
                begins, first, read, held = False, False, 0, held[cut:]
    if held or first:
        yield Piece(begins, held, read)


_LAST_BOUNDARY = re.compile(r".*(\S(?= )|[^\W_](?=\n))", re.DOTALL)


def _last_boundary(text: str, start: int, end: int) -> int:
    """Return where a text may be cut without changing its tokens: after the last character in [start, end) that is no
    white space and has a space behind it, or is a letter or digit and has a newline behind it; 0 if there is none.

    Why there: no word of GPT-2's pattern or of Llama 3's goes on from there, so a word ends here in any case (Llama
    3's takes newlines to the marks before them); and only white space looks at what follows it, so no word before the
    cut can tell that the rest is missing.
    """
    for width in (1 << 10, 1 << 15, end - start):  # almost always the first is enough
        if match := _LAST_BOUNDARY.match(text, max(start, end - width), end):
            return match.end(1)
    return 0


def _jsonl_pieces(path: Path, file: IO[bytes], reading: Reading) -> Iterator[Piece]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
        where = f"{path}:{number}"
        if len(line) == LONGEST_LINE:
            raise InputError(f"{where}: more than {LONGEST_LINE} bytes without an end of line; is it jsonl?")
        try:
            text = line.decode("utf-8", reading.errors)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, file.tell() - len(line), error) from error
        if number == 1:
            text = text.removeprefix("\ufeff")
        if not text.strip():
            continue
        yield Piece(True, _text_in(json_object(text, where), reading.field, where), len(line))


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


def _json_pieces(path: Path, file: IO[bytes], reading: Reading) -> Iterator[Piece]:
    """Yield the documents of a file that is one list; it is in memory as a whole."""
    data = file.read(LONGEST_LIST + 1)
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
        yield Piece(True, text.strip() if reading.strip else text, read)


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


def _parquet_pieces(path: Path, field: str) -> Iterator[Piece]:
    with open_parquet(str(path), path) as file:
        _text_in(dict.fromkeys(file.schema_arrow.names), field, str(path))  # is there such a column?
        share = path.stat().st_size / max(1, file.metadata.num_rows)
        for row, item in enumerate(parquet_rows(file, [field]), 1):
            read = int(row * share) - int((row - 1) * share)
            yield Piece(True, _text_in(item, field, f"{path}: row {row}"), read)


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
