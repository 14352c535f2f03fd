"""`inspect`: what is in a token file: format, tokens, documents, range of ids, and how it begins.

Leaves out changing the file.
"""

from pathlib import Path

import numpy as np

from llmc_jax.base.errors import FormatError
from llmc_jax.config.model import GPT2_VOCAB
from llmc_jax.data import tables
from llmc_jax.data.tokenfile import open_token_file
from llmc_jax.data.tokenizers import BYTES_VOCAB, LLAMA3_VOCAB, Choice, load_tokenizer, sample_text, usual_eot

SHOWN_TOKENS = 64


def describe(path: str | Path, tokenizer: str = "auto", show: int = SHOWN_TOKENS) -> str:
    """Return what is in a token file of any format, as lines of text.

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
    rows = {
        "format": f"{file.kind}, {file.size:,} bytes",
        "tokens": f"{file.num_tokens:,}",
        "documents": f"{np.count_nonzero(tokens == eot):,} (end-of-text id {eot})",
        "ids": f"{lowest} to {highest} (V={vocab_size})" if tokens.size else "none",
        "tokenizer": choice.note,
        "first ids": " ".join(map(str, first)),
        "first text": sample_text(choice.tokenizer, first),
    }
    gap = "\n" + " " * 14
    return "\n".join([str(path), *(f"  {name:<10}  {value.replace('\n', gap)}" for name, value in rows.items())])
