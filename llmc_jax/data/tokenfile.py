"""Token files: read and write the three formats llm.c's trainers read, told apart by their content.

    gpt2-uint16    256 int32 of header (magic 20240520, version 1, number of tokens), then uint16 tokens
    llama3-uint32  the same header with magic 20240801, version 7, then uint32 tokens
    raw-int32      no header, int32 tokens: the files of train_gpt2_fp32.cu, before May 2024

All little-endian. Leaves out how text becomes tokens, and in which order a run reads them (loader.py).
"""

import os
import stat
import struct
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import matching, reason, refusing, write_atomic
from llmc_jax.base.magics import HEADER_BYTES

MAX_TOKENS = (1 << 31) - 1  # the header counts in an int32
MAX_RAW_ID = (1 << 24) - 1  # far above any tokenizer; text, floats or uint16 pairs read as int32 soon exceed it
READ_BYTES = 1 << 22  # of a headerless file's check, at a time
MOST_AT_ONCE = 1 << 30  # bytes; the system gives no more than 2 GiB in one call


class Kind(NamedTuple):
    """One format: magic and version (None: no header), the tokens' dtype."""

    magic: int | None
    version: int | None
    dtype: np.dtype[Any]


KINDS = {
    "gpt2-uint16": Kind(magics.GPT2_TOKENS, 1, np.dtype("<u2")),
    "llama3-uint32": Kind(magics.LLAMA3_TOKENS, 7, np.dtype("<u4")),
    "raw-int32": Kind(None, None, np.dtype("<i4")),
}
HEADLESS = "uint16 tokens without a header, as nanoGPT writes them, are not read"
MAKE_ONE = "make token files from text with `llmc-jax data prepare FILE`"


class TokenFile:
    """An open token file, of which tokens are read when asked for.

    They are read, not mapped into memory: the system ends a program that looks beyond a mapped file's end, which is
    where a file that somebody shortens has it. A file that is deleted or replaced while it is open can be read on.

    path; kind: a name in KINDS; header_bytes: where the first token lies; dtype: of the tokens; num_tokens and size (in
    bytes): as they were when it was opened. Closed by `close`, at the end of a `with`, or once nobody refers to it.
    """

    def __init__(self, path: Path, kind: str, num_tokens: int, file: IO[bytes]) -> None:
        self.path, self.kind, self.num_tokens = path, kind, num_tokens
        self.header_bytes = 0 if kind == "raw-int32" else HEADER_BYTES
        self.dtype = KINDS[kind].dtype
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return tokens start to start + count, or to the end: (count,) of the kind's dtype, read-only.

        Raises FormatError if the file has become shorter than that, InputError if the disk does not give them.
        """
        count = self.num_tokens - start if count is None else count
        assert 0 <= start <= start + count <= self.num_tokens, (start, count, self.num_tokens)
        offset, size = self.header_bytes + start * self.dtype.itemsize, count * self.dtype.itemsize
        raw, descriptor = b"", self._file.fileno()
        while len(raw) < size:  # more than once only for a huge piece
            try:
                more = os.pread(descriptor, min(size - len(raw), MOST_AT_ONCE), offset + len(raw))
            except OSError as error:
                raise InputError(
                    f"{self.path}: cannot be read any more ({reason(error)}); is the disk sound?"
                ) from error
            if not more:
                raise FormatError(
                    f"{self.path}: was shortened while it was being read: it had {self.size} bytes and has "
                    f"{os.fstat(descriptor).st_size} now; copy or make it again, and leave it alone while it is used"
                )
            raw += more
        return np.frombuffer(raw, self.dtype)

    def foreign_id(self, start: int, tokens: np.ndarray, vocab_size: int) -> str | None:
        """Return which of its tokens, read from `start` on, is the first that is no id below V; None if all are."""
        unsigned = tokens.view(f"<u{self.dtype.itemsize}")  # a negative id of an int32 file is above any V
        if not tokens.size or unsigned.max() < vocab_size:
            return None
        at = int(np.argmax(unsigned >= vocab_size))
        byte = self.header_bytes + (start + at) * self.dtype.itemsize
        return f"token {start + at} (byte {byte}) is id {tokens[at]}; with V={vocab_size} ids end at {vocab_size - 1}"

    def close(self) -> None:
        """Close it; nothing can be read any more."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def open_token_file(path: str | Path) -> TokenFile:
    """Open a token file of any of the three formats; nothing but the header of a file with a header is read.

    A file that begins with no magic number is taken for raw int32 if every id in it is from 0 to 2^24 - 1, which one
    pass over the file checks. The ids of the other formats are checked by who knows the vocabulary (the loader).

    Raises InputError if there is no readable file, FormatError if it is not a token file or its size is not exactly
    what its header promises. Source: `dataloader_load_shard_` of llm.c's llmc/dataloader.h.
    """
    path = Path(path)
    with refusing(f"{path}: cannot be read", "check the path and its permissions"):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for its writer
            what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise InputError(f"{path}: is {what}; name a token file, or a pattern such as 'data/*.bin'")
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - the TokenFile closes it
        try:
            return _open(path, file)
        except BaseException:
            file.close()
            raise


def _open(path: Path, file: IO[bytes]) -> TokenFile:
    size = os.fstat(file.fileno()).st_size
    header = file.read(HEADER_BYTES)
    kind = _kind_of(path, header)
    if kind == "raw-int32":
        _check_raw(path, file, size)
        return TokenFile(path, kind, size // 4, file)
    return TokenFile(path, kind, _count_in_header(path, kind, header, size), file)


def _kind_of(path: Path, header: bytes) -> str:
    if len(header) < 4:
        raise FormatError(f"{path}: has {len(header)} bytes, not even one token or a header; {MAKE_ONE}")
    (magic,) = struct.unpack_from("<i", header)
    kinds = {kind.magic: name for name, kind in KINDS.items()}
    if magic in magics.MEANINGS and magic not in kinds:
        raise FormatError(f"{path}: is {magics.MEANINGS[magic]}, magic {magic}; expected a token file; {MAKE_ONE}")
    return kinds.get(magic, "raw-int32")


def _count_in_header(path: Path, name: str, header: bytes, size: int) -> int:
    kind = KINDS[name]
    assert kind.magic is not None
    _, version, count, *_ = magics.read_header(path, header, kind.magic, "a token file")
    if version != kind.version:
        raise FormatError(
            f"{path}: byte 4: version {version} of the format with magic {kind.magic}; expected version "
            f"{kind.version}; write the file again with llm.c's or this project's data tools"
        )
    if count < 0:
        raise FormatError(
            f"{path}: byte 8: the header counts {count} tokens; expected 0 to {MAX_TOKENS}; make the file again, in "
            "shards if it holds more"
        )
    expected = HEADER_BYTES + count * kind.dtype.itemsize
    if size != expected:
        found = "truncated" if size < expected else "oversized"
        raise FormatError(
            f"{path}: {found}: {size} bytes, but {count} tokens of {kind.dtype.itemsize} bytes after a header of "
            f"{HEADER_BYTES} make {expected}; copy or make the file again"
        )
    return count


def _check_raw(path: Path, file: IO[bytes], size: int) -> None:
    if size % 4:
        raise FormatError(
            f"{path}: begins with no magic number of a token file, and its {size} bytes are not whole int32 tokens "
            f"either; {HEADLESS}; {MAKE_ONE}"
        )
    file.seek(0)
    offset = 0
    while block := file.read(READ_BYTES):
        # read as unsigned, a negative id is a huge one
        ids = np.frombuffer(block[: len(block) // 4 * 4], "<i4")
        bad = np.flatnonzero(ids.view("<u4") > MAX_RAW_ID)
        if bad.size:
            raise FormatError(
                f"{path}: begins with no magic number of a token file, and read as raw int32 tokens it holds "
                f"{ids[bad[0]]} at byte {offset + 4 * bad[0]}, which is not a token id (0 to {MAX_RAW_ID}); "
                f"{HEADLESS}; {MAKE_ONE}"
            )
        offset += len(block)


def write_token_file(path: str | Path, tokens: Any, kind: str = "gpt2-uint16") -> None:
    """Write a token file that appears under its name only when complete (a file of that name is replaced).

    tokens: 1-D integers, array or sequence, any integer dtype, which the kind has room for. Raises InputError if the
    file cannot be written. Source: `write_datafile` of llm.c's dev/data/data_common.py.
    """
    array = np.asarray(tokens).astype(KINDS[kind].dtype)
    assert array.ndim == 1 and np.array_equal(array, tokens), f"{path}: ids that {kind} has no room for"
    write_atomic(path, make_header(kind, array.size) + array.tobytes())


def make_header(kind: str, count: int) -> bytes:
    """Return the header of a file of `count` tokens; empty for the kind that has none."""
    magic, version, _ = KINDS[kind]
    return b"" if magic is None else struct.pack("<256i", magic, version, count, *[0] * 253)


def expand_pattern(pattern: str | Path, flag: str) -> list[Path]:
    """Return the files that a path or pattern names, as `matching` does. Raises InputError with the flag for none."""
    pattern = str(pattern)
    if names := matching(pattern):
        return [Path(name) for name in names]
    advice = f"{MAKE_ONE} (`{typed('data')} list` shows the data sets that it can get)"
    raise InputError(f"{flag} {pattern}: no such file; check the path, or {advice}")
