"""Tokenizers: bytes, GPT-2's byte-pair encoding, and llm.c's `gpt2_tokenizer.bin`, read and written by hand.

The merging itself is tiktoken's; what is here is where the table comes from, and how text is cut into words. Leaves
out training a table, special tokens in a text, and Hugging Face's tokenizers (hf_tokenizer.py).
"""

import functools
import hashlib
import itertools
import os
import struct
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.base import magics
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import refusing, write_atomic, write_bytes
from llmc_jax.base.magics import HEADER_BYTES
from llmc_jax.config.model import GPT2_VOCAB, pad_vocab

END_OF_TEXT = b"<|endoftext|>"
BYTES_VOCAB, BYTES_EOT = 257, 256
BYTES_PIECES = (*(bytes([value]) for value in range(256)), END_OF_TEXT)
GPT2_EOT = GPT2_VOCAB - 1
DEFAULT_BIN = "gpt2_tokenizer.bin"  # where llm.c's trainers look for it

LONGEST_PIECE = 255  # its length is one byte
MAX_VOCAB = 1 << 24

# GPT-2's rule for cutting text into words, within which pairs are merged (encoder.py of openai/gpt-2), with possessive
# quantifiers where nothing can be gained by giving characters back
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
LLAMA3_BEGIN = b"<|begin_of_text|>"  # before each document in llm.c's files of Llama 3's tokens
LLAMA3_VOCAB, LLAMA3_EOT = 128256, 128000
PUBLIC = {"bytes": "bytes", "gpt2": "GPT-2's"}  # tokenizers whose tables everybody can have, in words
# tiktoken's source of the merges; its cache names a file by the sha1 of its address
MERGES_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_PIECES_SHA256 = "a622700e3255b4a6186e052c4c715c1d05634cb6041c12ab6c95c9ee0a2c9772"  # of the file format's payload


@dataclass(frozen=True)
class Tokenizer:
    """What turns text into token ids and back.

    name: `bytes`, `gpt2`, or the name of a table's file. pieces: the bytes that each id stands for, V of them; the
    end-of-text token's are shown in samples and never come out of `encode`. eot: the id before every document.
    spec: what `load_tokenizer` takes to make the same tokenizer, in another process for example. json: the
    tokenizer.json of one that the table alone does not tell, with which the tokenizers package encodes; else empty.
    """

    name: str
    pieces: tuple[bytes, ...] = field(repr=False)
    eot: int
    spec: str
    encode_text: Callable[[str], np.ndarray] = field(repr=False, compare=False)
    json: str = field(default="", repr=False)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def kind(self) -> str:
        """Return the token file format whose ids have room for this vocabulary."""
        return "gpt2-uint16" if self.vocab_size <= 1 << 16 else "llama3-uint32"

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(np.uint16) if self.vocab_size <= 1 << 16 else np.dtype(np.uint32)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a text, (n,) of `dtype`; text that spells a special token is text like any other.

        bytes must be UTF-8 (any bytes, for the bytes tokenizer): InputError otherwise. Half a surrogate pair in a str,
        which no UTF-8 can hold, becomes U+FFFD.
        """
        if isinstance(text, bytes):
            if self.name == "bytes":
                return np.frombuffer(text, np.uint8).astype(np.uint16)
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise InputError(f"the text is not UTF-8: byte {error.start} is {text[error.start]:#04x}") from error
        try:
            ids = self.encode_text(text)
        except UnicodeEncodeError:
            # halves of surrogate pairs that meet are joined, and the others replaced, as by tiktoken
            ids = self.encode_text(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return ids.astype(self.dtype, copy=False)

    def piece(self, token: int) -> bytes:
        """Return the bytes of an id that a model has; none for its padding rows, which lie beyond the table."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def encode_document(self, text: str | bytes) -> np.ndarray:
        """Return the ids of a document, the end-of-text token first as llm.c's scripts put it: (1 + n,) of `dtype`."""
        return np.concatenate([np.array([self.eot], self.dtype), self.encode(text)])

    def decode(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that the ids stand for. Raises InputError for an id that the tokenizer does not have."""
        ids = list(ids)
        if (bad := next((token for token in ids if not 0 <= token < len(self.pieces)), None)) is not None:
            raise InputError(f"the {self.name} tokenizer has ids 0 to {len(self.pieces) - 1}; found {bad}")
        return b"".join(self.pieces[token] for token in ids)


def bytes_tokenizer() -> Tokenizer:
    """Return the tokenizer in which every byte is its own id, 0 to 255; the end-of-text token is 256: V=257."""
    return Tokenizer("bytes", BYTES_PIECES, BYTES_EOT, "bytes", lambda text: np.frombuffer(text.encode(), np.uint8))


# ----- GPT-2's table ------------------------------------------------------------------------------------------------


def gpt2_tokenizer(allow_network: bool = True) -> Tokenizer:
    """Return GPT-2's tokenizer, V=50257, its table from the first of these that has it:

    1. tiktoken's cache: $TIKTOKEN_CACHE_DIR, else $DATA_GYM_CACHE_DIR, else data-gym-cache in the temporary folder
    2. `gpt2_tokenizer.bin` in the current folder, if it holds GPT-2's table
    3. if `allow_network`: the address that tiktoken downloads it from (kept in tiktoken's cache)

    Raises InputError that says how to get the table if none has it. See `bin_tokenizer` for a file anywhere else.
    """
    cache = _tiktoken_cache()
    merges = _cached_merges(cache)
    pieces = _pieces_of_merges(merges) if merges else _gpt2_in_current_folder()
    if pieces is None:
        if not allow_network:
            raise InputError(
                f"GPT-2's tokenizer table is neither in tiktoken's cache ({cache or 'switched off'}) nor in "
                f"./{DEFAULT_BIN}; {_HOW_TO_GET_TABLE}"
            )
        pieces = _pieces_of_merges(_downloaded_merges(cache))
    return _bpe_tokenizer("gpt2", pieces, GPT2_EOT, "gpt2")


_HOW_TO_GET_TABLE = (
    f"give a {DEFAULT_BIN} with --tokenizer PATH, or set TIKTOKEN_CACHE_DIR to a folder where tiktoken has cached it "
    f"(on a machine with network: llmc-jax data tokenizer write {DEFAULT_BIN}); "
    "data made with --tokenizer bytes needs no table"
)


def _tiktoken_cache() -> Path | None:
    """Return where tiktoken.load.read_file_cached keeps the merges; None if the user's empty name switches it off."""
    usual = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", usual))
    return Path(folder, hashlib.sha1(MERGES_URL.encode(), usedforsecurity=False).hexdigest()) if folder else None


def _cached_merges(path: Path | None) -> bytes | None:
    try:
        data = path.read_bytes() if path else b""
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == MERGES_SHA256 else None


def _gpt2_in_current_folder() -> tuple[bytes, ...] | None:
    try:
        pieces = read_tokenizer_bin(DEFAULT_BIN).pieces
    except InputError:
        return None
    return pieces if _digest(pieces) == GPT2_PIECES_SHA256 else None


def _downloaded_merges(path: Path | None) -> bytes:
    from llmc_jax.data.download import Remote, fetch

    source = Remote(MERGES_URL, "GPT-2's tokenizer table", _HOW_TO_GET_TABLE, sha256=MERGES_SHA256)
    with tempfile.TemporaryDirectory() as folder:
        data = fetch(source, Path(folder, "merges")).read_bytes()
    if path:
        with suppress(OSError):  # a cache that cannot be written costs the next run a download, no more
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, data)
    return data


def byte_characters() -> tuple[str, ...]:
    """Return the character that stands for each byte in the merges: the byte's own where Latin-1 prints it, else
    U+0100 and on, in ascending order. Source: bytes_to_unicode in encoder.py of openai/gpt-2.
    """
    others = map(chr, itertools.count(256))
    return tuple(c if c.isprintable() and c != " " else next(others) for c in map(chr, range(256)))


def _pieces_of_merges(merges: bytes) -> tuple[bytes, ...]:
    """Return GPT-2's pieces in the order of their ids: the 256 bytes in the order of their characters, what each merge
    makes, and the end of text.
    """
    byte_of = {character: bytes([value]) for value, character in enumerate(byte_characters())}
    lines = merges.decode().split("\n")[1:-1]  # the first line is a version, the last is empty
    made = [b"".join(byte_of[character] for character in line if character != " ") for line in lines]
    return (*(byte_of[character] for character in sorted(byte_of)), *made, END_OF_TEXT)


def _bpe_tokenizer(name: str, pieces: tuple[bytes, ...], eot: int, spec: str) -> Tokenizer:
    # made when first needed: decoding needs no tiktoken, so a run that only prints samples never imports it
    encoder = functools.cache(lambda: _bpe_encoder(name, pieces, eot))
    return Tokenizer(name, pieces, eot, spec, lambda text: encoder()(text))


def _bpe_encoder(name: str, pieces: tuple[bytes, ...], eot: int) -> Callable[[str], np.ndarray]:
    """Return tiktoken's encoder over a table: a pair is merged before another if what it makes has the smaller id."""
    if pieces[eot] == LLAMA3_BEGIN:
        raise InputError(
            f"tokenizer {name}: Llama 3 cuts text by other rules; give the folder of its Hugging Face model"
        )
    ranks = {piece: token for token, piece in enumerate(pieces) if token != eot}
    if len(ranks) != len(pieces) - 1:
        raise InputError(f"tokenizer {name}: two ids stand for the same bytes; such a table can decode, not encode")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise InputError(
            f"tokenizer {name}: {len(missing)} of the 256 single bytes, {missing[0]:#04x} first, have no id; such a "
            "table can decode, not encode"
        )
    import tiktoken

    encoding = tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> np.ndarray:
        try:
            return encoding.encode_to_numpy(text, disallowed_special=())  # nothing in a text is special
        except UnicodeEncodeError:
            raise
        except ValueError as error:  # the search for words has no room
            raise InputError("the text has about a million spaces in a row; shorten that run") from error

    return encode


# ----- gpt2_tokenizer.bin -------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """The content of a tokenizer's file: the bytes of each of the V ids, and the end-of-text id."""

    pieces: tuple[bytes, ...]
    eot: int


def read_tokenizer_bin(path: str | Path) -> Table:
    """Read llm.c's tokenizer file: 256 uint32 (magic 20240328, version, V, eot), then per id a length byte and bytes.

    Version 1 has no eot: it is GPT-2's, 50256, and V must be 50257. Ids, V and eot may be anything in version 2.
    Raises InputError if there is no readable file, FormatError for a wrong magic number or version, an impossible V or
    eot, an empty piece, a file too short or too long. Source: tokenizer_init of llm.c's llmc/tokenizer.h.
    """
    with refusing(f"{path}: cannot be read", "check the path"), open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
        vocab, eot = _check_header(path, header, os.fstat(file.fileno()).st_size)
        payload = file.read(vocab * (1 + LONGEST_PIECE) + 1)
    return Table(_split_pieces(path, payload, vocab), eot)


def _check_header(path: str | Path, header: bytes, size: int) -> tuple[int, int]:
    _, version, vocab, eot, *_ = magics.read_header(path, header, magics.TOKENIZER, "a tokenizer file")
    if version not in (1, 2):
        raise FormatError(f"{path}: byte 4: tokenizer version {version}; expected 1 or 2")
    if version == 1:
        eot = GPT2_EOT
        if vocab != GPT2_VOCAB:
            raise FormatError(f"{path}: byte 8: {vocab} ids in a version 1 file; expected {GPT2_VOCAB}")
    if not 1 <= vocab <= MAX_VOCAB or 2 * vocab > size - HEADER_BYTES:  # an id takes at least two bytes
        raise FormatError(
            f"{path}: byte 8: the header promises {vocab} ids, but {size - HEADER_BYTES} bytes follow it; expected 1 "
            f"to {MAX_VOCAB} ids of at least 2 bytes each; copy the file again"
        )
    if not 0 <= eot < vocab:
        raise FormatError(f"{path}: byte 12: end-of-text id {eot}, but there are {vocab} ids")
    return vocab, eot


def _split_pieces(path: str | Path, payload: bytes, vocab: int) -> tuple[bytes, ...]:
    pieces = []
    at = 0
    for token in range(vocab):
        length = payload[at] if at < len(payload) else 1
        if at + 1 + length > len(payload):
            end = HEADER_BYTES + len(payload)
            raise FormatError(f"{path}: truncated: ends at byte {end}, in id {token} of {vocab}; copy it again")
        if length == 0:
            raise FormatError(f"{path}: byte {HEADER_BYTES + at}: id {token} has length 0; expected 1 to 255")
        pieces.append(payload[at + 1 : at + 1 + length])
        at += 1 + length
    if at != len(payload):
        raise FormatError(f"{path}: oversized: {vocab} ids end at byte {HEADER_BYTES + at}, but bytes follow")
    return tuple(pieces)


def write_tokenizer_bin(path: str | Path, pieces: tuple[bytes, ...], eot: int) -> None:
    """Write llm.c's tokenizer file, version 2 (see `read_tokenizer_bin`); it appears under its name only when complete.

    Raises InputError if the file cannot be written. Source: write_tokenizer of llm.c's train_gpt2.py.
    """
    write_atomic(path, table_bytes(pieces, eot))


def table_bytes(pieces: tuple[bytes, ...], eot: int) -> bytes:
    """Return the bytes of llm.c's tokenizer file: of 1 to MAX_VOCAB pieces of 1 to LONGEST_PIECE bytes."""
    assert 0 <= eot < len(pieces) <= MAX_VOCAB and all(0 < len(piece) <= LONGEST_PIECE for piece in pieces)
    header = [magics.TOKENIZER, 2, len(pieces), eot, *[0] * 252]
    return struct.pack("<256I", *header) + _payload(pieces)


def _payload(pieces: tuple[bytes, ...]) -> bytes:
    return b"".join(bytes([len(piece)]) + piece for piece in pieces)


def bin_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a `gpt2_tokenizer.bin`: decodes with any table, and encodes with nothing but the table.

    Ids are the ranks of the merges, and text is cut into words by GPT-2's pattern. `encode` raises InputError if the
    table lacks a single byte or has one piece twice.
    """
    return table_tokenizer(Path(path).name, read_tokenizer_bin(path), str(path))


def file_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a folder or tokenizer.json of Hugging Face's, or of a `gpt2_tokenizer.bin`.

    Files are told apart by how they begin.

    Raises InputError if there is no readable file, FormatError for one that is none of these.
    """
    from llmc_jax.data.hf_tokenizer import hf_tokenizer

    if os.path.isdir(path):
        return hf_tokenizer(path)
    with refusing(f"{path}: cannot be read", "check the path"), open(path, "rb") as file:
        is_json = file.read(64).lstrip().startswith(b"{")
    return hf_tokenizer(path) if is_json else bin_tokenizer(path)


def table_tokenizer(name: str, table: Table, spec: str) -> Tokenizer:
    """Return the tokenizer of a table, whichever file it comes from; otherwise as `bin_tokenizer`.

    What the table holds, and nothing else, makes it `bytes` or `gpt2`; name is that of any other.
    """
    pieces, eot = table.pieces, table.eot
    if (pieces, eot) == (BYTES_PIECES, BYTES_EOT):
        return replace(bytes_tokenizer(), spec=spec)
    if len(pieces) == GPT2_VOCAB and eot == GPT2_EOT and _digest(pieces) == GPT2_PIECES_SHA256:
        name = "gpt2"
    elif name in PUBLIC:  # the name of a file, no more
        name = f"{name} (own)"
    return _bpe_tokenizer(name, pieces, eot, spec)


def _digest(pieces: tuple[bytes, ...]) -> str:
    return hashlib.sha256(_payload(pieces)).hexdigest()


# ----- choosing one -------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    """What a training state says of the table that its ids belong to.

    sha256: of the file that holds it; empty for one that was not kept, since it could not be read, or was left out.
    """

    name: str
    ids: int
    sha256: str


class Choice(NamedTuple):
    """A tokenizer, or None; `note` says in one line where it comes from, or why there is none.

    named: of one that a checkpoint brings along; if that cannot be read, it is None, and not replaced by another.
    """

    tokenizer: Tokenizer | None
    note: str
    named: Named | None = None


def load_tokenizer(spec: str, vocab_size: int | None = None, folders: Iterable[Path] = ()) -> Choice:
    """Return the tokenizer that --tokenizer asks for.

    spec: `bytes`; `gpt2` (see `gpt2_tokenizer`; may use the network); the path of what `file_tokenizer` takes; `none`;
    or `auto`, which never uses the network: bytes for V=257; for V=50257, and 50304, to which others pad it, the
    gpt2_tokenizer.bin of the first of `folders` (those of the model or the data) that has one, else the one here, else
    GPT-2's table from tiktoken's cache; otherwise none.
    vocab_size: the model's V, of which the tokenizer may have fewer ids; None if any will do (`auto` then means GPT-2).

    Raises InputError if the tokenizer has more ids than V, or the table cannot be had; FormatError for a bad file.
    """
    if spec == "none":
        return Choice(None, "no tokenizer was asked for")
    if spec == "auto":
        try:
            choice = _choose_by_vocab(GPT2_VOCAB if vocab_size is None else vocab_size, folders)
        except InputError as error:
            choice = Choice(None, str(error))
    elif spec in PUBLIC:
        if spec == "gpt2" and vocab_size is not None:  # before anything is downloaded
            _check_vocab(PUBLIC[spec], GPT2_VOCAB, vocab_size)
        choice = Choice(public_tokenizer(spec), PUBLIC[spec])
    elif os.path.exists(spec) or os.sep in spec or spec.endswith((".bin", ".json")):
        choice = Choice(file_tokenizer(spec), spec)
    else:
        raise InputError(
            f"--tokenizer {spec}: expected auto, bytes, gpt2, none, or the path of a {DEFAULT_BIN} or of a folder or "
            "tokenizer.json of Hugging Face's (no such file)"
        )
    return choice if vocab_size is None else fitted(choice, vocab_size)


def fitted(choice: Choice, vocab_size: int) -> Choice:
    """Return a tokenizer for a model of so many ids; its note tells where the model has more, which are padding then.

    Raises InputError where the tokenizer has more.
    """
    if choice.tokenizer is None:
        return choice
    ids = choice.tokenizer.vocab_size
    _check_vocab(choice.note, ids, vocab_size)
    return choice if ids == vocab_size else choice._replace(note=f"{choice.note} ({ids} of V={vocab_size} ids)")


def known_eot(vocab_size: int) -> int | None:
    """Return the id that stands before a document where the vocabulary's size tells it: of bytes, GPT-2's, also padded
    to 50304, and Llama 3's. None for any other size.
    """
    if GPT2_VOCAB <= vocab_size <= pad_vocab(GPT2_VOCAB):  # between the two it has tokens of its own behind GPT-2's
        return GPT2_EOT
    return {BYTES_VOCAB: BYTES_EOT, LLAMA3_VOCAB: LLAMA3_EOT}.get(vocab_size)


def usual_eot(vocab_size: int) -> int:
    """Return the id that stands before a document by the vocabulary's size alone; of an unknown size the last one."""
    return known_eot(vocab_size) or vocab_size - 1


def drawable(tokenizer: Tokenizer | None, vocab_size: int) -> int:
    """Return how many ids of a model, from 0 on, may be drawn: its tokenizer's. The rows behind are padding.

    Without a tokenizer all of V, but for GPT-2's padded vocabulary, of which it is known without the table.
    """
    if tokenizer is None:
        return GPT2_VOCAB if _is_gpt2s(vocab_size) else vocab_size
    return min(tokenizer.vocab_size, vocab_size)


def _check_vocab(note: str, ids: int, vocab_size: int) -> None:
    """Raise InputError where a tokenizer has more ids than the model."""
    if ids > vocab_size:
        raise InputError(
            f"tokenizer {note} has {ids} ids, but the model's vocabulary is V={vocab_size}; give the tokenizer that "
            "its data was made with by --tokenizer, or none"
        )


def _is_gpt2s(vocab_size: int) -> bool:
    return vocab_size in (GPT2_VOCAB, pad_vocab(GPT2_VOCAB))


def _choose_by_vocab(vocab_size: int, folders: Iterable[Path]) -> Choice:
    if vocab_size == BYTES_VOCAB:
        return Choice(bytes_tokenizer(), "bytes")
    if not _is_gpt2s(vocab_size):
        return Choice(None, f"no tokenizer is known for V={vocab_size}; give its file with --tokenizer PATH")
    for path in (*(folder / DEFAULT_BIN for folder in folders), Path(DEFAULT_BIN)):
        if path.exists():
            return Choice(bin_tokenizer(path), str(path))
    return Choice(gpt2_tokenizer(allow_network=False), "GPT-2's, from tiktoken's cache")


def public_tokenizer(name: str, allow_network: bool = True) -> Tokenizer:
    """Return the tokenizer of a name in PUBLIC. Raises InputError where it cannot be had."""
    return bytes_tokenizer() if name == "bytes" else gpt2_tokenizer(allow_network=allow_network)


# ----- showing text -------------------------------------------------------------------------------------------------


def sample_text(tokenizer: Tokenizer | None, ids: Iterable[int]) -> str:
    """Return sampled ids as text for display; without a tokenizer the ids, as llm.c's trainers print them.

    Bytes that are not UTF-8 become U+FFFD; control characters that could move a terminal's cursor or change its colours
    are dropped.
    """
    if tokenizer is None:
        return "".join(f"{token} " for token in ids)
    return printable(b"".join(map(tokenizer.piece, ids)).decode(errors="replace"))


def printable(text: str) -> str:
    """Return a text without the control characters that could move a terminal's cursor or change its colours."""
    return "".join(c for c in text if c in "\t\n" or not (c < " " or "\x7f" <= c < "\xa0"))
