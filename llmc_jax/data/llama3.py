"""Llama 3's tokenizer: Meta's `tokenizer.model`, a table of 128,000 pieces in base64, and 256 special tokens behind it.

The file is tiktoken's format: a line for each piece, its bytes in base64, a space, its rank. Leaves out the merging
(tokenizers.py), and Llama's other tokenizers: those of Llama 1 and 2 are SentencePiece models, Llama 4's cuts text by
another rule.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import cache_folder, refusing
from llmc_jax.data.tokenizers import LLAMA3_EOT, LONGEST_PIECE, Choice, Table, Tokenizer, table_tokenizer

DEFAULT_MODEL = "tokenizer.model"  # as Meta calls it
MODEL_SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
MODEL_REPOSITORY = "meta-llama/Llama-3.1-8B"  # llm.c takes it from there too
MODEL_BYTES = 2_183_982
LARGEST_FILE = 1 << 26
SPECIALS = 256

# In this order from the first id behind the table on; the rest up to 256 are reserved
_NAMES = (
    "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id",
    "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image",
)  # fmt: skip
# Tables in the same format that belong to another rule of cutting text into words
_OTHERS = {50256: "GPT-2's", 100256: "GPT-4's (cl100k)", 199998: "GPT-4o's (o200k)", 200000: "Llama 4's"}


def special_tokens() -> tuple[bytes, ...]:
    """Return the 256 special tokens in the order of their ids. Source: llama-models, models/llama3/tokenizer.py."""
    reserved = (f"reserved_special_token_{2 + number}" for number in range(SPECIALS - len(_NAMES)))
    return tuple(f"<|{name}|>".encode() for name in (*_NAMES, *reserved))


def is_model(path: str | Path) -> bool:
    """Return whether a file begins as a `tokenizer.model` does, of Llama 3 or of an earlier one. Raises InputError."""
    with refusing(f"{path}: cannot be read", "check the path"), open(path, "rb") as file:
        head = file.read(512)
    return re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|\Z)", head) is not None or _is_sentence_piece(head)


def _is_sentence_piece(head: bytes) -> bool:
    return head[:1] == b"\n" and b"<unk>" in head[:64]


def read_ranks(path: str | Path) -> tuple[bytes, ...]:
    """Return the pieces of a table in the order of their ranks, which are the numbers from 0 on.

    Raises InputError if there is no readable file, FormatError naming the line for what is no such table.
    """
    with refusing(f"{path}: cannot be read", "check the path"), open(path, "rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise FormatError(f"{path}: has more than {LARGEST_FILE} bytes; Llama 3's table has {MODEL_BYTES:,}")
    if _is_sentence_piece(data):
        raise FormatError(f"{path}: is a SentencePiece model, as Llama 1 and 2 have it; Llama 3's is a table of text")
    pieces: dict[int, bytes] = {}
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        piece, rank = _entry(f"{path}:{number}", line)
        if rank >= len(lines) or rank in pieces:
            what = "a second time" if rank in pieces else f"in a table of {len(lines)} lines"
            raise FormatError(f"{path}:{number}: rank {rank} {what}; copy the file again")
        pieces[rank] = piece
    if not pieces:
        raise FormatError(f"{path}: is empty; expected a line for each piece: base64, a space, its rank")
    return tuple(pieces[rank] for rank in range(len(pieces)))


def _entry(where: str, line: bytes) -> tuple[bytes, int]:
    text, _, rank = line.partition(b" ")
    try:
        piece = base64.b64decode(text, validate=True)
    except binascii.Error:
        piece = b""
    if not (rank.isdigit() and len(rank) < 9 and 1 <= len(piece) <= LONGEST_PIECE):
        raise FormatError(f"{where}: {line[:40]!r} is no piece of a table; expected base64, a space, and its rank")
    return piece, int(rank)


def read_model(path: str | Path) -> Table:
    """Return the table of a `tokenizer.model`: its pieces, and the 256 special tokens behind them.

    The id before a document is that of <|begin_of_text|>, as llm.c's scripts have it. Raises InputError if there is no
    readable file, FormatError for one that is no such table, or that of a tokenizer with other rules.
    """
    pieces = read_ranks(path)
    if (other := _OTHERS.get(len(pieces))) is not None:
        raise FormatError(
            f"{path}: a table of {len(pieces):,} pieces is {other}, which cuts text into words by another rule; "
            f"Llama 3's has {LLAMA3_EOT:,}"
        )
    return Table((*pieces, *special_tokens()), len(pieces))


def model_tokenizer(path: str | Path, name: str | None = None, spec: str | None = None) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.model`, of Meta's or one made like it, whatever the file's name."""
    return table_tokenizer(name or Path(path).name, read_model(path), spec or str(path))


def llama3_tokenizer(allow_network: bool = True, folders: Iterable[Path] = ()) -> Choice:
    """Return Llama 3's tokenizer, V=128256, its table from the first of these that has it:

    1. `tokenizer.model` in the current folder or in one of `folders`, if it is Meta's
    2. `llama3/tokenizer.model` in our cache folder
    3. if `allow_network`: Hugging Face, with a login that has accepted its licence; it is then kept in 2

    Raises InputError that says how to get the table if none has it.
    """
    kept = cache_folder() / "llama3" / DEFAULT_MODEL
    for path in (Path(DEFAULT_MODEL), *(folder / DEFAULT_MODEL for folder in folders), kept):
        if _is_metas(path):
            return Choice(model_tokenizer(path, "llama3", "llama3"), f"Llama 3's, from {path}")
    if not allow_network:
        raise InputError(
            f"Llama 3's tokenizer table is neither in ./{DEFAULT_MODEL} nor in {kept}; {_HOW_TO_GET_MODEL}"
        )
    return Choice(model_tokenizer(_downloaded(kept), "llama3", "llama3"), "Llama 3's")


_HOW_TO_GET_MODEL = (
    f"accept its licence at https://huggingface.co/{MODEL_REPOSITORY} and set HF_TOKEN to your login, or give its "
    f"original/{DEFAULT_MODEL} with --tokenizer PATH"
)


def _is_metas(path: Path) -> bool:
    """Return whether a file is there that is Meta's, byte for byte."""
    try:
        return path.stat().st_size == MODEL_BYTES and hashlib.sha256(path.read_bytes()).hexdigest() == MODEL_SHA256
    except OSError:
        return False


def _downloaded(kept: Path) -> Path:
    from llmc_jax.data.download import Remote, fetch
    from llmc_jax.data.hub import endpoint, token

    url = f"{endpoint()}/{MODEL_REPOSITORY}/resolve/main/original/{DEFAULT_MODEL}"
    what, digest = "Llama 3's tokenizer table", MODEL_SHA256
    path = fetch(Remote((url,), what, _HOW_TO_GET_MODEL, MODEL_BYTES, digest, token=token()), kept)
    if not _is_metas(path):  # of a file that was there already only the size is checked
        raise InputError(f"{path}: is not {what}; remove it, or move it away")
    return path
