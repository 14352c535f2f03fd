"""`prepare`: text, jsonl and parquet files become token files: shards of a chosen size, in parallel, with validation.

Files are read as streams, a few batches of documents per worker are in memory at a time. The result depends on the
input and its order alone, not on the number of workers. Leaves out cleaning, removing
duplicates and shuffling (a run shuffles what it reads), and compressed text.
"""

import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import made_folder, refuse_existing, refusing, sync
from llmc_jax.data import tables
from llmc_jax.data.documents import Document, Reading, find_inputs, read_documents, size_of
from llmc_jax.data.tokenfile import HEADER_BYTES, KINDS, make_header
from llmc_jax.data.tokenizers import Tokenizer, load_tokenizer
from llmc_jax.machine.device import usable_cores

SHARD_TOKENS = 10**8  # llm.c's scripts for FineWeb
VAL_TOKENS = 1 << 20  # unless asked for otherwise: at most so many,
VAL_SHARE = 10  # and at most one token in so many
BYTES_PER_WORKER = 1 << 23  # less than this is encoded sooner than a process starts
BATCH_CHARS = 1 << 20  # of documents that are encoded in one go
HASHED_CHARS = 4096  # of a document, to choose its side: texts that begin alike stay together

Report = Callable[[int, int], None]  # bytes read and tokens made since the last call


class Settings(NamedTuple):
    """How `prepare` splits and writes.

    shard_tokens: tokens per shard. val_tokens: so many tokens from the start are validation (0: none). val_fraction:
    instead, about this share of the documents, chosen by a hash of how they begin. Neither: the first tenth of the
    tokens, at most VAL_TOKENS. val_files: instead, all documents of the first so many input files. workers: processes;
    None: as many as cores, fewer for little input. keep_empty: a document without any text is an end-of-text token, as
    in llm.c's scripts, and not left out. numbered: files have numbers; without, there is one for each split.
    """

    reading: Reading = Reading()
    shard_tokens: int = SHARD_TOKENS
    val_tokens: int | None = None
    val_fraction: float | None = None
    workers: int | None = None
    val_files: int | None = None
    keep_empty: bool = False
    numbered: bool = True


class Shard(NamedTuple):
    """A token file that was written: where, for which split (`train` or `val`), how many tokens."""

    path: Path
    split: str
    tokens: int


class Prepared(NamedTuple):
    """What `prepare` made.

    table: of the tokenizer. empty: documents without any text, which were left out.
    """

    shards: list[Shard]
    table: Path
    documents: int
    empty: int

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards if shard.split == split)


def prepare(
    inputs: list[str],
    folder: Path,
    name: str,
    tokenizer: Tokenizer,
    settings: Settings,
    force: bool = False,
    report: Report = lambda read, tokens: None,
) -> Prepared:
    """Make token files `{name}_val_000000.bin`, … and `{name}_train_000001.bin`, … in `folder` from the inputs.

    The tokenizer lies beside them for training to find, as `{name}.tokenizer` (data/tables.py).
    inputs: files, folders (all files in them, in the order of their paths, hidden ones left out) and glob patterns.
    Every document is preceded by the end-of-text token, and may go on in the next shard. Ids are uint16 where the
    vocabulary fits, else uint32 in the llama-3 format. The files appear together once all are complete; if anything
    goes wrong, none does. force: replace the files of an earlier run with this name (all of them).

    Raises InputError for input that cannot be read or holds no text, for a split that leaves one side empty, and for
    outputs that exist or cannot be written. Source: llm.c's dev/data/fineweb.py.
    """
    files = find_inputs(inputs)
    with contextlib.ExitStack() as closing:
        with refusing(f"{folder}: cannot be written", "choose another --out"):
            closing.enter_context(made_folder(folder))
            earlier = refuse_made(folder, name, force)
            hidden = tempfile.TemporaryDirectory(
                prefix=f".{name}.", suffix=".partial", dir=folder, ignore_cleanup_errors=True
            )
            staging = Path(closing.enter_context(hidden))
        result = _write_all(files, staging, name, tokenizer, settings, report)
        shards = [shard._replace(path=folder / shard.path.name) for shard in result.shards]
        table = folder / result.table.name
        table.unlink(missing_ok=True)  # a run that is killed here leaves no pair that does not belong together
        for staged, shard in zip(result.shards, shards, strict=True):
            os.replace(staged.path, shard.path)
        os.replace(result.table, table)
        for path in set(earlier) - {table, *(shard.path for shard in shards)}:
            path.unlink(missing_ok=True)
        return result._replace(shards=shards, table=table)


def refuse_made(folder: Path, name: str, force: bool) -> list[Path]:
    """Return the files of this name that were made earlier. Raises InputError where there are any, but with force."""
    outputs = re.compile(re.escape(name) + r"(_(train|val)(_\d{6})?\.bin|\.tokenizer)")
    earlier = sorted(path for path in folder.glob(f"{name}*") if outputs.fullmatch(path.name))
    if earlier:
        refuse_existing(earlier[0], force)
    return earlier


# ----- encoding: documents become tokens, in order ------------------------------------------------------------------


Batch = tuple[list[Document], list[Document]]  # encoded in one go: for training, and for validation
Tokens = tuple[np.ndarray, np.ndarray]  # of a batch, an end-of-text token before each document


def _batches(files: list[Path], settings: Settings) -> Iterator[Batch]:
    """Yield what the files hold, a megabyte at a time. Where the split is by position all of it is for training.

    A list is shuffled with a seed that counts the files of its split, as in llm.c's dev/data/tinystories.py.
    """
    train: list[Document] = []
    val: list[Document] = []
    size, val_files = 0, settings.val_files or 0
    for index, path in enumerate(files):
        reading, of_val = settings.reading, index < val_files
        if reading.shuffle is not None:
            reading = reading._replace(shuffle=reading.shuffle + (index if of_val else index - val_files))
        for document in read_documents(path, reading):
            by_hash = settings.val_fraction is not None and is_validation(document.text, settings.val_fraction)
            (val if of_val or by_hash else train).append(document)
            size += len(document.text) + 1  # many documents without text are a batch too
            if size >= BATCH_CHARS:
                yield train, val
                train, val, size = [], [], 0
    yield train, val


def is_validation(document: str, fraction: float) -> bool:
    """Return whether a document falls into the validation split: the same for the same text, wherever it comes from."""
    head = document[:HASHED_CHARS].encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(head, digest_size=8).digest(), "little") < fraction * 2.0**64


_tokenizer = functools.cache(load_tokenizer)  # in a worker, made once


def _encode_with(spec: str, batch: Batch, keep_empty: bool) -> Tokens:
    tokenizer = _tokenizer(spec).tokenizer
    assert tokenizer is not None
    return encode_batch(tokenizer, batch, keep_empty)


def encode_batch(tokenizer: Tokenizer, batch: Batch, keep_empty: bool = False) -> Tokens:
    """Return the tokens of a batch, (n,) and (m,) of the tokenizer's dtype.

    A document without any text has none, or if it is kept the end-of-text token alone.
    """

    def encoded(documents: list[Document]) -> np.ndarray:
        ids = [tokenizer.encode_document(each.text) for each in documents if each.text or keep_empty]
        return np.concatenate([np.zeros(0, tokenizer.dtype), *ids])

    return encoded(batch[0]), encoded(batch[1])


def _encode_all(
    batches: Iterator[Batch], tokenizer: Tokenizer, workers: int, keep_empty: bool
) -> Generator[tuple[Batch, Tokens]]:
    """Yield the batches with their tokens, in their order."""
    if workers == 1:
        yield from ((batch, encode_batch(tokenizer, batch, keep_empty)) for batch in batches)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the parent's threads' locks as they stand
    ignored = signal.SIGINT, signal.SIG_IGN  # Ctrl-C goes to all; the parent ends the workers
    with ProcessPoolExecutor(workers, mp_context=context, initializer=signal.signal, initargs=ignored) as pool:
        waiting: deque[tuple[Batch, Future[Tokens]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_encode_with, tokenizer.spec, batch, keep_empty)))
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


def split_by_position(encoded: Iterator[Tokens], val_tokens: int | None) -> Iterator[Tokens]:
    """Yield tokens, all of which come for training, with the first `val_tokens` for validation.

    None: one in VAL_SHARE, at most VAL_TOKENS; as many are held back as are needed to know how many that is.
    """
    if val_tokens is None:
        held, count = [], 0
        for batch in encoded:
            held.append(batch)
            count += batch[0].size
            if count >= VAL_SHARE * VAL_TOKENS:
                break
        val_tokens = min(count // VAL_SHARE, VAL_TOKENS)
        encoded = itertools.chain(held, encoded)
    for tokens, _ in encoded:
        yield tokens[val_tokens:], tokens[:val_tokens]
        val_tokens -= min(val_tokens, tokens.size)


class ShardWriter:
    """Writes a stream of tokens as numbered token files of `size` tokens, the last one shorter, into a folder.

    first: the first file's number; None: there is one file, without a number.
    """

    def __init__(self, folder: Path, name: str, split: str, first: int | None, size: int, kind: str) -> None:
        self.folder, self.name, self.split, self.first, self.size, self.kind = folder, name, split, first, size, kind
        self.shards: list[Shard] = []  # the last one grows

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, (n,) of any integer dtype whose values fit the format."""
        while tokens.size:
            if not self.shards or self.shards[-1].tokens == self.size:
                if self.shards and self.first is None:
                    raise InputError(f"more than {self.size} tokens for one file; give --shard-size for several")
                number = "" if self.first is None else f"_{self.first + len(self.shards):06d}"
                path = self.folder / f"{self.name}_{self.split}{number}.bin"
                path.write_bytes(bytes(HEADER_BYTES))
                self.shards.append(Shard(path, self.split, 0))
            path, _, count = self.shards[-1]
            fits = tokens[: self.size - count]
            with path.open("ab") as file:
                file.write(fits.astype(KINDS[self.kind].dtype, copy=False).tobytes())
            self.shards[-1] = Shard(path, self.split, count + fits.size)
            tokens = tokens[fits.size :]

    def finish(self) -> None:
        """Write the headers, now that the numbers of tokens are known, and see the files to the disk."""
        for shard in self.shards:
            with shard.path.open("r+b") as file:
                file.write(make_header(self.kind, shard.tokens))
            sync(shard.path)


def _write_all(
    files: list[Path], staging: Path, name: str, tokenizer: Tokenizer, settings: Settings, report: Report
) -> Prepared:
    documents = empty = 0
    workers = settings.workers or max(1, min(len(usable_cores()), sum(map(size_of, files)) // BYTES_PER_WORKER))
    train, val = (
        ShardWriter(staging, name, split, first if settings.numbered else None, settings.shard_tokens, tokenizer.kind)
        for split, first in (("train", 1), ("val", 0))
    )

    def counted(encoded: Iterator[tuple[Batch, Tokens]]) -> Iterator[Tokens]:
        nonlocal documents, empty
        for batch, tokens in encoded:
            found = [*batch[0], *batch[1]]
            left_out = 0 if settings.keep_empty else sum(not each.text for each in found)
            documents += len(found) - left_out
            empty += left_out
            report(sum(each.read for each in found), tokens[0].size + tokens[1].size)
            yield tokens

    batches = _batches(files, settings)
    with contextlib.closing(
        _encode_all(batches, tokenizer, workers, settings.keep_empty)
    ) as encoded:  # ends the workers
        stream = counted(encoded)
        if settings.val_fraction is None and settings.val_files is None:
            stream = split_by_position(stream, settings.val_tokens)
        with refusing(f"{staging.parent}: cannot be written", "free space, or choose another --out"):
            for train_tokens, val_tokens in stream:
                train.write(train_tokens)
                val.write(val_tokens)
            train.finish()
            val.finish()
            table = staging / (name + tables.BESIDE)
            tables.write(table, tokenizer)
    result = Prepared(val.shards + train.shards, table, documents, empty)  # counted while the stream is written
    _check_result(result, files, settings)
    return result


def _check_result(result: Prepared, files: list[Path], settings: Settings) -> None:
    train, val = result.tokens("train"), result.tokens("val")
    if train + val == 0:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise InputError(f"{files[0]}{more}: no text in {result.empty} documents; nothing to write")
    if train == 0:
        advice = "give more text, a smaller --shard-size or --val-tokens, or --val-tokens 0 for none"
        raise InputError(f"all {val} tokens would be validation; {advice}")
    if val == 0 and settings.val_tokens != 0:
        raise InputError(
            f"none of the {result.documents} documents ({train} tokens) falls into the validation split; take "
            "--val-tokens N for the first N tokens, or cut documents with --split-on"
        )
