"""`inspect`: what is in a token file: format, tokens, documents, range of ids, and how it begins.

Leaves out changing the file.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.config.model import GPT2_VOCAB
from llmc_jax.data.tokenfile import TokenFile, open_token_file
from llmc_jax.data.tokenizers import BYTES_EOT, BYTES_VOCAB, GPT2_EOT, load_tokenizer, sample_text
from llmc_jax.errors import FormatError, InputError

CHUNK_TOKENS = 1 << 22  # read at a time
LLAMA3_EOT = 128000  # <|begin_of_text|>, which llm.c's scripts put before each document
LLAMA3_VOCAB = 128256
SHOWN_TOKENS = 64


class TokenStats(NamedTuple):
    """What one pass over the tokens finds: their number, the smallest and the largest id (-1 if there is none), and how
    often each of the ids that were asked for occurs."""

    tokens: int
    lowest: int
    highest: int
    counts: dict[int, int]


def token_stats(file: TokenFile, counted: Sequence[int]) -> TokenStats:
    """Go over the tokens of a file once, a few megabytes at a time."""
    lows, highs = [], []
    counts = dict.fromkeys(counted, 0)
    for _, chunk in _chunks(file):
        lows.append(int(chunk.min()))
        highs.append(int(chunk.max()))
        for token in counts:
            counts[token] += int(np.count_nonzero(chunk == token))
    return TokenStats(file.num_tokens, min(lows, default=-1), max(highs, default=-1), counts)


def _chunks(file: TokenFile) -> Iterator[tuple[int, np.ndarray]]:
    """Yield where each piece of a file begins, and its tokens."""
    for start in range(0, file.num_tokens, CHUNK_TOKENS):
        yield start, file.read(start, min(CHUNK_TOKENS, file.num_tokens - start))


class Inspection(NamedTuple):
    """What is in a token file. size: in bytes. vocab: the V that the ids were checked against, or that they suggest.

    documents: how often the end-of-text id `eot` occurs. first: the first ids; text: what they stand for (the ids
    themselves without a tokenizer); note: where the tokenizer comes from, or why there is none.
    """

    path: Path
    kind: str
    size: int
    stats: TokenStats
    vocab: int
    eot: int
    first: list[int]
    text: str
    note: str

    @property
    def documents(self) -> int:
        return self.stats.counts[self.eot]


def inspect_token_file(
    path: str | Path,
    tokenizer: str = "auto",
    vocab_size: int | None = None,
    eot: int | None = None,
    show: int = SHOWN_TOKENS,
) -> Inspection:
    """Read a token file of any format once, whatever its size, in bounded memory.

    tokenizer: as for `load_tokenizer`; `auto` takes the one that the ids fit, if its table is at hand. vocab_size: V,
    against which the ids are checked; None: the smallest of bytes' (257), GPT-2's and Llama 3's that the ids fit.
    eot: the id before each document; None: the tokenizer's, or the vocabulary's. show: how many tokens are decoded.

    Raises FormatError if it is no token file or holds an id that V or the tokenizer does not have, InputError if the
    file or the tokenizer cannot be had.
    """
    named = None if tokenizer in ("auto", "none") else load_tokenizer(tokenizer, vocab_size)
    candidates = {BYTES_VOCAB: BYTES_EOT, GPT2_VOCAB: GPT2_EOT, LLAMA3_VOCAB: LLAMA3_EOT}
    if named is not None and named.tokenizer is not None:
        candidates = {named.tokenizer.vocab_size: named.tokenizer.eot}
        vocab_size = named.tokenizer.vocab_size
    with open_token_file(path) as file:
        stats = token_stats(file, sorted({*candidates.values()} if eot is None else {eot}))
        if vocab_size is None:
            vocab_size = next((vocab for vocab in candidates if stats.highest < vocab), stats.highest + 1)
        if stats.highest >= vocab_size:
            raise _beyond(file, stats, vocab_size)
        choice = named or load_tokenizer(tokenizer, vocab_size)
        if eot is None:
            eot = choice.tokenizer.eot if choice.tokenizer else candidates.get(vocab_size, vocab_size - 1)
            if eot not in stats.counts:  # of an unusual vocabulary, known only now
                stats = token_stats(file, [eot])
        first = [int(token) for token in file.read(0, min(max(0, show), file.num_tokens))]
    text = sample_text(choice.tokenizer, first)
    return Inspection(file.path, file.kind, file.size, stats, vocab_size, eot, first, text, choice.note)


def _beyond(file: TokenFile, stats: TokenStats, vocab_size: int) -> InputError:
    """Return the error that says where the first id lies that the vocabulary does not have."""
    for start, chunk in _chunks(file):
        bad = np.flatnonzero(chunk >= vocab_size)
        if bad.size:
            at = start + int(bad[0])
            byte = file.header_bytes + at * file.dtype.itemsize
            return FormatError(
                f"{file.path}: token {at} (byte {byte}) has id {int(chunk[bad[0]])}; with V={vocab_size} ids end at "
                f"{vocab_size - 1} (the largest here is {stats.highest}); was the file made with another tokenizer?"
            )
    return FormatError(f"{file.path}: changed while it was being read; is something writing to it?")


def describe(found: Inspection) -> str:
    """Return an inspection as lines of text."""
    rows = [
        ("format", f"{found.kind}, {found.size:,} bytes"),
        ("tokens", f"{found.stats.tokens:,}"),
        ("documents", f"{found.documents:,} (end-of-text id {found.eot})"),
        ("ids", f"{found.stats.lowest} to {found.stats.highest} (V={found.vocab})" if found.stats.tokens else "none"),
        ("tokenizer", found.note),
        ("first ids", " ".join(map(str, found.first))),
        ("first text", found.text),
    ]
    return "\n".join([str(found.path), *(f"  {name:<10}  {_indented(value)}" for name, value in rows)])


def _indented(value: str) -> str:
    return value.replace("\n", "\n" + " " * 14)
