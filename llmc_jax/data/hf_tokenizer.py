"""Tokenizer files of Hugging Face's: read whole or refused, and written.

A plain one is GPT-2's byte-level byte-pair encoding whose merges have their ids for ranks: the table of its pieces says
all of it, and tiktoken encodes. Any other is a tokenizer.json with which the tokenizers package encodes. What is no
byte-level byte-pair encoding, and a folder whose settings transformers would take in place of its tokenizer.json, are
refused by name. Leaves out encoding, and chat templates.
"""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import json_text, opened, read_json_object
from llmc_jax.data.tokenizers import (
    END_OF_TEXT,
    LLAMA3_BEGIN,
    LONGEST_PIECE,
    MAX_VOCAB,
    PUBLIC,
    Table,
    Tokenizer,
    byte_characters,
    table_tokenizer,
)

FILES = (
    "tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
OURS = "eos_token"  # in a tokenizer.json that travels alone: what ends a text, if it is not <|endoftext|>
LARGEST_FILE = 1 << 28  # bytes; GPT-2's vocab.json has 1 MB

# Classes of transformers: one that takes vocabulary and merges and leaves out all else that a tokenizer.json says, and
# those that leave all to it
GPT2_CLASS, WHOLE_CLASS = "GPT2Tokenizer", "PreTrainedTokenizerFast"
WHOLE_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")  # the former with Fast behind it, as it may have
EMPTY = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")  # of a tokenizer.json's model
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer of Hugging Face's."""
    return any((folder / name).is_file() for name in FILES[:2])


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


def files_of(tokenizer: Tokenizer, max_seq_len: int) -> dict[str, bytes]:
    """Return the files with which transformers makes the same ids: of a plain one vocab.json and merges.txt, else
    tokenizer.json; and tokenizer_config.json.

    Raises InputError if a plain one is no byte-pair encoding.
    """
    special = tokenizer.pieces[tokenizer.eot].decode() if tokenizer.json else END_OF_TEXT.decode()
    settings = {
        "add_prefix_space": False,
        "bos_token": special,
        "eos_token": special,
        "errors": "replace",
        "model_max_length": max_seq_len,
        "tokenizer_class": GPT2_CLASS,
        "unk_token": special,
    }
    if tokenizer.json:
        found = _theirs(tokenizer.json)
        prefix = found["pre_tokenizer"].get("add_prefix_space", False)
        settings |= {"add_prefix_space": prefix, "tokenizer_class": WHOLE_CLASS}
        files = {"tokenizer.json": json.dumps(found)}
    else:
        files = _files_of_table(Table(tokenizer.pieces, tokenizer.eot))
    files["tokenizer_config.json"] = json_text(settings)
    return {name: text.encode() for name, text in files.items()}


def _files_of_table(table: Table) -> dict[str, str]:
    characters = byte_characters()

    def written(piece: bytes) -> str:
        return "".join(characters[value] for value in piece)

    merges = merges_of(table)
    vocab = {written(piece): token for token, piece in enumerate(table.pieces)}
    vocab.pop(written(table.pieces[table.eot]), None)
    vocab[END_OF_TEXT.decode()] = table.eot
    lines = ["#version: 0.2", *(f"{written(left)} {written(right)}" for left, right in merges), ""]
    return {"vocab.json": json.dumps(vocab, ensure_ascii=False), "merges.txt": "\n".join(lines)}


# ----- in -----------------------------------------------------------------------------------------------------------


def hf_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a folder, as transformers puts it together, or of a tokenizer.json of any name alone.

    Its ids are those of transformers 5.24, but that special tokens in a text are text. What ends a text is
    <|endoftext|>, else Llama 3's <|begin_of_text|>, which llm.c puts before each document, else the eos_token that
    tokenizer_config.json names.
    Raises FormatError that names file and field for what is no byte-level byte-pair encoding, has a hole in its ids, or
    where nothing ends a text. encode raises InputError without the tokenizers package.
    """
    path = Path(path)
    if path.is_dir():
        file, found, named = _of_folder(path)
    else:
        file, found = path, read_json_object(path, LARGEST_FILE)
        named = found.pop(OURS, None)
        _check(file, found)
    ids, added = dict(found["model"]["vocab"]), found["added_tokens"]
    for token in added:
        if ids.setdefault(token["content"], len(ids)) != token["id"]:
            _refuse(file, f"the id of the added token {token['content']!r}", token["id"], "expected the next one")
    text = named.get("content") if isinstance(named, dict) else named
    usual = END_OF_TEXT.decode(), LLAMA3_BEGIN.decode()
    end = next((end for end in (*usual, text) if isinstance(end, str) and end in ids), None)
    if end is None:
        raise FormatError(f"{file}: has neither {END_OF_TEXT.decode()} nor an eos_token: nothing ends a text")
    # what ends a text is special, whatever a file says
    tokens = {token["content"]: token for token in added}
    flags = dict.fromkeys(TOKEN_FLAGS, False) | tokens.get(end, {"id": ids[end], "content": end})
    found["added_tokens"] = sorted(({**tokens, end: flags | {"special": True}}).values(), key=lambda each: each["id"])
    pieces, name = _pieces(file, ids, tokens | {end: flags}), path.resolve().name
    if (plain := _plain(found, Table(pieces, ids[end]), name, str(path))) is not None:
        return plain
    whole = json.dumps(found if end == END_OF_TEXT.decode() else found | {OURS: end})
    encoder = functools.cache(lambda: _encoder(file, whole, pieces))  # made when first needed, as tiktoken's
    name = f"{name} (own)" if name in PUBLIC else name
    return Tokenizer(name, pieces, ids[end], str(path), lambda text: encoder()(text), whole)


def _theirs(text: str) -> dict[str, Any]:
    """Return a tokenizer.json without what is only ours, which the tokenizers package would not read."""
    return {name: value for name, value in json.loads(text).items() if name != OURS}


def _refuse(file: Path, field: str, value: object, expected: str) -> NoReturn:
    name, shown = ascii(field)[1:-1], ascii(value)
    raise FormatError(f"{file}: {name} is {shown if len(shown) < 80 else shown[:76] + ' ...'}; {expected}")


def _of_folder(folder: Path) -> tuple[Path, dict[str, Any], Any]:
    """Return the file with the vocabulary, a checked tokenizer.json, and what the settings say ends a text."""
    settings, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    config, own, more = (
        read_json_object(path, LARGEST_FILE) if path.is_file() else {}
        for path in (settings, folder / "config.json", folder / "added_tokens.json")
    )
    named = config.get("tokenizer_class") or own.get("tokenizer_class") or GPT2_CLASS
    name, prefix = str(named).removesuffix("Fast"), config.get("add_prefix_space")
    if name not in (GPT2_CLASS, *WHOLE_CLASSES):
        _refuse(settings, "tokenizer_class", named, f"expected {GPT2_CLASS} or {WHOLE_CLASS}")
    if file.is_file():
        found = read_json_object(file, LARGEST_FILE)
    elif name != GPT2_CLASS:
        _refuse(settings, "tokenizer_class", named, f"without a tokenizer.json expected {GPT2_CLASS}")
    else:
        file = folder / "vocab.json"
        model = {"type": "BPE", "vocab": read_json_object(file, LARGEST_FILE)}
        model["merges"] = _merges_in(folder / "merges.txt")
        found = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "model": model}
        found |= {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": prefix is True}, "decoder": BYTE_LEVEL}
    _check(file, found)
    inside = found["pre_tokenizer"].get("add_prefix_space", prefix)
    if prefix is not None and inside is not prefix:
        _refuse(settings, "add_prefix_space", prefix, f"{file.name} says {inside!r}")
    _check_beside(folder, found, config, more)
    if name == GPT2_CLASS and not _is_gpt2s(found, bool(inside)):
        way = f'write "tokenizer_class": "{WHOLE_CLASS}" into tokenizer_config.json'
        raise FormatError(f"{file}: transformers leaves out its settings for a {GPT2_CLASS}; to have them, {way}")
    return file, found, config.get(OURS)


def _check_beside(folder: Path, found: Mapping[str, Any], config: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Check that tokenizer_config.json and added_tokens.json add no token. Raises FormatError."""
    listed = config.get("added_tokens_decoder")
    tokens = listed.values() if isinstance(listed, dict) else ()
    beside = [token.get("content") for token in tokens if isinstance(token, dict)]
    known = {*found["model"]["vocab"], *(token["content"] for token in found["added_tokens"])}
    lost = [text for text in (*beside, *more) if not isinstance(text, str) or text not in known]
    if lost:
        _refuse(folder, "a token of its settings", lost[0], "tokenizer.json lacks it: save it again with transformers")


def _is_gpt2s(found: Mapping[str, Any], prefix: bool = False) -> bool:
    """Return whether text is cut into words as GPT-2 does, from normalizing on. prefix: with a space before it."""
    pre_tokenizer = BYTE_LEVEL | found["pre_tokenizer"] | {"trim_offsets": True}
    plain = found.get("normalizer") is None and not found["model"].get("ignore_merges")
    return plain and pre_tokenizer == BYTE_LEVEL | {"add_prefix_space": prefix}


# ----- tokenizer.json -----------------------------------------------------------------------------------------------


def _check(file: Path, found: dict[str, Any]) -> None:
    """Check a tokenizer.json as far as its table of pieces depends on it. Raises FormatError."""
    model, added = found.get("model"), found.get("added_tokens")
    if not isinstance(model, dict) or not isinstance(vocab := model.get("vocab"), dict):
        raise FormatError(f"{file}: has no model with a vocab")
    for field, value in ({"type": "BPE"} | model).items():
        if (field in EMPTY and value) or (field == "type" and value != "BPE"):
            _refuse(file, f"model.{field}", value, "expected a plain byte-level BPE")
    ids = list(vocab.values())
    if not all(type(token) is int for token in ids) or sorted(ids) != list(range(len(ids))) or len(ids) > MAX_VOCAB:
        raise FormatError(f"{file}: the ids of its {len(ids):,} tokens are not the numbers from 0 on, each once")
    if _byte_levels(found.get("pre_tokenizer")) != 1:
        _refuse(file, "pre_tokenizer", found.get("pre_tokenizer"), "expected ByteLevel, alone or once in a Sequence")
    for token in added if isinstance(added, list) else [None]:
        content, number = (token.get(name) if isinstance(token, dict) else None for name in ("content", "id"))
        if not content or not isinstance(content, str) or type(number) is not int:
            _refuse(file, "an added token", token, "expected one with id and content")


def _byte_levels(stage: Any) -> int:
    """Return how often a pre-tokenizer makes characters of bytes; what else it does is the tokenizers package's."""
    inner = stage.get("pretokenizers") if isinstance(stage, dict) else None
    if isinstance(inner, list):
        return sum(map(_byte_levels, inner))
    return isinstance(stage, dict) and stage.get("type") == "ByteLevel"


def _merges_in(path: Path) -> list[str]:
    """Return the lines of a merges.txt, as the tokenizers package takes them. Raises FormatError."""
    with opened(path) as file:
        raw = file.read()
    try:
        lines = raw.decode().split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None
    return [line.removesuffix("\r") for line in lines if line.strip("\r") and not line.startswith("#version")]


# ----- pieces, and who encodes --------------------------------------------------------------------------------------


def _pieces(file: Path, ids: Mapping[str, int], added: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Return the bytes that each id stands for."""
    byte_of = {character: value for value, character in enumerate(byte_characters())}
    pieces = [b""] * len(ids)
    for text, token in ids.items():
        plain = text not in added and all(character in byte_of for character in text)
        try:
            pieces[token] = bytes(byte_of[character] for character in text) if plain else text.encode()
        except UnicodeEncodeError:
            raise FormatError(f"{file}: token {token}, {text!r}, is not text") from None
    return tuple(pieces)


def _plain(found: Mapping[str, Any], table: Table, name: str, spec: str) -> Tokenizer | None:
    """Return a table's tokenizer; None where the table does not say all of a tokenizer.json."""
    pieces, vocab, listed = table.pieces, found["model"]["vocab"], found["model"].get("merges")
    added = [token["content"] for token in found["added_tokens"]]
    if not _is_gpt2s(found) or added != [END_OF_TEXT.decode()] or not isinstance(listed, list):
        return None
    if not all(1 <= len(piece) <= LONGEST_PIECE for piece in pieces):
        return None
    tokenizer = table_tokenizer(name, table, spec)
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in listed]
    try:
        merges = [(pieces[vocab[left]], pieces[vocab[right]]) for left, right in pairs]
        return tokenizer if merges == merges_of(table) else None
    except (InputError, KeyError, TypeError, ValueError):  # no merges of this table: the package will say so
        return None


def _encoder(file: Path, text: str, pieces: tuple[bytes, ...]) -> Callable[[str], np.ndarray]:
    """Return the tokenizers package's encoder of a tokenizer.json. Raises InputError if there is none."""
    try:
        import tokenizers
    except ImportError as error:
        raise InputError(
            f"{file}: encoding with this tokenizer needs the tokenizers package: pip install '.[hf]'"
        ) from error
    try:
        encoding = tokenizers.Tokenizer.from_str(json.dumps(_theirs(text)))
    except Exception as error:  # it has no type of its own
        raise FormatError(f"{file}: the tokenizers package does not take it: {' '.join(str(error).split())}") from None
    encoding.encode_special_tokens = True  # as text
    normalized = encoding.normalizer.normalize_str if encoding.normalizer else str
    missing = set(range(256)) - {piece[0] for piece in pieces if len(piece) == 1}

    def encode(text: str) -> np.ndarray:
        text.encode()  # half a surrogate pair is an error of its own here, and a TypeError there
        if missing and (lost := missing.intersection(normalized(text).encode())):
            raise InputError(f"{file}: the byte {min(lost):#04x} of the text has no id")  # the package would drop it
        return np.array(encoding.encode(text, add_special_tokens=False).ids, np.uint32)

    return encode
