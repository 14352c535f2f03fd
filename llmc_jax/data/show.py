"""`inspect`: what is in a token file: format, tokens, documents, range of ids, and how it begins.

Leaves out changing the file.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError
from llmc_jax.config.model import GPT2_VOCAB
from llmc_jax.data import tables
from llmc_jax.data.tokenfile import open_token_file
from llmc_jax.data.tokenizers import BYTES_VOCAB, LLAMA3_VOCAB, Choice, load_tokenizer, sample_text, usual_eot

SHOWN_TOKENS = 64


class Inspection(NamedTuple):
    """The contents of a token file. size: in bytes. vocab: the V of the tokenizer, or that the ids suggest.

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


def inspect_token_file(path: str | Path, tokenizer: str = "auto", show: int = SHOWN_TOKENS) -> Inspection:
    """Read a token file of any format.

    tokenizer: as for `load_tokenizer`; `auto` takes the one that lies beside the file (data/tables.py), else the one
    that the ids fit, if its table is at hand: the smallest of bytes' (V=257), GPT-2's and Llama 3's. show: how many
    tokens are decoded.

    Raises FormatError if it is no token file or holds an id that the tokenizer does not have, InputError if the file or
    the tokenizer cannot be had.
    """
    choice = None if tokenizer in ("auto", "none") else load_tokenizer(tokenizer)
    if tokenizer == "auto" and (beside := tables.of_token_files([Path(path)])):
        choice = Choice(beside[0][1], tables.words(*beside[0]))
    with open_token_file(path) as file:
        tokens = file.read()
    lowest, highest = (int(tokens.min()), int(tokens.max())) if tokens.size else (-1, -1)
    if choice is not None and choice.tokenizer is not None:
        vocab_size = choice.tokenizer.vocab_size
    else:
        vocab_size = next((V for V in (BYTES_VOCAB, GPT2_VOCAB, LLAMA3_VOCAB) if highest < V), highest + 1)
    if foreign := file.foreign_id(0, tokens, vocab_size):
        raise FormatError(f"{file.path}: {foreign}; was the file made with another tokenizer?")
    choice = choice or load_tokenizer(tokenizer, vocab_size)
    eot = choice.tokenizer.eot if choice.tokenizer else usual_eot(vocab_size)
    first = tokens[:show].tolist()
    facts = file.path, file.kind, file.size, file.num_tokens, lowest, highest, int(np.count_nonzero(tokens == eot))
    return Inspection(*facts, vocab_size, eot, first, sample_text(choice.tokenizer, first), choice.note)


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
