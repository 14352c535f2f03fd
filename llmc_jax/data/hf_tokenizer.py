"""Tokenizer files of Hugging Face's: read whole or refused, and written.

A plain one is GPT-2's byte-level byte-pair encoding whose merges have their ids for ranks: the table of its pieces says
all of it, and tiktoken encodes. Of any other the settings are put together as transformers does it, in the form of a
tokenizer.json, with which the tokenizers package encodes. What is no byte-level byte-pair encoding, or has a field that
could change ids and is not known here, is refused by name. Leaves out encoding, and chat templates.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
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
    MERGES_SHA256,
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

# Classes of transformers: one that cuts text into words as GPT-2 does, and those that leave all to tokenizer.json
GPT2_CLASS = "GPT2Tokenizer"
WHOLE_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")  # the former with Fast behind it, as it may have
# What of tokenizer_config.json would put other files, tables or programs in the place of those that are read here
REFUSED_SETTINGS = ("auto_map", "fast_tokenizer_files", "gguf_file", "init_inputs", "merges", "vocab")

# The fields of a tokenizer.json's model: those that must be empty, and the others
EMPTY = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
KNOWN = (*EMPTY, "type", "unk_token", "fuse_unk", "ignore_merges", "vocab", "merges")
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
        settings |= {"add_prefix_space": prefix, "tokenizer_class": "PreTrainedTokenizerFast"}
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
    tokenizer_config.json or special_tokens_map.json names.
    Raises FormatError that names file and field for what is no byte-level byte-pair encoding, has a hole in its ids or
    a setting that is not known, or where nothing ends a text. encode raises InputError without the tokenizers package.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config = _optional(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # the older files count, and before it
        config |= _optional(folder / "special_tokens_map.json")
    if path.is_dir():
        file, found, added = _of_folder(folder, config)
        named = _named(config)
    else:
        content = read_json_object(path, LARGEST_FILE)
        file, found, named = path, _checked(path, content), set()
        added, config = found["added_tokens"], config | {name: content[name] for name in [OURS] if name in content}
    ids = dict(found["model"]["vocab"])
    for token in added:  # transformers goes by their order, and not by the id that a file gives
        if ids.setdefault(token["content"], len(ids)) != token["id"]:
            own = ids[token["content"]]
            _refuse(file, f"the id of the added token {token['content']!r}", token["id"], f"transformers takes {own}")
    usual = END_OF_TEXT.decode(), LLAMA3_BEGIN.decode()
    ends = [text for text in (*usual, _content(config.get("eos_token"))) if text in ids]
    if not ends:
        raise FormatError(f"{file}: has neither {END_OF_TEXT.decode()} nor an eos_token: nothing ends a text")
    eot = ends[0]
    tokens = {token["content"]: token for token in added}
    for text in (*named, END_OF_TEXT.decode(), eot):  # what ends a text is special, whatever a file says
        if text in ids:
            tokens[text] = _token(file, {"id": ids[text], "content": text} | tokens.get(text, {}) | {"special": True})
    found["added_tokens"] = sorted(tokens.values(), key=lambda token: int(token["id"]))
    pieces, name = _pieces(file, ids, tokens), path.resolve().name
    if (plain := _plain(found, Table(pieces, ids[eot]), name, str(path))) is not None:
        return plain
    text = json.dumps(found if eot == END_OF_TEXT.decode() else found | {OURS: eot})
    encoder = functools.cache(lambda: _encoder(file, text, pieces))  # made when first needed, as tiktoken's
    name = f"{name} (own)" if name in PUBLIC else name
    return Tokenizer(name, pieces, ids[eot], str(path), lambda text: encoder()(text), text)


def _theirs(text: str) -> dict[str, Any]:
    """Return a tokenizer.json without what is only ours, which the tokenizers package would not read."""
    return {name: value for name, value in json.loads(text).items() if name != OURS}


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path, LARGEST_FILE) if path.is_file() else {}


def _refuse(file: Path, field: str, value: object, expected: str) -> NoReturn:
    name, shown = ascii(field)[1:-1], ascii(value)
    raise FormatError(f"{file}: {name} is {shown if len(shown) < 80 else shown[:76] + ' ...'}; {expected}")


def _of_folder(folder: Path, config: Mapping[str, Any]) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """Return the file with the vocabulary, a tokenizer.json, and the added tokens in the order of adding."""
    settings, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    own = config.get("tokenizer_class") or _optional(folder / "config.json").get("tokenizer_class") or GPT2_CLASS
    name, prefix = str(own).removesuffix("Fast"), config.get("add_prefix_space")
    if name not in (GPT2_CLASS, *WHOLE_CLASSES):
        _refuse(settings, "tokenizer_class", own, f"expected {GPT2_CLASS} or PreTrainedTokenizerFast")
    for field in REFUSED_SETTINGS:
        if config.get(field):
            _refuse(settings, field, config[field], "this program does not go by it")
    if type(config.get("add_prefix_space", False)) is not bool:
        _refuse(settings, "add_prefix_space", prefix, "expected true or false")
    if file.is_file():
        found = _checked(file, read_json_object(file, LARGEST_FILE))
    else:
        file = folder / "vocab.json"
        if name != GPT2_CLASS:
            _refuse(settings, "tokenizer_class", own, f"without a tokenizer.json expected {GPT2_CLASS}")
        merges = folder / "merges.txt"
        model = {"vocab": read_json_object(file, LARGEST_FILE), "merges": _merges_in(merges)}
        found = _checked(file, {"model": model, "pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL}, merges)
    added = sorted(_added(folder, config, found), key=lambda token: int(token["id"]))
    outer = found["pre_tokenizer"]
    inside = outer.get("add_prefix_space", prefix)
    if name != GPT2_CLASS:
        if None not in (inside, prefix) and inside != prefix:
            _refuse(file, "pre_tokenizer.add_prefix_space", inside, "tokenizer_config.json says the opposite")
        return file, found, [*found["added_tokens"], *added]
    lost = {"normalizer": found["normalizer"], "model.ignore_merges": found["model"].get("ignore_merges")}
    if not _is_gpt2s(outer if prefix is None else outer | {"add_prefix_space": False}):
        lost["pre_tokenizer"] = outer
    for field, value in lost.items():  # what transformers would leave out
        if value:
            way = 'write "tokenizer_class": "PreTrainedTokenizerFast" into tokenizer_config.json'
            _refuse(file, field, value, f"transformers leaves that out for a {GPT2_CLASS}; to have it, {way}")
    found["pre_tokenizer"] = BYTE_LEVEL | {"add_prefix_space": bool(prefix)}
    return file, found, added


def _is_gpt2s(pre_tokenizer: Mapping[str, Any]) -> bool:
    return BYTE_LEVEL | dict(pre_tokenizer) | {"trim_offsets": True} == BYTE_LEVEL


def _added(folder: Path, config: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the added tokens of a folder: those of tokenizer_config.json, else of the older files."""
    if "added_tokens_decoder" not in config:
        path = folder / "added_tokens.json"
        yield from (_token(path, {"content": text, "id": token}) for text, token in _optional(path).items())
        yield from found["added_tokens"]
        return
    path, listed = folder / "tokenizer_config.json", config["added_tokens_decoder"]
    if not isinstance(listed, dict) or not all(key.isdecimal() and len(key) < 9 for key in listed):
        _refuse(path, "added_tokens_decoder", listed, "expected ids, each with a token")
    yield from (_token(path, {"content": None, **_object(entry), "id": int(key)}) for key, entry in listed.items())


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _token(path: Path, entry: Any) -> dict[str, Any]:
    """Return an added token with its id and all of its flags. Raises FormatError if it is none."""
    entry = _object(entry)
    text, token = entry.get("content"), entry.get("id")
    flags = {flag: entry.get(flag, flag == "normalized" and not entry.get("special")) for flag in TOKEN_FLAGS}
    known = entry.keys() <= {"id", "content", *TOKEN_FLAGS} and all(type(flag) is bool for flag in flags.values())
    if not known or type(token) is not int or not isinstance(text, str) or not text:
        _refuse(path, "an added token", entry, f"expected id, content, and true or false for {', '.join(TOKEN_FLAGS)}")
    return {"id": token, "content": text, **flags}


def _named(settings: Mapping[str, Any]) -> set[str]:
    """Return the tokens that a file of settings calls special."""
    found: list[Any] = []
    for field, value in settings.items():
        if field in ("additional_special_tokens", "extra_special_tokens"):
            found += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        elif field.endswith("_token"):
            found.append(value)
    return {text for text in map(_content, found) if text is not None}


def _content(token: Any) -> str | None:
    """Return a token's text, whether it is written as that or with its flags; None if it is neither."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


# ----- tokenizer.json -----------------------------------------------------------------------------------------------


def _checked(file: Path, found: dict[str, Any], merges: Path | None = None) -> dict[str, Any]:
    """Return a tokenizer.json with all of its fields, in one form, its ids in order. merges: the file that has them.

    Raises FormatError.
    """
    model, added = _object(found.get("model")), found.get("added_tokens") or []
    for field, value in ({"type": "BPE"} | model).items():
        if field not in KNOWN or (field in EMPTY and value) or (field == "type" and value != "BPE"):
            _refuse(file, f"model.{field}", value, "expected a plain byte-level BPE")
    if not isinstance(model.get("vocab"), dict):
        raise FormatError(f"{file}: has no model with a vocab")
    ids = list(model["vocab"].values())
    if not all(type(token) is int for token in ids) or sorted(ids) != list(range(len(ids))) or len(ids) > MAX_VOCAB:
        raise FormatError(f"{file}: the ids of its {len(ids):,} tokens are not the numbers from 0 on, each once")
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: int(item[1])))
    outer = _object(found.get("pre_tokenizer"))
    if _byte_levels(outer) != 1:
        _refuse(file, "pre_tokenizer", found.get("pre_tokenizer"), "expected ByteLevel, alone or once in a Sequence")
    prefix = outer.get("add_prefix_space", False)
    if type(prefix) is not bool:
        _refuse(file, "pre_tokenizer.add_prefix_space", prefix, "expected true or false")
    pairs = _pairs(merges or file, model.get("merges"), vocab)
    return {
        "version": "1.0",
        "added_tokens": [_token(file, entry) for entry in (added if isinstance(added, list) else [added])],
        **{field: found.get(field) for field in ("normalizer", "pre_tokenizer", "post_processor", "decoder")},
        "model": {"type": "BPE"} | model | {"vocab": vocab, "merges": pairs},
    }


def _byte_levels(stage: Any) -> int:
    """Return how often a pre-tokenizer makes characters of bytes; what else it does is the tokenizers package's."""
    inner = _object(stage).get("pretokenizers")
    return sum(map(_byte_levels, inner)) if isinstance(inner, list) else _object(stage).get("type") == "ByteLevel"


def _merges_in(path: Path) -> list[str]:
    """Return the lines of a merges.txt, as the tokenizers package takes them. Raises FormatError."""
    with opened(path) as file:
        raw = file.read()
    try:
        lines = raw.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is not UTF-8: byte {error.start} is {raw[error.start]:#04x}") from None
    return [line.removesuffix("\r") for line in lines if line and not line.startswith("#version")]


def _pairs(file: Path, merges: Any, vocab: Mapping[str, int]) -> list[list[str]]:
    """Return the merges as pairs. Raises FormatError if one does not join two tokens to a third."""
    pairs = []
    for number, merge in enumerate(merges if isinstance(merges, list) else [merges]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        known = isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        if not known or not {*pair, "".join(pair)} <= vocab.keys():
            _refuse(file, f"merge {number}", merge, "expected two tokens of the vocabulary that make a third")
        pairs.append(pair)
    return pairs


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
    pieces, model, added = table.pieces, found["model"], [token["content"] for token in found["added_tokens"]]
    if found["normalizer"] is not None or model.get("ignore_merges") or not _is_gpt2s(found["pre_tokenizer"]):
        return None
    if added != [END_OF_TEXT.decode()] or not all(1 <= len(piece) <= LONGEST_PIECE for piece in pieces):
        return None
    tokenizer = table_tokenizer(name, table, spec)
    text = "".join(["#version: 0.2\n", *(f"{left} {right}\n" for left, right in model["merges"])])
    if tokenizer.name == "gpt2" and hashlib.sha256(text.encode()).hexdigest() == MERGES_SHA256:
        return tokenizer  # as below, in a tenth of the time
    merges = [(pieces[model["vocab"][left]], pieces[model["vocab"][right]]) for left, right in model["merges"]]
    try:
        return tokenizer if merges == merges_of(table) else None
    except InputError:
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
