"""Hugging Face's tokenizer files: the ids of transformers, what is written, and what is refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data import hf_tokenizer as hf
from llmc_jax.data import tables
from llmc_jax.data.command import main
from llmc_jax.data.tokenizers import (
    Table,
    Tokenizer,
    bin_tokenizer,
    byte_characters,
    bytes_tokenizer,
    gpt2_tokenizer,
    load_tokenizer,
    table_tokenizer,
    usual_eot,
)

GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "golden" / "hf_tokenizers.json").read_text())
# Settings beside a vocabulary that transformers takes into account, and that are refused here
BESIDE = {name for name in GOLDEN["cases"] if "beside" in name or name.startswith("added_tokens")}
CASES: dict[str, dict[str, Any]] = {name: case for name, case in GOLDEN["cases"].items() if name not in BESIDE}
PLAIN = [name for name in CASES if name.startswith("plain")]
OTHERS = [name for name in CASES if name not in PLAIN]


def put(files: dict[str, Any]) -> Path:
    folder = Path("folder")
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) and name == "merges.txt" else json.dumps(content)
        for key, value in GOLDEN["shared"].items():
            text = text.replace(f'"@{key}"', json.dumps(value))
        (folder / name).write_text(text)
    return folder


def write_files(folder: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    for name, content in hf.files_of(tokenizer, max_seq_len).items():
        (folder / name).write_bytes(content)


def table(tokenizer: Tokenizer) -> tuple[tuple[bytes, ...], int, str]:
    return tokenizer.pieces, tokenizer.eot, tokenizer.json


@pytest.mark.parametrize("name", CASES)
def test_the_ids_are_those_of_transformers(name: str) -> None:
    if name in OTHERS:
        pytest.importorskip("tokenizers")
    tokenizer = hf.hf_tokenizer(put(CASES[name]["files"]))
    assert [tokenizer.encode(text).tolist() for text in GOLDEN["texts"]] == CASES[name]["split"]
    assert bool(tokenizer.json) == (name in OTHERS)
    assert (tokenizer.eot, tokenizer.pieces[264]) == (264, b"<|endoftext|>")


def test_a_special_token_in_a_text_is_text() -> None:
    pytest.importorskip("tokenizers")
    case = CASES["a token for padding"]
    texts = zip(GOLDEN["texts"], case["ids"], case["split"], strict=True)
    differ = [text for text, ids, split in texts if ids != split]
    assert differ == ["<|endoftext|>ab<|endoftext|>", "ab <pad> ab<pad>"]
    tokenizer = hf.hf_tokenizer(put(case["files"]))
    assert not {264, 265} & {int(token) for text in differ for token in tokenizer.encode(text)}
    assert tokenizer.decode(tokenizer.encode("<pad>é")) == "<pad>é".encode()


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    tokenizer = hf.hf_tokenizer(put(CASES[name]["files"]))
    write_files(tmp_path, tokenizer, 64)
    assert table(hf.hf_tokenizer(tmp_path)) == table(tokenizer)
    assert Path("tokenizer.json").exists() == (name in OTHERS) != Path("vocab.json").exists()


def test_half_a_surrogate_pair_and_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(CASES["ids out of order"]["files"])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        tokenizer = hf.hf_tokenizer(folder)
        assert tokenizer.decode([258, 264]) == b"12<|endoftext|>"
        with pytest.raises(InputError, match=r"pip install '\.\[hf\]'"):
            tokenizer.encode("re")
    pytest.importorskip("tokenizers")
    assert tokenizer.encode("re\ud800").tolist() == tokenizer.encode("re\ufffd").tolist()


def test_llm_cs_file_is_not_written_of_what_it_cannot_tell(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(put(CASES["plain"]["files"]))
    assert main(["tokenizer", "write", "a.bin", "--tokenizer", folder]) == 0
    assert bin_tokenizer("a.bin").pieces == hf.hf_tokenizer(folder).pieces
    put(CASES["ids out of order"]["files"])
    assert main(["tokenizer", "write", "b.bin", "--tokenizer", folder]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not Path("b.bin").exists()


@pytest.mark.parametrize("named", ["</s>", {"content": "</s>", "lstrip": False}])
def test_another_end_of_text(named: Any) -> None:
    vocab = {token.replace("<|endoftext|>", "</s>"): number for token, number in GOLDEN["shared"]["vocab"].items()}
    files = CASES["plain"]["files"] | {"vocab.json": vocab}
    with pytest.raises(FormatError, match="nothing ends a text"):
        hf.hf_tokenizer(put(files))
    tokenizer = hf.hf_tokenizer(put(files | {"tokenizer_config.json": {"eos_token": named}}))
    assert (tokenizer.eot, tokenizer.pieces[264], bool(tokenizer.json)) == (264, b"</s>", True)


@pytest.mark.parametrize("name", sorted(BESIDE))
def test_settings_beside_a_vocabulary_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match=r"add_prefix_space is|a token of its settings is"):
        hf.hf_tokenizer(put(GOLDEN["cases"][name]["files"]))


def test_without_all_single_bytes_it_takes_texts_of_those_that_are_there() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    tokenizer = hf.hf_tokenizer(put({"vocab.json": vocab, "merges.txt": "a b\n"}))
    assert tokenizer.decode([2, 0]) == b"aba"
    pytest.importorskip("tokenizers")
    assert tokenizer.encode("abba").tolist() == [2, 1, 0]
    with pytest.raises(InputError, match="the byte 0x63 of the text has no id"):
        tokenizer.encode("abc")


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    return CASES["plain, as tokenizer.json"]["files"]["tokenizer.json"] | changes


def model(**changes: Any) -> dict[str, Any]:
    return tokenizer_json(model=tokenizer_json()["model"] | changes)


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
DIGITS = CASES["digits"]["files"]["tokenizer.json"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", model(type="WordPiece"), "model.type is 'WordPiece'"),
        ("tokenizer.json", model(dropout=0.1), "model.dropout is 0.1"),
        ("tokenizer.json", model(byte_fallback=True), "model.byte_fallback is True"),
        ("tokenizer.json", model(continuing_subword_prefix="##"), "model.continuing_subword_prefix is '##'"),
        ("tokenizer.json", model(end_of_word_suffix="</w>"), "model.end_of_word_suffix is '</w>'"),
        ("tokenizer.json", tokenizer_json(pre_tokenizer=METASPACE), "pre_tokenizer is {'type': 'Metaspace'"),
        ("tokenizer.json", tokenizer_json(pre_tokenizer=None), "pre_tokenizer is None"),
        ("tokenizer.json", {"model": {}}, "has no model with a vocab"),
        ("tokenizer.json", tokenizer_json(added_tokens=[{"id": 300, "content": "XX"}]), "'XX' is 300"),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"}, "tokenizer_class is 'LlamaTokenizerFast'"),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}, "without a tokenizer.json"),
        ("tokenizer.json", DIGITS, "leaves out its settings for a GPT2Tokenizer"),
        ("tokenizer.json", model(ignore_merges=True), "leaves out its settings"),
        ("tokenizer.json", tokenizer_json(added_tokens=[1]), "an added token is 1"),
        ("tokenizer.json", tokenizer_json(added_tokens=[{"content": "a"}]), "an added token is {'content': 'a'}"),
        ("vocab.json", {"a": 0, "b": 2, "<|endoftext|>": 1, "c": 2}, "are not the numbers from 0 on, each once"),
        ("vocab.json", {"a": -1}, "are not the numbers from 0 on"),
        ("vocab.json", {"a": "0"}, "are not the numbers from 0 on"),
        ("vocab.json", {"\ud800": 0, "<|endoftext|>": 1}, "token 0, '.ud800', is not text"),
        ("vocab.json", [1], "is not a JSON object"),
    ],
)
def test_refused_by_name(name: str, content: Any, words: str) -> None:
    merges = {"merges.txt": ""} if name == "vocab.json" else {}
    with pytest.raises(FormatError, match=words) as refusal:
        hf.hf_tokenizer(put(CASES["plain"]["files"] | merges | {name: content}))
    assert "\n" not in str(refusal.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"vocab\.json: no such file"):
        hf.hf_tokenizer(tmp_path)
    assert not hf.has_tokenizer(tmp_path)
    folder = put({"vocab.json": "@vocab"})
    assert hf.has_tokenizer(folder)
    with pytest.raises(FormatError, match=r"merges\.txt: no such file"):
        hf.hf_tokenizer(folder)


def test_what_the_package_does_not_take() -> None:
    pytest.importorskip("tokenizers")
    wrong = {"tokenizer.json": DIGITS | {"normalizer": {"type": "Nope"}}}
    tokenizer = hf.hf_tokenizer(put(CASES["digits"]["files"] | wrong))
    with pytest.raises(FormatError, match="the tokenizers package does not take it"):
        tokenizer.encode("a")


def test_bytes_as_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer()
    write_files(tmp_path, tokenizer, 64)
    assert hf.hf_tokenizer(tmp_path) == replace(tokenizer, spec=str(tmp_path))
    assert Path("merges.txt").read_text() == "#version: 0.2\n"
    transformers = pytest.importorskip("transformers")
    Path("config.json").write_text('{"model_type": "gpt2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Hé, wörld\n\x00 <|endoftext|>\t"
    assert theirs("Hé, wörld\n\x00 ")["input_ids"] == tokenizer.encode("Hé, wörld\n\x00 ").tolist()
    assert theirs(text)["input_ids"].count(256) == 1 and theirs.eos_token_id == 256


def test_a_small_encoding_there_and_back(tmp_path: Path) -> None:
    """Ids in no order, an end of text in the middle, merges of merges."""
    singles = [bytes([value]) for value in np.random.default_rng(0).permutation(256)]
    pieces = (*singles, b"ab", b"<|endoftext|>", b"abc", b" \x80", b"abab", b"ababc")
    small = Table(pieces, 257)
    assert hf.merges_of(small) == [(b"a", b"b"), (b"ab", b"c"), (b" ", b"\x80"), (b"ab", b"ab"), (b"ab", b"abc")]
    write_files(tmp_path, table_tokenizer("small", small, ""), 64)
    assert table(hf.hf_tokenizer(tmp_path)) == (pieces, 257, "")


def test_gpt2s_own_files(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """merges.txt byte for byte, vocab.json entry for entry, from the table alone; one merge less is another's."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tiktoken"))
    tokenizer = gpt2_tokenizer(allow_network=False)
    write_files(tmp_path, tokenizer, 1024)
    cached = {path.stat().st_size: path for path in (shared / "data" / "tiktoken").iterdir()}
    assert Path("merges.txt").read_bytes() == cached[456_318].read_bytes()
    assert json.loads(Path("vocab.json").read_text()) == json.loads(cached[1_042_301].read_text())
    assert hf.hf_tokenizer(tmp_path) == replace(tokenizer, spec=str(tmp_path))
    lines = Path("merges.txt").read_text(encoding="utf-8").split("\n")
    Path("merges.txt").write_text("\n".join(lines[:-2]), encoding="utf-8")
    assert hf.hf_tokenizer(tmp_path).json


def test_tables_that_are_no_encoding() -> None:
    singles = tuple(bytes([value]) for value in range(256))
    with pytest.raises(InputError, match="is not a merge of two pieces"):
        hf.merges_of(Table((*singles, b"<|endoftext|>", b"abc"), 256))
    with pytest.raises(InputError, match="lacks single bytes, or has one piece twice"):
        hf.merges_of(Table((*singles, b"<|endoftext|>", b"a"), 256))
    with pytest.raises(InputError, match="lacks single bytes"):
        hf.merges_of(Table((b"a", b"<|endoftext|>"), 1))


# --- mutated files: read, or refused with FormatError in one line

ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(), st.text(max_size=5),
    st.sampled_from(["ByteLevel", "Sequence", "BPE", "<|endoftext|>", 10**40, -1, 2**31]),
    st.lists(st.one_of(st.integers(), st.none(), st.text(max_size=2)), max_size=2),
    st.dictionaries(st.sampled_from(["type", "content", "id", "a"]), st.none() | st.text(max_size=2), max_size=2),
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """The files of a case in which up to three values, at any depth, are others."""
    files = json.loads(json.dumps(CASES[draw(st.sampled_from(sorted(CASES)))]["files"]))
    for _ in range(draw(st.integers(1, 3))):
        at, key = files, draw(st.sampled_from([name for name in files if name != "merges.txt"]))
        while isinstance(at[key], dict | list) and at[key] and draw(st.integers(0, 4)):
            at = at[key]
            key = draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else draw(st.integers(0, len(at) - 1))
        at[key] = draw(ODD)
    return files


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(mutated())
def test_mutated_files(files: dict[str, Any]) -> None:
    for path in Path().glob("folder/*"):
        path.unlink()
    try:
        tokenizer = hf.hf_tokenizer(put(files))
    except FormatError as error:
        assert "\n" not in str(error)
    else:
        assert tokenizer.pieces[tokenizer.eot] in (b"<|endoftext|>", b"</s>")


@pytest.mark.parametrize("name", [*OTHERS, "another end"])
def test_what_travels_alone_is_the_tokenizer(name: str) -> None:
    """Read from a file of any name, without the settings beside it, the same table, ids and digest come back."""
    files = CASES[OTHERS[0] if name == "another end" else name]["files"]
    folder = put(files)
    if name == "another end":
        for path in folder.iterdir():
            path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    found = hf.hf_tokenizer(folder)
    tables.write(Path("mine.tokenizer"), found)
    alone = load_tokenizer("mine.tokenizer").tokenizer
    assert alone is not None and table(alone) == table(found)
    assert tables.named(alone).sha256 == tables.named(found).sha256
    assert alone.pieces[alone.eot] == (b"</s>" if name == "another end" else b"<|endoftext|>")
    pytest.importorskip("tokenizers")
    for text in GOLDEN["texts"]:
        assert alone.encode(text).tolist() == found.encode(text).tolist()
    Path("out").mkdir()
    write_files(Path("out"), alone, 64)
    assert table(hf.hf_tokenizer(Path("out"))) == table(found)


SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>"]
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def llama3_form() -> dict[str, Any]:
    """A tokenizer.json of Llama 3's form, with few merges, and a piece that none of them makes."""
    letters = byte_characters()

    def spelled(piece: bytes) -> str:
        return "".join(letters[value] for value in piece)

    pairs = [(b" ", b"t"), (b"h", b"e"), (b" t", b"he"), (b" ", b"d"), (b"o", b"g"), (b" d", b"og"), (b"1", b"2"),
             (b" ", b" ")]  # fmt: skip
    pieces = [*letters, *(spelled(a + b) for a, b in pairs), "hello"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
    merges = [f"{spelled(a)} {spelled(b)}" for a, b in pairs]
    return model(ignore_merges=True, vocab=ids, merges=merges) | {
        "added_tokens": [{"id": len(ids) + at, "content": text} | usual for at, text in enumerate(SPECIAL)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None, "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
    }  # fmt: skip


@pytest.fixture(params=["folder", "file"])
def llama3(request: pytest.FixtureRequest) -> Tokenizer:
    """Its tokenizer, from the folder of a model and from the file alone."""
    pytest.importorskip("tokenizers")
    files = {"tokenizer.json": llama3_form()}
    if request.param == "folder":
        files["tokenizer_config.json"] = {"eos_token": "<|end_of_text|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = put(files)
    found = load_tokenizer(str(folder if request.param == "folder" else folder / "tokenizer.json")).tokenizer
    assert found is not None
    return found


def test_llama_3s_ids_and_what_begins_a_document(llama3: Tokenizer) -> None:
    import tokenizers

    theirs = tokenizers.Tokenizer.from_str(json.dumps(llama3_form()))
    for text in ("the dog hello 12 123", " the\n\n dog's é", "hello", "  the   dog\n"):
        ids = llama3.encode(text).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False).ids and llama3.decode(ids) == text.encode()
    begin = theirs.token_to_id("<|begin_of_text|>")
    assert llama3.eot == begin and llama3.encode_document("the dog").tolist()[0] == begin
    assert begin not in llama3.encode("the <|begin_of_text|> dog")  # spelled out it is text
    assert usual_eot(128256) == 128000  # in the real table, and so in llm.c's files
