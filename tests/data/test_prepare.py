"""`prepare` against plain loops over whole texts: documents, shards, splits, workers; and what bad input meets."""

import hashlib
import json
import random
import re
import struct
import sys
from pathlib import Path

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

TEXTS = [f"Document {number}.\nIt says é, 漢字 and 🙂 {number * 'again '}" for number in range(30)]


def tokens_of(path: Path) -> list[int]:
    """An independent reader of the two formats with a header."""
    data = path.read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    assert data[12:1024] == bytes(1012)
    dtype = {(20240520, 1): "<u2", (20240801, 7): "<u4"}[magic, version]
    tokens = np.frombuffer(data[1024:], dtype)
    assert tokens.size == count
    return tokens.tolist()


def all_tokens(made: Prepared, split: str) -> list[int]:
    return [token for shard in made.shards if shard.split == split for token in tokens_of(shard.path)]


def as_documents(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [token for text in texts for token in (tokenizer.eot, *tokenizer.encode(text).tolist())]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> None:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))


def write_parquet(path: Path, texts: list[str | None], field: str = "text") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path, row_group_size=7)


# ----- documents -----------------------------------------------------------------------------------------------------


def literal(text: str) -> re.Pattern[str]:
    """A text as --split-on takes it."""
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


# ----- the whole way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["folder", "jsonl", "parquet", "split"])
def test_every_format_gives_the_same_tokens(tmp_path: Path, form: str) -> None:
    source, reading = tmp_path / "in", Reading()
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
    made = prepare([str(source)], tmp_path / "out", "x", bytes_tokenizer(), Settings(reading, val_tokens=500))
    texts = TEXTS if form != "split" else [text + "<sep>" for text in TEXTS[:-1]] + TEXTS[-1:]
    expected = as_documents(bytes_tokenizer(), texts)
    assert all_tokens(made, "val") == expected[:500]
    assert all_tokens(made, "train") == expected[500:]
    assert (made.documents, made.empty) == (30, 0)


@pytest.mark.parametrize("shuffle", [None, 3])
def test_a_list_is_documents(tmp_path: Path, shuffle: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": f" {text}\n"} for text in TEXTS]))
    order = [*range(30)]
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    reading = Reading("json", strip=True, shuffle=shuffle)
    found = list(documents.read_documents(tmp_path / "a.json", reading))
    assert [each.text for each in found] == [TEXTS[index].strip() for index in order]
    assert sum(each.read for each in found) == (tmp_path / "a.json").stat().st_size


@pytest.mark.parametrize("val_tokens", [0, 1, 99, 100, 101, 250])
def test_shards(tmp_path: Path, val_tokens: int) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    made = prepare(
        [str(tmp_path / "a.txt")], tmp_path, "n", bytes_tokenizer(), Settings(shard_tokens=100, val_tokens=val_tokens)
    )
    expected = as_documents(bytes_tokenizer(), ["x" * 1000])
    for split, first, tokens in (("val", 0, expected[:val_tokens]), ("train", 1, expected[val_tokens:])):
        shards = [shard for shard in made.shards if shard.split == split]
        parts = [tokens[at : at + 100] for at in range(0, len(tokens), 100)]
        assert [tokens_of(shard.path) for shard in shards] == parts
        assert [shard.tokens for shard in shards] == [len(part) for part in parts]
        names = [f"n_{split}_{number:06d}.bin" for number in range(first, first + len(parts))]
        assert [shard.path for shard in shards] == [tmp_path / name for name in names]
    names = {"a.txt", "n.tokenizer", *(shard.path.name for shard in made.shards)}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_without_options_a_tenth_is_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    expected = as_documents(bytes_tokenizer(), TEXTS)
    monkeypatch.setattr(module, "BATCH_CHARS", 100)
    made = prepare([str(tmp_path / "a.jsonl")], tmp_path / "1", "x", bytes_tokenizer())
    assert all_tokens(made, "val") == expected[: len(expected) // 10]
    assert all_tokens(made, "train") == expected[len(expected) // 10 :]
    monkeypatch.setattr(module, "VAL_TOKENS", 50)  # but at most so many
    made = prepare([str(tmp_path / "a.jsonl")], tmp_path / "2", "x", bytes_tokenizer())
    assert all_tokens(made, "val") == expected[:50]
    assert all_tokens(made, "train") == expected[50:]


def test_a_fraction_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    sides = [
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64 < 0.3 for text in TEXTS
    ]
    assert 3 < sum(sides) < 15
    for characters in (1 << 20, 1):  # in one batch, and each document in one of its own
        monkeypatch.setattr(module, "BATCH_CHARS", characters)
        out = tmp_path / str(characters)
        made = prepare([str(tmp_path / "a.jsonl")], out, "x", bytes_tokenizer(), Settings(val_fraction=0.3))
        for split, side in (("val", True), ("train", False)):
            chosen = [text for text, is_val in zip(TEXTS, sides, strict=True) if is_val == side]
            assert all_tokens(made, split) == as_documents(bytes_tokenizer(), chosen)


@pytest.mark.parametrize("spec", ["bytes", "small"])
def test_the_number_of_workers_does_not_matter(
    tmp_path: Path, small_bin: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    tokenizer = bytes_tokenizer() if spec == "bytes" else bin_tokenizer(small_bin)
    write_jsonl(tmp_path / "a.jsonl", [*TEXTS * 3, "", ""])
    (tmp_path / "b.txt").write_text(" ".join(TEXTS))
    monkeypatch.setattr(module, "BATCH_CHARS", 200)
    inputs = [str(tmp_path / "b.txt"), str(tmp_path / "a.jsonl")]
    results = []
    for workers in (1, 2):
        split = Settings(val_fraction=0.2, shard_tokens=700, workers=workers, keep_empty=spec == "bytes")
        made = prepare(inputs, tmp_path / str(workers), "x", tokenizer, split)
        results.append([(shard.path.name, shard.path.read_bytes()) for shard in made.shards])
        assert made.documents == (93 if spec == "bytes" else 91)
        assert sum(tokens_of(shard.path).count(tokenizer.eot) for shard in made.shards) == made.documents
    assert results[0] == results[1]
    assert len(results[0]) > 3


def test_a_large_vocabulary_takes_the_llama3_format(tmp_path: Path) -> None:
    pieces = (*(bytes([value]) for value in range(256)), *(b"%08d" % value for value in range(70000)), b"<e>")
    tokenizer = Tokenizer("large", pieces, 70256, "large", lambda text: np.frombuffer(text.encode(), np.uint8))
    (tmp_path / "a.txt").write_text("hello")
    made = prepare([str(tmp_path / "a.txt")], tmp_path, "x", tokenizer, Settings(val_tokens=1))
    assert all_tokens(made, "val") == [70256]
    assert all_tokens(made, "train") == [*b"hello"]
    assert struct.unpack("<2i", made.shards[0].path.read_bytes()[:8]) == (20240801, 7)


def test_what_has_no_text_is_left_out_and_what_is_no_utf8_replaced(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("")
    (tmp_path / "2.txt").write_bytes(b"\xef\xbb\xbftext")  # a byte order mark is not text
    (tmp_path / "3.jsonl").write_text('\n{"text": ""}\n  \n{"text": null}\n{"text": "b"}')
    write_parquet(tmp_path / "4.parquet", ["", None, "c"])
    (tmp_path / "5.txt").write_bytes(b"a\xffb\xc3")
    (tmp_path / "6.jsonl").write_bytes(b'{"text": "\xff"}\n')
    how = Settings(Reading(errors="replace"), val_tokens=0)
    made = prepare([str(tmp_path)], tmp_path / "out", "x", bytes_tokenizer(), how)
    replaced = ["a\ufffdb\ufffd", "\ufffd"]
    assert all_tokens(made, "train") == as_documents(bytes_tokenizer(), ["text", "b", "c", *replaced])
    assert (made.documents, made.empty) == (5, 5)


def test_inputs_are_there_keep_their_order_and_come_once(tmp_path: Path) -> None:
    for name in ("b/2", "b/10", "b/c/1", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_inputs([str(tmp_path / "b"), str(tmp_path / "**" / "*.txt"), str(tmp_path / "b" / "2")])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["b/10", "b/2", "b/c/1", "a.txt"]
    (tmp_path / "empty").mkdir()
    for item in ("none.txt", "*.md", "empty"):
        with pytest.raises(InputError, match=r"no such file|is a folder without files"):
            find_inputs([str(tmp_path / item)])


# ----- bad input -----------------------------------------------------------------------------------------------------


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, message: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(documents, "READ_BYTES", 8)
    (tmp_path / name).write_bytes(data)
    how = Settings(Reading("json" if name == "list.json" else "auto"), val_tokens=0)
    with pytest.raises(InputError, match=message) as caught:
        prepare([str(tmp_path / name)], tmp_path / "out", "x", bytes_tokenizer(), how)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_bad_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["a"], field="body")
    with pytest.raises(InputError, match=r"a\.parquet: has no field 'text'; it has 'id', 'body'"):
        prepare([str(tmp_path / "a.parquet")], tmp_path / "out", "x", bytes_tokenizer())
    with pytest.raises(InputError, match=r"a\.parquet: row 1: field 'id' holds a int"):
        prepare([str(tmp_path / "a.parquet")], tmp_path / "out", "x", bytes_tokenizer(), Settings(Reading(field="id")))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install pyarrow"):
        prepare([str(tmp_path / "a.parquet")], tmp_path / "out", "x", bytes_tokenizer())


def test_an_error_in_a_worker_process_arrives(tmp_path: Path, small_bin: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    table = tmp_path / "table.bin"
    table.write_bytes(small_bin.read_bytes())
    tokenizer = bin_tokenizer(table)
    table.write_bytes(b"broken")
    with pytest.raises(InputError, match=r"table\.bin: is not a tokenizer file"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", "x", tokenizer, Settings(workers=2))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (Settings(val_tokens=6), "all 6 tokens would be validation"),
        (Settings(val_fraction=1e-9), "none of the 1 documents .* --val-tokens N"),
        (Settings(val_tokens=1, val_fraction=0.5), "give one of them"),
        (Settings(val_fraction=1.5), "between 0 and 1"),
        (Settings(shard_tokens=0), "--shard-size 0"),
        (Settings(workers=0), "--workers 0"),
        (Settings(Reading(split_on=literal(""))), "--split-on"),
        (Settings(Reading(drop_separator=True)), "--drop-separator"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, split: Settings, message: str) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(InputError, match=message):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", "x", bytes_tokenizer(), split)
    for name in ("", "a/b", "a*", "[1]", ".x"):  # make no pattern
        with pytest.raises(InputError, match="--name"):
            prepare([str(tmp_path / "a.txt")], tmp_path / "out", name, bytes_tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_earlier_outputs_are_kept_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world " * 20)
    out, other = tmp_path / "out", tmp_path / "out" / "x_train_notes.bin"
    prepare([str(tmp_path / "a.txt")], out, "x", bytes_tokenizer(), Settings(shard_tokens=50))
    other.write_text("not ours")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(InputError, match=r"x\.tokenizer exists \(7 files.*--force"):
        prepare([str(tmp_path / "a.txt")], out, "x", bytes_tokenizer())
    (tmp_path / "bad.txt").write_bytes(b"hello \xff")
    with pytest.raises(InputError, match="not UTF-8"):  # nor does a failure take anything away
        prepare([str(tmp_path / "bad.txt")], out, "x", bytes_tokenizer(), force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    made = prepare([str(tmp_path / "a.txt")], out, "x", bytes_tokenizer(), force=True)
    expected = {"x.tokenizer", "x_val_000000.bin", "x_train_000001.bin", other.name}
    assert {path.name for path in out.iterdir()} == expected
    assert len(made.shards) == 2


# ----- the command line ----------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my book.txt").write_text("One.\n\nTwo.\n\nThree.")
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
def test_progress_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("llmc_jax.base.progress.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    (tmp_path / "a.txt").write_text("hello world")
    assert main(["prepare", str(tmp_path / "a.txt"), "--tokenizer=bytes", "-o", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "12 tokens" in shown.err and "12 tokens" not in shown.out
