"""The public files of HellaSwag, MMLU, ARC and LAMBADA, small ones made here in their real formats; and wrong files."""

import hashlib
import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.data.evalfile import Item, write_eval_file
from llmc_jax.data.tasks import TASKS, Question, read_items
from llmc_jax.data.tokenizers import bin_tokenizer, bytes_tokenizer

BYTES = bytes_tokenizer()
# of what write_evalfile of llm.c's dev/data/data_common.py writes for the sample, with tiktoken's GPT-2
LLMCS_SAMPLE = "199ced6942131df43ef6712bbae45b624148ed3ae618f5757f2b315a7d1f94d3"

# ----- what the files say -------------------------------------------------------------------------------------------

HELLASWAG: list[dict[str, Any]] = [
    {
        "ind": 24,
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof.",
        "ctx_b": "he",
        "ctx": "A man is sitting on a roof. he",
        "split": "val",
        "split_type": "indomain",
        "label": 3,
        "endings": ["is using wrap.", "is ripping tiles.", "is holding a cube.", "starts pulling up roofing."],
        "source_id": "activitynet~v_-JhWjGDPHMY",
    },
    {
        "ind": 7,
        "activity_label": "Tee\u2028",  # a line separator of Unicode, which ends no line of jsonl
        "ctx_a": "",
        "ctx_b": "",
        "ctx": "[header] How to make tea [title] Bring it to 100 °C",
        "split": "val",
        "split_type": "zeroshot",
        "label": 0,
        "endings": [", then wait.", "é", "no", "yes"],
        "source_id": "wikihow~1",
    },
]
HELLASWAG_ASKED = [
    Question(
        "24",
        "A man is sitting on a roof. he",
        (" is using wrap.", " is ripping tiles.", " is holding a cube.", " starts pulling up roofing."),
        3,
    ),
    Question("7", "[header] How to make tea [title] Bring it to 100 °C", (" , then wait.", " é", " no", " yes"), 0),
]

MMLU: list[dict[str, Any]] = [
    {"question": question, "subject": subject, "choices": choices, "answer": answer}
    for subject, question, choices, answer in (
        ("abstract_algebra", "Is it\r\na field?", ["True, True", "False, False", "1e3", " x"], 3),
        ("anatomy", 'Which bone?\nChoose, "one".', ["1.50", "None", "NA", ""], 2),
        ("anatomy", "Why?", [*"abcd"], 0),
    )
]
MMLU_ASKED = [
    Question(
        "abstract_algebra:0",
        "Question: Is it\r\na field?\n\nAnswer:",
        (" True, True", " False, False", " 1e3", "  x"),
        3,
    ),
    Question("anatomy:0", 'Question: Which bone?\nChoose, "one".\n\nAnswer:', (" 1.50", " None", " NA", " "), 2),
    Question("anatomy:1", "Question: Why?\n\nAnswer:", (" a", " b", " c", " d"), 0),
]

ARC: list[dict[str, Any]] = [
    {
        "id": name,
        "question": question,
        "choices": {"text": texts, "label": list("ABCDE"[: len(texts)] if letters else "1234")},
        "answerKey": key,
    }
    for name, question, texts, letters, key in (
        ("Mercury_7175875", "Which is largest?", ["a star", "a moon", "a planet"], True, "A"),
        ("NYSEDREGENTS_2015_4_8", "What melts?", ["ice", "fire", "air", "ash"], False, "4"),
        ("MCAS_5", "Which letter?", [*"abcde"], True, "E"),
    )
]
ARC_ASKED = [
    Question("Mercury_7175875", "Question: Which is largest?\nAnswer:", (" a star", " a moon", " a planet"), 0),
    Question("NYSEDREGENTS_2015_4_8", "Question: What melts?\nAnswer:", (" ice", " fire", " air", " ash"), 3),
    Question("MCAS_5", "Question: Which letter?\nAnswer:", (" a", " b", " c", " d", " e"), 4),
]

LAMBADA = [
    {"text": "in my palm is a clear stone , and inside it is a small ivory statue"},
    {"text": "two\n\n spaces  on"},
]
LAMBADA_ASKED = [
    Question("0", "in my palm is a clear stone , and inside it is a small ivory", (" statue",), 0),
    Question("1", "two\n\n spaces", ("  on",), 0),
]


# ----- the files ----------------------------------------------------------------------------------------------------


def jsonl(rows: list[dict[str, Any]], **options: Any) -> bytes:
    return "".join(json.dumps(row, **options) + "\n" for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    data = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), data, row_group_size=2)
    return data.getvalue()


def hellaswag_parquet() -> bytes:
    return parquet([row | {"label": str(row["label"])} for row in HELLASWAG])


FILES: dict[str, tuple[str, Callable[[], bytes], list[Question]]] = {
    "hellaswag_val.jsonl": ("hellaswag", lambda: jsonl(HELLASWAG), HELLASWAG_ASKED),
    "unescaped.jsonl": ("hellaswag", lambda: jsonl(HELLASWAG, ensure_ascii=False), HELLASWAG_ASKED),
    "bom.jsonl": ("hellaswag", lambda: b"\xef\xbb\xbf" + jsonl(HELLASWAG).replace(b"\n", b"\r\n\n"), HELLASWAG_ASKED),
    "validation-00000-of-00001.parquet": ("hellaswag", hellaswag_parquet, HELLASWAG_ASKED),
    "test-00000-of-00001.parquet": ("mmlu", lambda: parquet(MMLU), MMLU_ASKED),
    "ARC-Challenge-Test.parquet": ("arc-challenge", lambda: parquet(ARC), ARC_ASKED),
    "lambada_test.jsonl": ("lambada", lambda: jsonl(LAMBADA), LAMBADA_ASKED),
    "any name": ("lambada", lambda: parquet(LAMBADA), LAMBADA_ASKED),
}


@pytest.mark.parametrize("name", FILES)
def test_public_files(tmp_path: Path, name: str) -> None:
    task, made, asked = FILES[name]
    (tmp_path / name).write_bytes(made())
    assert list(TASKS[task].read(tmp_path / name)) == asked


# ----- in tokens ----------------------------------------------------------------------------------------------------


def test_items(tmp_path: Path, small_bin: Path) -> None:
    """Context and choices are encoded each by itself; text that spells a special token is text."""
    row = HELLASWAG[0] | {"ctx": "the cat<|end|>", "endings": ["sat on the mat", "the dog", "a", "b"]}
    (tmp_path / "a.jsonl").write_bytes(jsonl([row, *HELLASWAG]))
    tokenizer = bin_tokenizer(small_bin)
    first, second = read_items("hellaswag", tmp_path / "a.jsonl", tokenizer, limit=2)
    assert len(read_items("hellaswag", tmp_path / "a.jsonl", tokenizer, limit=10**30)) >= 2
    assert tokenizer.decode(first.context) == b"the cat<|end|>"
    assert tokenizer.eot not in first.context
    assert len(first.context) < len("the cat<|end|>")
    assert [tokenizer.decode(ids) for ids in first.completions] == [b" sat on the mat", b" the dog", b" a", b" b"]
    assert first.completions[1] == tuple(tokenizer.encode(" the dog").tolist())
    assert (first.name, first.label, second.name) == ("24", 3, "24")
    assert {type(token) for token in first.context} == {int}


def test_what_is_read_where_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first there is of those that `data hellaswag` leaves."""
    monkeypatch.chdir(tmp_path)
    task = TASKS["hellaswag"]
    task.file.parent.mkdir(parents=True)
    found = [task.usual_file]
    for name in ("hellaswag_val.bin", "hellaswag_val.jsonl", "hellaswag_val.parquet"):
        task.file.with_name(name).touch()
        found.append(task.usual_file)
    assert [path.suffix for path in found] == [".parquet", ".bin", ".jsonl", ".parquet"]
    assert {path.parent for path in found} == {task.file.parent}


def test_llmcs_file_needs_no_tokenizer(tmp_path: Path) -> None:
    """Any name, no tokenizer, the first few questions; and not for a task with a single answer."""
    items = [Item(str(number), (number, 2), ((1,), (2,), (3,), (4, 9))[:4], 1) for number in range(5)]
    write_eval_file(tmp_path / "x.jsonl", items)
    assert read_items("hellaswag", tmp_path / "x.jsonl", None) == items
    assert read_items("mmlu", tmp_path / "x.jsonl", BYTES, limit=2, vocab_size=10) == items[:2]
    with pytest.raises(InputError, match=r"x\.jsonl: question 0 has id 9, but with V=9 ids end at 8"):
        read_items("hellaswag", tmp_path / "x.jsonl", None, vocab_size=9)
    with pytest.raises(InputError, match="4 answers"):
        read_items("lambada", tmp_path / "x.jsonl", None)


def test_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(LAMBADA))
    assert len(read_items("lambada", tmp_path / "a.jsonl", BYTES, vocab_size=122)) == 2
    with pytest.raises(InputError, match=r"a\.jsonl: question 0 has id 121, but with V=121 "):
        read_items("lambada", tmp_path / "a.jsonl", BYTES, vocab_size=121)
    with pytest.raises(InputError, match="--tokenizer"):
        read_items("lambada", tmp_path / "a.jsonl", None)


def test_the_sample_of_hellaswag(tmp_path: Path, shared: Path) -> None:
    """1,000 questions out of the jsonl; llm.c's file of them has the bytes that its own script writes."""
    path = shared / "data/hellaswag_val_sample1000.jsonl"
    tokenizer = bin_tokenizer(shared / "data/gpt2_tokenizer.bin")
    items = read_items("hellaswag", path, tokenizer, vocab_size=50257)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [item.name for item in items] == [str(row["ind"]) for row in rows]
    assert [item.label for item in items] == [row["label"] for row in rows]
    for item, row in zip(items, rows, strict=True):
        assert tokenizer.decode(item.context).decode() == row["ctx"]
        assert [tokenizer.decode(ids).decode() for ids in item.completions] == [f" {text}" for text in row["endings"]]
    write_eval_file(tmp_path / "a.bin", items)
    assert hashlib.sha256((tmp_path / "a.bin").read_bytes()).hexdigest() == LLMCS_SAMPLE
    again = read_items("hellaswag", tmp_path / "a.bin", None, vocab_size=50257)
    assert [item[1:] for item in again] == [item[1:] for item in items]


# ----- wrong files --------------------------------------------------------------------------------------------------


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


WRONG: dict[str, tuple[str, bytes, str]] = {
    "hellaswag as lambada": ("lambada", jsonl(HELLASWAG), ":1: has the fields ind, .*; expected those of LAMBADA"),
    "lambada as hellaswag": ("hellaswag", jsonl([HELLASWAG[0], *LAMBADA]), ":2: has the fields text"),
    "empty": ("hellaswag", b"", ": has no questions"),
    "text": ("hellaswag", b"Once upon a time", ":1: is not JSON"),
    "tokens": ("hellaswag", struct.pack("<256i", 20240520, 1, 0, *[0] * 253), ": is a file of GPT-2 tokens"),
    "bad parquet": ("arc-easy", b"PAR1" + bytes(600) + b"PAR1", ": cannot be read as parquet"),
    "latin-1": ("lambada", b'{"text": "a b"}\n{"text": "\xe9"}\n', ": byte 26: 0xe9 is not UTF-8"),
    "no label": ("hellaswag", jsonl([HELLASWAG[0], without(HELLASWAG[1], "label")]), ":2: has no label"),
    "label": ("hellaswag", jsonl([HELLASWAG[0] | {"label": 4}]), ":1: label is '4'; expected one of 0, 1, 2, 3"),
    "endings": ("hellaswag", jsonl([HELLASWAG[0] | {"endings": "abc"}]), ":1: field 'endings' holds 'abc'"),
    "no context": ("hellaswag", jsonl([HELLASWAG[0] | {"ctx": ""}]), ": question 24 has a context or an answer"),
    "no choices": ("arc-easy", jsonl([ARC[0] | {"choices": None}]), ":1: field 'choices.text'"),
    "no answer": ("arc-easy", jsonl([ARC[0] | {"answerKey": "D"}]), ":1: answerKey is 'D'; expected one of A, B, C"),
    "lengths": (
        "arc-easy",
        jsonl([ARC[0] | {"choices": {"text": ["a"], "label": ["A", "B"]}}]),
        ":1: has 1 choices and 2 labels",
    ),
    "space at the end": ("lambada", jsonl([{"text": "two words "}]), ":1: .* last word"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_files(tmp_path: Path, what: str) -> None:
    task, data, said = WRONG[what]
    path = tmp_path / "a"
    path.write_bytes(data)
    if "parquet" in what:
        pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match=rf"^{path}{said}") as caught:
        read_items(task, path, BYTES)
    assert "\n" not in str(caught.value)


def test_wrong_places(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(InputError, match="regular"):
            read_items("mmlu", path, BYTES)
    with pytest.raises(InputError, match="data arc`"):
        read_items("arc-easy", tmp_path / "missing.jsonl", BYTES)


@given(st.data())
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any file gives questions, or one line that names it."""
    task, made = data.draw(st.sampled_from([("arc-easy", parquet(ARC)), ("hellaswag", jsonl(HELLASWAG))]))
    at = data.draw(st.integers(0, len(made) - 1))
    changed = made[:at] + data.draw(st.binary(min_size=1, max_size=3)) + made[at + data.draw(st.integers(0, 3)) :]
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(changed)
    try:
        assert read_items(task, path, BYTES)
    except InputError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)
