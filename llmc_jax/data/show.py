"""`inspect`: what is in a token file: format, tokens, documents, range of ids, and how it begins.

Leaves out changing the file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError
from llmc_jax.config.model import GPT2_VOCAB
from llmc_jax.data import tables
from llmc_jax.data.tokenfile import TokenFile, open_token_file
from llmc_jax.data.tokenizers import BYTES_VOCAB, LLAMA3_VOCAB, Choice, load_tokenizer, sample_text, usual_eot

CHUNK_TOKENS = 1 << 22  # read at a time
SHOWN_TOKENS = 64


def _chunks(file: TokenFile) -> Iterator[np.ndarray]:
    """Yield the tokens of a file, a few megabytes at a time."""
    for start in range(0, file.num_tokens, CHUNK_TOKENS):
        yield file.read(start, min(CHUNK_TOKENS, file.num_tokens - start))


class Inspection(NamedTuple):
    """What is in a token file. size: in bytes. vocab: the V that the ids were checked against, or that they suggest.

    lowest, highest: ids, -1 if there is none. documents: how often the end-of-text id `eot` occurs. first: the first
    ids; text: what they stand for (the ids themselves without a tokenizer); note: where the tokenizer comes from, or
    why there is none.
    """

    path: Path
    kind: str
    size: int
    tokens: int
    lowest: int
    highest: int
    documents: int
    vocab: int
    eot: int
    first: list[int]
    text: str
    note: str


def inspect_token_file(
    path: str | Path,
    tokenizer: str = "auto",
    vocab_size: int | None = None,
    eot: int | None = None,
    show: int = SHOWN_TOKENS,
) -> Inspection:
    """Read a token file of any format, whatever its size, in bounded memory.

    tokenizer: as for `load_tokenizer`; `auto` takes the one that lies beside the file (data/tables.py), else the one
    that the ids fit, if its table is at hand. vocab_size: V,
    against which the ids are checked; None: the smallest of bytes' (257), GPT-2's and Llama 3's that the ids fit.
    eot: the id before each document; None: the tokenizer's, or the vocabulary's. show: how many tokens are decoded.

    Raises FormatError if it is no token file or holds an id that V or the tokenizer does not have, InputError if the
    file or the tokenizer cannot be had.
    """
    named = None if tokenizer in ("auto", "none") else load_tokenizer(tokenizer, vocab_size)
    if tokenizer == "auto" and (beside := tables.of_token_files([Path(path)])):
        named = Choice(beside[0][1], tables.words(*beside[0]))
    candidates = [BYTES_VOCAB, GPT2_VOCAB, LLAMA3_VOCAB]
    if named is not None and named.tokenizer is not None:
        candidates = [named.tokenizer.vocab_size]
        vocab_size = vocab_size or named.tokenizer.vocab_size
    with open_token_file(path) as file:
        ranges = [(int(chunk.min()), int(chunk.max())) for chunk in _chunks(file)]
        lowest, highest = min((low for low, _ in ranges), default=-1), max((high for _, high in ranges), default=-1)
        if vocab_size is None:
            vocab_size = next((vocab for vocab in candidates if highest < vocab), highest + 1)
        if highest >= vocab_size:
            found = (file.foreign_id(i * CHUNK_TOKENS, chunk, vocab_size) for i, chunk in enumerate(_chunks(file)))
            which = next(filter(None, found), "was changed while it was being read")
            raise FormatError(
                f"{file.path}: {which} (the largest here is {highest}); was the file made with another tokenizer?"
            )
        choice = named or load_tokenizer(tokenizer, vocab_size)
        if eot is None:
            eot = choice.tokenizer.eot if choice.tokenizer else usual_eot(vocab_size)
        documents = sum(int(np.count_nonzero(chunk == eot)) for chunk in _chunks(file))
        first = file.read(0, min(max(0, show), file.num_tokens)).tolist()
    facts = file.path, file.kind, file.size, file.num_tokens, lowest, highest, documents, vocab_size, eot, first
    return Inspection(*facts, sample_text(choice.tokenizer, first), choice.note)


def describe(found: Inspection) -> str:
    """Return an inspection as lines of text."""
    rows = [
        ("format", f"{found.kind}, {found.size:,} bytes"),
        ("tokens", f"{found.tokens:,}"),
        ("documents", f"{found.documents:,} (end-of-text id {found.eot})"),
        ("ids", f"{found.lowest} to {found.highest} (V={found.vocab})" if found.tokens else "none"),
        ("tokenizer", found.note),
        ("first ids", " ".join(map(str, found.first))),
        ("first text", found.text),
    ]
    gap = "\n" + " " * 14
    return "\n".join([str(found.path), *(f"  {name:<10}  {value.replace('\n', gap)}" for name, value in rows)])
