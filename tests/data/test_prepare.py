"""`prepare` against plain loops over whole texts: documents, shards, splits, workers; and what bad input meets."""

import hashlib
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.data import documents
from llmc_jax.data import prepare as module
from llmc_jax.data.command import main
from llmc_jax.data.documents import BLANK_LINE, Reading, cut_documents, find_inputs
from llmc_jax.data.prepare import Prepared, Settings, prepare
from llmc_jax.data.tokenizers import Tokenizer, bin_tokenizer, bytes_tokenizer
from tests.data.files import parquet_bytes, tokens_of

BYTES = bytes_tokenizer()
TEXTS = [f"Document {number}.\nIt says é, 漢字 and 🙂 {number * 'again '}" for number in range(30)]


def both_of(made: Prepared) -> tuple[list[int], list[int]]:
    """The tokens for validation, and those for training."""
    found: dict[str, list[int]] = {"val": [], "train": []}
    for shard in made.shards:
        found[shard.split] += tokens_of(shard.path)
    return found["val"], found["train"]


def as_documents(texts: list[str]) -> list[int]:
    return [token for text in texts for token in (256, *text.encode())]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))


def write_parquet(path: Path, texts: list[str | None], field: str = "text") -> None:
    path.write_bytes(parquet_bytes({"id": range(len(texts)), field: texts}))


def made_of(*inputs: str, out: str = "out", force: bool = False, **settings: Any) -> Prepared:
    """The files that `prepare` makes of others, in bytes."""
    return prepare([*inputs], Path(out), "x", BYTES, Settings(**settings), force)


def literal(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text))


@given(
    blocks=st.lists(st.text(st.sampled_from("the   \n\n\r\té."), max_size=5), max_size=20),
    separator=st.sampled_from([None, BLANK_LINE, *map(literal, ("\n", "\n\n", " \n ", "t", "he", "ee", "e t", "t\n"))]),
    drop=st.booleans(),
)
@example(blocks=["he\n", "\n\nt", "\n\n"], separator=BLANK_LINE, drop=False)
@example(blocks=["the\r\n\r", "\nt\r", "\n\r\n\r\n"], separator=BLANK_LINE, drop=True)
@settings(max_examples=1000, deadline=None)
def test_documents_are_those_of_the_whole_text(
    blocks: list[str], separator: re.Pattern[str] | None, drop: bool
) -> None:
    text = "".join(blocks)
    found = list(cut_documents([(block, len(block.encode())) for block in blocks], separator, drop))
    if separator is None:
        expected = [text]
    else:  # llm.c's dev/data/tinyshakespeare.py, but for what is empty or newlines alone at the end of a text
        *padded, last = re.split(f"({separator.pattern})", text)
        sections = zip(padded[::2], padded[1::2], strict=True)
        expected = [section + end * (not drop) for section, end in sections]
        expected += [last] if last.strip("\r\n") or not padded else []
    assert [each.text for each in found] == expected
    assert sum(each.read for each in found) <= len(text.encode())


def test_a_document_that_memory_should_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONGEST_DOCUMENT", 5)
    blocks = [("abc\n", 4), ("defg", 4), ("hi", 2)]
    with pytest.raises(InputError, match=r"a\.txt: .* more than 5 .*--split-on"):
        list(cut_documents(blocks, literal("\n"), where="a.txt"))
    assert len(list(cut_documents([*blocks[:2], ("\n", 1)], literal("\n")))) == 2


@pytest.mark.parametrize("form", ["folder", "jsonl", "parquet", "split"])
def test_every_format_gives_the_same_tokens(form: str) -> None:
    source, reading = Path("in"), Reading()
    source.mkdir()
    if form == "folder":
        for number, text in enumerate(TEXTS):
            path = source / f"{number // 10}" / f"{number:02}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        (source / ".hidden").write_bytes(b"\xff")
    elif form == "jsonl":
        write_jsonl(source / "a.jsonl", TEXTS[:10])
        write_jsonl(source / "b.ndjson", TEXTS[10:])
    elif form == "parquet":
        write_parquet(source / "a.parquet", [*TEXTS])
    else:
        (source / "all.txt").write_text("<sep>".join(TEXTS))
        reading = Reading(split_on=literal("<sep>"))
    made = made_of("in", reading=reading, val_tokens=500)
    texts = TEXTS if form != "split" else [text + "<sep>" for text in TEXTS[:-1]] + TEXTS[-1:]
    expected = as_documents(texts)
    assert both_of(made) == (expected[:500], expected[500:])
    assert (made.documents, made.empty) == (30, 0)


def test_a_list_is_documents() -> None:
    Path("a.json").write_text(json.dumps([{"text": f" {text}\n"} for text in TEXTS]))
    found = list(documents.read_documents(Path("a.json"), Reading("json", strip=True)))
    assert [each.text for each in found] == [text.strip() for text in TEXTS]
    assert sum(each.read for each in found) == Path("a.json").stat().st_size


@pytest.mark.parametrize("val_tokens", [0, 1, 99, 100, 101, 250])
def test_shards(val_tokens: int) -> None:
    Path("a.txt").write_text("x" * 1000)
    made = made_of("a.txt", shard_tokens=100, val_tokens=val_tokens)
    expected = as_documents(["x" * 1000])
    for split, first, tokens in (("val", 0, expected[:val_tokens]), ("train", 1, expected[val_tokens:])):
        shards = [shard for shard in made.shards if shard.split == split]
        parts = [tokens[at : at + 100] for at in range(0, len(tokens), 100)]
        assert [tokens_of(shard.path) for shard in shards] == parts
        assert [shard.tokens for shard in shards] == [len(part) for part in parts]
        numbers = range(first, first + len(parts))
        assert [shard.path for shard in shards] == [Path(f"out/x_{split}_{number:06d}.bin") for number in numbers]
    assert set(Path("out").iterdir()) == {Path("out/x.tokenizer"), *(shard.path for shard in made.shards)}


def test_without_options_a_tenth_is_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(Path("a.jsonl"), TEXTS)
    expected = as_documents(TEXTS)
    monkeypatch.setattr(module, "BATCH_CHARS", 100)
    tenth = len(expected) // 10
    assert both_of(made_of("a.jsonl")) == (expected[:tenth], expected[tenth:])
    monkeypatch.setattr(module, "VAL_TOKENS", 50)  # but at most so many
    assert both_of(made_of("a.jsonl", force=True)) == (expected[:50], expected[50:])


def test_a_fraction_of_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(Path("a.jsonl"), TEXTS)
    val, train = [], []
    for text in TEXTS:
        share = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
        (val if share < 0.3 else train).append(text)
    assert 3 < len(val) < 15
    for characters in (1 << 20, 1):  # in one batch, and each document in one of its own
        monkeypatch.setattr(module, "BATCH_CHARS", characters)
        made = made_of("a.jsonl", out=f"{characters}", val_fraction=0.3)
        assert both_of(made) == (as_documents(val), as_documents(train))


@pytest.mark.parametrize("spec", ["bytes", "small"])
def test_the_number_of_workers_does_not_matter(small_bin: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    tokenizer = BYTES if spec == "bytes" else bin_tokenizer(small_bin)
    write_jsonl(Path("a.jsonl"), [*TEXTS * 3, "", ""])
    Path("b.txt").write_text(" ".join(TEXTS))
    monkeypatch.setattr(module, "BATCH_CHARS", 200)
    results = []
    for workers in (1, 2):
        split = Settings(val_fraction=0.2, shard_tokens=700, workers=workers, keep_empty=spec == "bytes")
        made = prepare(["b.txt", "a.jsonl"], Path(f"{workers}"), "x", tokenizer, split)
        results.append([(shard.path.name, shard.path.read_bytes()) for shard in made.shards])
        assert made.documents == (93 if spec == "bytes" else 91)
        assert sum(tokens_of(shard.path).count(tokenizer.eot) for shard in made.shards) == made.documents
    assert results[0] == results[1] and len(results[0]) > 3


def test_a_large_vocabulary_takes_the_llama3_format() -> None:
    pieces = (*(bytes([value]) for value in range(256)), *(b"%08d" % value for value in range(70000)), b"<e>")
    tokenizer = Tokenizer("large", pieces, 70256, "large", lambda text: np.frombuffer(text.encode(), np.uint8))
    Path("a.txt").write_text("hello")
    made = prepare(["a.txt"], Path(), "x", tokenizer, Settings(val_tokens=1))
    assert both_of(made) == ([70256], [*b"hello"])
    assert struct.unpack("<2i", made.shards[0].path.read_bytes()[:8]) == (20240801, 7)


def test_what_has_no_text_is_left_out_and_what_is_no_utf8_replaced() -> None:
    Path("1.txt").write_text("")
    Path("2.txt").write_bytes(b"\xef\xbb\xbftext")  # a byte order mark is not text
    Path("3.jsonl").write_text('\n{"text": ""}\n  \n{"text": null}\n{"text": "b"}')
    write_parquet(Path("4.parquet"), ["", None, "c"])
    Path("5.txt").write_bytes(b"a\xffb\xc3")
    Path("6.jsonl").write_bytes(b'{"text": "\xff"}\n')
    made = made_of("[1-6].*", reading=Reading(errors="replace"), val_tokens=0)
    assert both_of(made) == ([], as_documents(["text", "b", "c", "a\ufffdb\ufffd", "\ufffd"]))
    assert (made.documents, made.empty) == (5, 5)


def test_inputs_are_there_keep_their_order_and_come_once() -> None:
    for name in ("b/2", "b/10", "b/c/1", "a.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    assert [str(path) for path in find_inputs(["b", "**/*.txt", "b/2"])] == ["b/10", "b/2", "b/c/1", "a.txt"]
    Path("empty").mkdir()
    for item in ("none.txt", "*.md", "empty"):
        with pytest.raises(InputError, match=r"no such file|is a folder without files"):
            find_inputs([item])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"abc\xff", r"a\.txt: byte 3: 0xff is not UTF-8.*--errors replace"),
        ("a.txt", b"a" * 20 + "é".encode()[:1], r"a\.txt: byte 20: 0xc3 is not UTF-8"),
        ("a.txt", b"a" * 7 + "漢".encode()[:2] + b"b", r"a\.txt: byte 7: 0xe6 is not UTF-8"),
        ("a.txt", b"", r"a\.txt: no text in 1 documents"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2: is not JSON \(.*column"),
        ("a.jsonl", b"[" * 100000, r"a\.jsonl:1: is not JSON"),
        ("a.json", b"\xef\xbb\xbf\n [{}]", r"a\.json:2: is a list.*--format json"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', r"a\.jsonl:1: has no field 'text'; it has 'body', 'id'; .*--field"),
        ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl:1: field 'text' holds a int"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl: byte 24: 0xff is not UTF-8"),
        ("list.json", b'{"text": "a"}', r"list\.json: is a JSON dict; expected a list of objects"),
        ("list.json", b'[{"text": "a"}, 3]', r"list\.json: item 1: is a JSON int"),
        ("list.json", b'[{"text": "a"}, {"story": "b"}]', r"item 1: has no field 'text'; it has 'story'"),
        ("list.json", b'[{"text": "a"},', r"list\.json: is not JSON .*; expected a list of objects"),
        ("a.parquet", b"PAR1 nothing PAR1", r"a\.parquet: cannot be read as parquet"),
        ("a.parquet", b"PAR1" + bytes(600) + b"PAR1", r"a\.parquet: cannot be read as parquet"),
    ],
)
def test_bad_files_are_one_clear_line_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, message: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(documents, "READ_BYTES", 8)
    Path(name).write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        made_of(name, reading=Reading("json" if name == "list.json" else "auto"), val_tokens=0)
    assert "\n" not in str(caught.value) and [str(path) for path in Path().iterdir()] == [name]


def test_bad_columns_and_no_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(Path("a.parquet"), ["a"], field="body")
    with pytest.raises(InputError, match=r"a\.parquet: has no field 'text'; it has 'id', 'body'"):
        made_of("a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: row 1: field 'id' holds a int"):
        made_of("a.parquet", reading=Reading(field="id"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install pyarrow"):
        made_of("a.parquet")


def test_an_error_in_a_worker_process_arrives(small_bin: Path) -> None:
    Path("a.txt").write_text("some text")
    table = Path("table.bin")
    table.write_bytes(small_bin.read_bytes())
    tokenizer = bin_tokenizer(table)
    table.write_bytes(b"broken")
    with pytest.raises(InputError, match=r"table\.bin: not a tokenizer file"):
        prepare(["a.txt"], Path("out"), "x", tokenizer, Settings(workers=2))
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--val-tokens", "6"], "all 6 tokens would be validation"),
        (["--val-fraction", "1e-9"], "none of the 1 documents .* --val-tokens N"),
        (["--val-tokens", "1", "--val-fraction", "0.5"], "exclude each other"),
        (["--val-fraction", "1.5"], "--val-fraction 1.5: .*between 0 and 1"),
        (["--val-tokens=-1"], "--val-tokens -1"),
        (["--shard-size", "0"], "--shard-size 0"),
        (["--workers", "0"], "--workers 0"),
        (["--split-on", ""], "--split-on"),
        (["--drop-separator"], "--drop-separator needs --split-on"),
        *((["--name", name], "--name") for name in ("", "a/b", "a*", "[1]", ".x")),  # make no pattern
    ],
)
def test_settings_that_cannot_be(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("hello")
    assert main(["prepare", "a.txt", "--tokenizer", "bytes", "-o", "out", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in Path().iterdir()] == ["a.txt"]


def test_earlier_outputs_are_kept_unless_forced() -> None:
    Path("a.txt").write_text("hello world " * 20)
    out, other = Path("out"), Path("out/x_train_notes.bin")
    made_of("a.txt", shard_tokens=50)
    other.write_text("not ours")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(InputError, match=r"x\.tokenizer: exists already; --force"):
        made_of("a.txt")
    Path("bad.txt").write_bytes(b"hello \xff")
    with pytest.raises(InputError, match="not UTF-8"):  # nor does a failure take anything away
        made_of("bad.txt", force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert len(made_of("a.txt", force=True).shards) == 2
    expected = {"x.tokenizer", "x_val_000000.bin", "x_train_000001.bin", other.name}
    assert {path.name for path in out.iterdir()} == expected


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my book.txt").write_text("One.\n\nTwo.\n\nThree.")
    arguments = ["prepare", "my book.txt", "--tokenizer", "bytes", "--split-on", r"\n\n", "--val-tokens", "6"]
    assert main(arguments) == 0
    folder = Path("dev/data/my_book")
    tokens = [256, *b"One.\n\n", 256, *b"Two.\n\n", 256, *b"Three."]
    assert tokens_of(folder / "my_book_val_000000.bin") == tokens[:6]
    assert tokens_of(folder / "my_book_train_000001.bin") == tokens[6:]
    shown = capsys.readouterr().out
    assert "Saved 6 tokens to dev/data/my_book/my_book_val_000000.bin\n" in shown
    assert "3 documents: 15 tokens for training, 6 for validation" in shown
    assert "-i 'dev/data/my_book/my_book_train_*.bin' -j 'dev/data/my_book/my_book_val_*.bin'" in shown
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("llmc-jax data: ") and "--force" in shown and shown.count("\n") == 1
    for ten in ("0.01k", "1e1", "10"):
        assert main([*arguments, "--force", "--split-on", "blank-line", "--shard-size", ten]) == 0
        assert tokens_of(folder / "my_book_train_000001.bin") == tokens[6:16]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr("llmc_jax.base.progress.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    Path("a.txt").write_text("hello world")
    assert main(["prepare", "a.txt", "--tokenizer=bytes", "-o", "out"]) == 0
    shown = capsys.readouterr()
    assert "12 tokens" in shown.err and "12 tokens" not in shown.out
