"""Tokenizer files of Hugging Face's GPT-2: vocab.json and merges.txt out of a table of pieces, and a table out of them.

Both sides hold the same thing: the bytes that each id stands for. There they are written in characters that stand for
bytes, with the merges listed; here they are bytes, and a merge's rank is its id. Leaves out tables that are no
byte-level byte-pair encoding.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmc_jax.data.tokenizers import END_OF_TEXT, MAX_VOCAB, Table, Tokenizer, byte_characters, table_tokenizer
from llmc_jax.errors import FormatError, InputError
from llmc_jax.files import read_json_object, write_json

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
LARGEST_FILE = 1 << 28  # bytes; GPT-2's vocab.json has 1 MB


# ----- out ----------------------------------------------------------------------------------------------------------


def split_of(piece: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two pieces that a piece was merged of: what its bytes become with the ranks below its own.

    Raises InputError if that does not leave two.
    """
    parts = [piece[i : i + 1] for i in range(len(piece))]
    own = ranks[piece]
    while len(parts) > 2:
        candidates = [(ranks.get(parts[i] + parts[i + 1], own), i) for i in range(len(parts) - 1)]
        rank, at = min(candidates)
        if rank >= own:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    if len(parts) != 2:
        raise InputError(f"id {own}, {piece!r}, is not a merge of two pieces with smaller ids")
    return parts[0], parts[1]


def merges_of(table: Table) -> list[tuple[bytes, bytes]]:
    """Return the merges of a table, in the order of their ids. Raises InputError if it is no byte-pair encoding."""
    ranks = {piece: token for token, piece in enumerate(table.pieces) if token != table.eot}
    if len(ranks) != len(table.pieces) - 1 or any(bytes([value]) not in ranks for value in range(256)):
        raise InputError("it lacks single bytes, or has one piece twice, so it is not a byte-level encoding")
    return [split_of(piece, ranks) for piece in ranks if len(piece) > 1]


def write_files(folder: Path, table: Tokenizer, max_seq_len: int) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json.

    Raises InputError if the table is no byte-pair encoding, OSError if the disk does not take them.
    """
    characters = byte_characters()

    def written(piece: bytes) -> str:
        return "".join(characters[value] for value in piece)

    merges = merges_of(Table(table.pieces, table.eot))
    vocab = {written(piece): token for token, piece in enumerate(table.pieces)}
    vocab.pop(written(table.pieces[table.eot]), None)
    special = END_OF_TEXT.decode()
    vocab[special] = table.eot
    lines = ["#version: 0.2", *(f"{written(left)} {written(right)}" for left, right in merges), ""]
    settings = {
        "add_prefix_space": False,
        "bos_token": special,
        "eos_token": special,
        "errors": "replace",
        "model_max_length": max_seq_len,
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": special,
    }
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8", newline="\n")
    write_json(folder / "tokenizer_config.json", settings)


# ----- in -----------------------------------------------------------------------------------------------------------


def read_table(folder: Path) -> Table:
    """Return the table of a folder's vocab.json, or else of its tokenizer.json.

    Raises FormatError if neither is there, or if it is not the table of a byte-level encoding with an end of text.
    """
    path = folder / "vocab.json"
    if path.is_file():
        return _table_of(path, read_json_object(path, LARGEST_FILE))
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FormatError(f"{folder}: holds neither vocab.json nor tokenizer.json, so no tokenizer can be made of it")
    found = read_json_object(path, LARGEST_FILE)
    model, added = found.get("model"), found.get("added_tokens", [])
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or not isinstance(added, list):
        raise FormatError(f"{path}: has no model with a vocab")
    vocab = dict(model["vocab"])
    for entry in added:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise FormatError(f"{path}: its added_tokens are not a list of tokens")
        vocab[entry["content"]] = entry.get("id")
    return _table_of(path, vocab)


def _table_of(path: Path, vocab: Mapping[str, Any]) -> Table:
    ids = list(vocab.values())
    if not all(type(token) is int for token in ids) or sorted(ids) != list(range(len(ids))) or len(ids) > MAX_VOCAB:
        raise FormatError(f"{path}: the ids of its {len(ids):,} tokens are not the numbers from 0 on, each once")
    special = END_OF_TEXT.decode()
    if special not in vocab:
        raise FormatError(f"{path}: has no {special}, the token that ends a text")
    byte_of = {character: value for value, character in enumerate(byte_characters())}
    pieces = [b""] * len(ids)
    for text, token in vocab.items():
        plain = all(character in byte_of for character in text)
        try:
            pieces[token] = bytes(byte_of[character] for character in text) if plain else text.encode()
        except UnicodeEncodeError:
            raise FormatError(f"{path}: token {token}, {text!r}, is not text") from None
    return Table(tuple(pieces), vocab[special])


def has_tokenizer(folder: Path) -> bool:
    return (folder / "vocab.json").is_file() or (folder / "tokenizer.json").is_file()


def hf_tokenizer(path: Path) -> Tokenizer:
    return table_tokenizer(path.name, read_table(path), str(path))
