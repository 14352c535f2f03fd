"""`prepare`: text, jsonl and parquet files become token files: shards of a chosen size, in parallel, with validation.

Files are read as streams and nothing but a few pieces of a megabyte per worker is in memory, however long a document
is. The result depends on the input and its order alone, not on the number of workers. Leaves out cleaning, removing
duplicates and shuffling (a run shuffles what it reads), and compressed text.
"""

import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from llmc_jax.data.documents import PIECE_CHARS, Reading, find_inputs, read_pieces, size_of
from llmc_jax.data.tokenfile import HEADER_BYTES, KINDS, MAX_TOKENS, make_header
from llmc_jax.data.tokenizers import Tokenizer, load_tokenizer
from llmc_jax.errors import InputError
from llmc_jax.files import leads_to, reason, try_lock
from llmc_jax.machine.device import usable_cores

PARTIAL = re.compile(r"\.\w[\w.-]*\.\w{8}\.partial", re.ASCII)  # a hidden folder in which files are made
SHARD_TOKENS = 10**8  # llm.c's scripts for FineWeb
VAL_TOKENS = 1 << 20  # unless asked for otherwise: at most so many,
VAL_SHARE = 10  # and at most one token in so many
BYTES_PER_WORKER = 1 << 23  # less than this is encoded sooner than a process starts
HASHED_CHARS = 4096  # of a document, to choose its side: texts that begin alike stay together

Report = Callable[[int, int], None]  # bytes read and tokens made since the last call


class Settings(NamedTuple):
    """How `prepare` splits and writes.

    shard_tokens: tokens per shard. val_tokens: so many tokens from the start are validation (0: none). val_fraction:
    instead, about this share of the documents, chosen by a hash of how they begin. Neither: the first tenth of the
    tokens, at most VAL_TOKENS. workers: processes; None: as many as cores, fewer for little input.
    """

    reading: Reading = Reading()
    shard_tokens: int = SHARD_TOKENS
    val_tokens: int | None = None
    val_fraction: float | None = None
    workers: int | None = None


class Shard(NamedTuple):
    """A token file that was written: where, for which split (`train` or `val`), how many tokens."""

    path: Path
    split: str
    tokens: int


class Prepared(NamedTuple):
    """What `prepare` made. empty: documents without any text, which were left out."""

    shards: list[Shard]
    documents: int
    empty: int

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)


def prepare(
    inputs: list[str],
    folder: Path,
    name: str,
    tokenizer: Tokenizer,
    settings: Settings | None = None,
    force: bool = False,
    report: Report | None = None,
) -> Prepared:
    """Make token files `{name}_val_000000.bin`, … and `{name}_train_000001.bin`, … in `folder` from the inputs.

    inputs: files, folders (all files in them, in the order of their paths, hidden ones left out) and glob patterns.
    Every document is preceded by the end-of-text token, and may go on in the next shard. Ids are uint16 where the
    vocabulary fits, else uint32 in the llama-3 format. The files appear together once all are complete; if anything
    goes wrong, none does. force: replace the files of an earlier run with this name (all of them).

    Raises InputError for input that cannot be read or holds no text, for a split that leaves one side empty, and for
    outputs that exist or cannot be written. Source: llm.c's dev/data/fineweb.py.
    """
    settings = settings or Settings()
    _check_settings(settings, name)
    files = find_inputs(inputs)
    outputs = re.compile(re.escape(name) + r"_(train|val)_\d{6}\.bin")
    with contextlib.ExitStack() as closing:
        try:
            if folder.is_dir():
                remove_leftovers(folder)
            elif not folder.exists():
                closing.callback(_remove_empty, folder)
            earlier = sorted(path for path in folder.glob("*.bin") if outputs.fullmatch(path.name))
            if earlier and not force:
                raise InputError(
                    f"{earlier[0]} exists ({len(earlier)} file{'s' * (len(earlier) > 1)} of this name); choose another "
                    "--name or --out, or replace them with --force"
                )
            folder.mkdir(parents=True, exist_ok=True)
            staging = closing.enter_context(_staging(folder, name))
        except OSError as error:
            raise InputError(f"{folder}: cannot be written ({reason(error)}); choose another --out") from error
        result = _write_all(files, staging, name, tokenizer, settings, report or (lambda read, tokens: None))
        shards = [shard._replace(path=folder / shard.path.name) for shard in result.shards]
        for staged, shard in zip(result.shards, shards, strict=True):
            os.replace(staged.path, shard.path)
        for path in set(earlier) - {shard.path for shard in shards}:
            path.unlink(missing_ok=True)
        return result._replace(shards=shards)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it stays if there is anything in it
        folder.rmdir()


@contextlib.contextmanager
def _staging(folder: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder that is locked as long as it is in use, and removed at the end. Raises OSError."""
    while True:
        staging = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=folder))
        with contextlib.suppress(FileNotFoundError):  # another process that begins just now took it for a leftover
            descriptor = os.open(staging, os.O_RDONLY)
            if try_lock(descriptor) is not False and leads_to(staging, descriptor):
                break
            os.close(descriptor)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove the hidden folders of processes that were killed; those that live have theirs locked. Raises OSError.

    A file system without locks keeps all of them: nobody can tell there.
    """
    for path in folder.iterdir():
        if not PARTIAL.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or not ours
            continue
        try:
            if try_lock(descriptor):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _check_settings(settings: Settings, name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise InputError(f"--name {name}: expected letters, digits and . _ - (the name goes into patterns)")
    if not 1 <= settings.shard_tokens <= MAX_TOKENS:
        raise InputError(f"--shard-size {settings.shard_tokens}: expected 1 to {MAX_TOKENS} tokens")
    if settings.val_tokens is not None and settings.val_fraction is not None:
        raise InputError("--val-tokens and --val-fraction are two ways to split; give one of them")
    if settings.val_tokens is not None and settings.val_tokens < 0:
        raise InputError(f"--val-tokens {settings.val_tokens}: expected 0 or more")
    if settings.val_fraction is not None and not 0 < settings.val_fraction < 1:
        raise InputError(f"--val-fraction {settings.val_fraction}: expected a share between 0 and 1, such as 0.05")
    if settings.workers is not None and settings.workers < 1:
        raise InputError(f"--workers {settings.workers}: expected 1 or more")
    if settings.reading.split_on == "":
        raise InputError("--split-on: expected at least one character")


# ----- encoding: pieces become tokens, in order ----------------------------------------------------------------------


class Batch(NamedTuple):
    """Pieces that are encoded in one go. sides: per document that begins in it, whether it is for validation."""

    parts: list[tuple[bool, str]]
    sides: list[bool]
    read: int
    empty: int


Encoded = tuple[np.ndarray, list[bool]]  # a batch's tokens, (n,), with an end-of-text before each document; its sides


def _batches(files: list[Path], settings: Settings) -> Iterator[Batch]:
    parts: list[tuple[bool, str]] = []
    sides: list[bool] = []
    characters = read = empty = 0
    for piece in itertools.chain.from_iterable(read_pieces(path, settings.reading) for path in files):
        read += piece.read
        if not piece.text:
            empty += 1
            continue
        parts.append((piece.begins, piece.text))
        characters += len(piece.text)
        if piece.begins:
            sides.append(settings.val_fraction is not None and is_validation(piece.text, settings.val_fraction))
        if characters >= PIECE_CHARS:
            yield Batch(parts, sides, read, empty)
            parts, sides, characters, read, empty = [], [], 0, 0, 0
    yield Batch(parts, sides, read, empty)


def is_validation(document: str, fraction: float) -> bool:
    """Return whether a document falls into the validation split: the same for the same text, wherever it comes from."""
    head = document[:HASHED_CHARS].encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(head, digest_size=8).digest(), "little") < fraction * 2.0**64


_tokenizer = functools.cache(load_tokenizer)  # in a worker, made once


def _encode_with(spec: str, parts: list[tuple[bool, str]]) -> np.ndarray:
    tokenizer = _tokenizer(spec).tokenizer
    assert tokenizer is not None
    return encode_parts(tokenizer, parts)


def encode_parts(tokenizer: Tokenizer, parts: list[tuple[bool, str]]) -> np.ndarray:
    """Return the tokens of (begins a document, text) parts, one after the other: (n,) of the tokenizer's dtype."""
    pieces = [tokenizer.encode_document(text) if begins else tokenizer.encode(text) for begins, text in parts]
    return np.concatenate([np.zeros(0, tokenizer.dtype), *pieces])


def _encode_all(batches: Iterator[Batch], tokenizer: Tokenizer, workers: int) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield the batches with their tokens, in their order."""
    if workers == 1:
        for batch in batches:
            yield batch, encode_parts(tokenizer, batch.parts)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the parent's threads' locks as they stand
    ignored = signal.SIGINT, signal.SIG_IGN  # Ctrl-C goes to all; the parent ends the workers
    with ProcessPoolExecutor(workers, mp_context=context, initializer=signal.signal, initargs=ignored) as pool:
        waiting: deque[tuple[Batch, Future[np.ndarray]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch._replace(parts=[]), pool.submit(_encode_with, tokenizer.spec, batch.parts)))
                if len(waiting) > 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            raise InputError("a worker process ended before its time (out of memory?); try --workers 1") from error
        finally:
            for _, future in waiting:
                future.cancel()


# ----- splitting and writing -----------------------------------------------------------------------------------------


def split_by_document(encoded: Iterable[Encoded], eot: int) -> Generator[tuple[bool, np.ndarray]]:
    """(is validation, tokens) by the sides of the documents; a document that goes on stays on its side."""
    side = False
    for tokens, sides in encoded:
        starts = np.flatnonzero(tokens == eot)  # nothing else in a text encodes to it
        lengths = np.diff(starts, prepend=0, append=tokens.size)  # of what goes on, then of each document
        mask = np.repeat(np.array([side, *sides]), lengths)  # (n,)
        yield True, tokens[mask]
        yield False, tokens[~mask]
        side = sides[-1] if sides else side


def split_by_position(encoded: Iterable[Encoded], val_tokens: int | None) -> Generator[tuple[bool, np.ndarray]]:
    """(is validation, tokens) with the first `val_tokens` for validation.

    None: one in VAL_SHARE, at most VAL_TOKENS; as many are held back as are needed to know how many that is.
    """
    held: list[np.ndarray] = []
    count = 0
    left = val_tokens
    for tokens, _ in encoded:
        if left is None:
            held.append(tokens)
            count += tokens.size
            if count < VAL_SHARE * VAL_TOKENS:
                continue
            tokens, held, left = np.concatenate(held), [], VAL_TOKENS
        yield True, tokens[:left]
        yield False, tokens[left:]
        left -= min(left, tokens.size)
    if held:
        tokens = np.concatenate(held)
        yield True, tokens[: count // VAL_SHARE]
        yield False, tokens[count // VAL_SHARE :]


class ShardWriter:
    """Writes a stream of tokens as numbered token files of `size` tokens, the last one shorter, into a folder."""

    def __init__(self, folder: Path, name: str, split: str, first: int, size: int, kind: str) -> None:
        self.folder, self.name, self.split, self.first, self.size, self.kind = folder, name, split, first, size, kind
        self.shards: list[Shard] = []
        self.file: IO[bytes] | None = None
        self.count = 0  # tokens in the open file

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, (n,) of any integer dtype whose values fit the format."""
        while tokens.size:
            file = self.file or self._open()
            fits = tokens[: self.size - self.count]
            file.write(fits.astype(KINDS[self.kind].dtype, copy=False).tobytes())
            self.count += fits.size
            tokens = tokens[fits.size :]
            if self.count == self.size:
                self.finish()

    def _open(self) -> IO[bytes]:
        number = self.first + len(self.shards)
        path = self.folder / f"{self.name}_{self.split}_{number:06d}.bin"
        self.file = path.open("xb")
        self.shards.append(Shard(path, self.split, 0))
        self.file.write(bytes(HEADER_BYTES))
        return self.file

    def finish(self) -> None:
        """Write the header of the open file, now that its number of tokens is known, and see it to the disk."""
        if self.file is None:
            return
        with self.file as file:
            file.seek(0)
            file.write(make_header(self.kind, self.count))
            file.flush()
            os.fsync(file.fileno())
        self.shards[-1] = self.shards[-1]._replace(tokens=self.count)
        self.file, self.count = None, 0


def _write_all(
    files: list[Path], staging: Path, name: str, tokenizer: Tokenizer, settings: Settings, report: Report
) -> Prepared:
    documents = empty = 0
    total = sum(map(size_of, files))
    workers = settings.workers or max(1, min(len(usable_cores()), total // BYTES_PER_WORKER))

    def encoded() -> Iterator[Encoded]:
        nonlocal documents, empty
        for batch, tokens in _encode_all(_batches(files, settings), tokenizer, workers):
            documents += len(batch.sides)
            empty += batch.empty
            report(batch.read, tokens.size)
            yield tokens, batch.sides

    if settings.val_fraction is None:
        stream = split_by_position(encoded(), settings.val_tokens)
    else:
        stream = split_by_document(encoded(), tokenizer.eot)
    shards = _write_shards(stream, staging, name, tokenizer.kind, settings.shard_tokens)
    result = Prepared(shards, documents, empty)  # counted while the stream is written
    _check_result(result, files, settings)
    return result


def _write_shards(
    stream: Generator[tuple[bool, np.ndarray]], staging: Path, name: str, kind: str, size: int
) -> list[Shard]:
    val = ShardWriter(staging, name, "val", 0, size, kind)
    train = ShardWriter(staging, name, "train", 1, size, kind)
    with contextlib.closing(stream):  # ends the workers too
        try:
            for side, tokens in stream:
                (val if side else train).write(tokens)
            val.finish()
            train.finish()
        except OSError as error:
            raise InputError(
                f"{staging.parent}: cannot be written ({reason(error)}); free space, or choose another --out"
            ) from error
        finally:
            for writer in (val, train):
                if writer.file:  # after an error
                    writer.file.close()
    return val.shards + train.shards


def _check_result(result: Prepared, files: list[Path], settings: Settings) -> None:
    train, val = result.tokens("train"), result.tokens("val")
    if train + val == 0:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise InputError(f"{files[0]}{more}: no text in {result.empty} documents; nothing to write")
    if train == 0:
        raise InputError(
            f"all {val} tokens would be validation; give a smaller --val-tokens, or --val-tokens 0 for none at all"
        )
    if val == 0 and settings.val_tokens != 0:
        raise InputError(
            f"none of the {result.documents} documents ({train} tokens) falls into the validation split; take "
            "--val-tokens N for the first N tokens, or cut documents with --split-on"
        )
