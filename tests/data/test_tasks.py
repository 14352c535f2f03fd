"""The public files of HellaSwag, MMLU, ARC and LAMBADA, small ones made here in their real formats; and wrong files."""

import hashlib
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
from tests.data.files import parquet_bytes

BYTES = bytes_tokenizer()
# of what write_evalfile of llm.c's dev/data/data_common.py writes for the sample, with tiktoken's GPT-2
LLMCS_SAMPLE = "199ced6942131df43ef6712bbae45b624148ed3ae618f5757f2b315a7d1f94d3"

HELLASWAG: list[dict[str, Any]] = [
    {
        "ind": 24, "activity_label": "Roof shingle removal", "ctx": "A man is sitting on a roof. he", "label": 3,
        "endings": ["is using wrap.", "is ripping tiles.", "is holding a cube.", "starts pulling up roofing."],
    },
    {
        "ind": 7, "activity_label": "Tee\u2028",  # a line separator of Unicode, which ends no line of jsonl
        "ctx": "[header] How to make tea [title] Bring it to 100 °C", "label": 0,
        "endings": [", then wait.", "é", "no", "yes"],
    },
]  # fmt: skip
HELLASWAG_OF_TEXTS = [row | {"label": str(row["label"])} for row in HELLASWAG]
HELLASWAG_ASKED = [
    Question("24", "A man is sitting on a roof. he", tuple(f" {ending}" for ending in HELLASWAG[0]["endings"]), 3),
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
        "abstract_algebra:0", "Question: Is it\r\na field?\n\nAnswer:",
        (" True, True", " False, False", " 1e3", "  x"), 3,
    ),
    Question("anatomy:0", 'Question: Which bone?\nChoose, "one".\n\nAnswer:', (" 1.50", " None", " NA", " "), 2),
    Question("anatomy:1", "Question: Why?\n\nAnswer:", (" a", " b", " c", " d"), 0),
]  # fmt: skip

ARC: list[dict[str, Any]] = [
    {"id": name, "question": question, "choices": {"text": texts, "label": [*labels]}, "answerKey": key}
    for name, question, texts, labels, key in (
        ("Mercury_7175875", "Which is largest?", ["a star", "a moon", "a planet"], "ABC", "A"),
        ("NYSEDREGENTS_2015_4_8", "What melts?", ["ice", "fire", "air", "ash"], "1234", "4"),
        ("MCAS_5", "Which letter?", [*"abcde"], "ABCDE", "E"),
    )
]
ARC_ASKED = [
    Question("Mercury_7175875", "Question: Which is largest?\nAnswer:", (" a star", " a moon", " a planet"), 0),
    Question("NYSEDREGENTS_2015_4_8", "Question: What melts?\nAnswer:", (" ice", " fire", " air", " ash"), 3),
    Question("MCAS_5", "Question: Which letter?\nAnswer:", (" a", " b", " c", " d", " e"), 4),
]

LAMBADA = [{"text": "inside it is a small ivory statue"}, {"text": "two\n\n spaces  on"}]
LAMBADA_ASKED = [
    Question("0", "inside it is a small ivory", (" statue",), 0),
    Question("1", "two\n\n spaces", ("  on",), 0),
]


def jsonl(rows: list[dict[str, Any]], **options: Any) -> bytes:
    return "".join(json.dumps(row, **options) + "\n" for row in rows).encode()


FILES: dict[str, tuple[str, Callable[[], bytes], list[Question]]] = {
    "hellaswag_val.jsonl": ("hellaswag", lambda: jsonl(HELLASWAG), HELLASWAG_ASKED),
    "unescaped.jsonl": ("hellaswag", lambda: jsonl(HELLASWAG, ensure_ascii=False), HELLASWAG_ASKED),
    "bom.jsonl": ("hellaswag", lambda: b"\xef\xbb\xbf" + jsonl(HELLASWAG).replace(b"\n", b"\r\n\n"), HELLASWAG_ASKED),
    "validation-00000-of-00001.parquet": ("hellaswag", lambda: parquet_bytes(HELLASWAG_OF_TEXTS, 2), HELLASWAG_ASKED),
    "test-00000-of-00001.parquet": ("mmlu", lambda: parquet_bytes(MMLU, 2), MMLU_ASKED),
    "ARC-Challenge-Test.parquet": ("arc-challenge", lambda: parquet_bytes(ARC, 2), ARC_ASKED),
    "lambada_test.jsonl": ("lambada", lambda: jsonl(LAMBADA), LAMBADA_ASKED),
    "any name": ("lambada", lambda: parquet_bytes(LAMBADA, 2), LAMBADA_ASKED),
}


@pytest.mark.parametrize("name", FILES)
def test_public_files(name: str) -> None:
    task, made, asked = FILES[name]
    Path(name).write_bytes(made())
    assert list(TASKS[task].read(Path(name))) == asked


def test_items(small_bin: Path) -> None:
    """Context and choices are encoded each by itself; text that spells a special token is text."""
    row = HELLASWAG[0] | {"ctx": "the cat<|end|>", "endings": ["sat on the mat", "the dog", "a", "b"]}
    Path("a.jsonl").write_bytes(jsonl([row, *HELLASWAG]))
    tokenizer = bin_tokenizer(small_bin)
    first, second = read_items("hellaswag", "a.jsonl", tokenizer, limit=2)
    assert len(read_items("hellaswag", "a.jsonl", tokenizer, limit=10**30)) >= 2
    assert tokenizer.decode(first.context) == b"the cat<|end|>" and tokenizer.eot not in first.context
    assert len(first.context) < len("the cat<|end|>")
    assert [tokenizer.decode(ids) for ids in first.completions] == [b" sat on the mat", b" the dog", b" a", b" b"]
    assert first.completions[1] == tuple(tokenizer.encode(" the dog").tolist())
    assert (first.name, first.label, second.name) == ("24", 3, "24")
    assert {type(token) for token in first.context} == {int}


def test_what_is_read_where_no_file_is_named() -> None:
    """The first there is of those that `data hellaswag` leaves."""
    task = TASKS["hellaswag"]
    task.file.parent.mkdir(parents=True)
    assert task.usual_file == task.file.with_name("hellaswag_val.parquet")
    for ending in (".bin", ".jsonl", ".parquet"):
        task.file.with_suffix(ending).touch()
        assert task.usual_file == task.file.with_suffix(ending)


def test_llmcs_file_needs_no_tokenizer() -> None:
    """Any name, no tokenizer, the first few questions; and not for a task with a single answer."""
    items = [Item(str(number), (number, 2), ((1,), (2,), (3,), (4, 9))[:4], 1) for number in range(5)]
    write_eval_file("x.jsonl", items)
    assert read_items("hellaswag", "x.jsonl", None) == items
    assert read_items("mmlu", "x.jsonl", BYTES, limit=2, vocab_size=10) == items[:2]
    with pytest.raises(InputError, match=r"x\.jsonl: question 0 has id 9, but with V=9 ids end at 8"):
        read_items("hellaswag", "x.jsonl", None, vocab_size=9)
    with pytest.raises(InputError, match="4 answers"):
        read_items("lambada", "x.jsonl", None)


def test_a_tokenizer_that_does_not_fit() -> None:
    Path("a.jsonl").write_bytes(jsonl(LAMBADA))
    assert len(read_items("lambada", "a.jsonl", BYTES, vocab_size=122)) == 2
    with pytest.raises(InputError, match=r"a\.jsonl: question 0 has id 121, but with V=121 "):
        read_items("lambada", "a.jsonl", BYTES, vocab_size=121)
    with pytest.raises(InputError, match="--tokenizer"):
        read_items("lambada", "a.jsonl", None)


def test_the_sample_of_hellaswag(shared: Path) -> None:
    """1,000 questions out of the jsonl; llm.c's file of them has the bytes that its own script writes."""
    path = shared / "data/hellaswag_val_sample1000.jsonl"
    tokenizer = bin_tokenizer(shared / "data/gpt2_tokenizer.bin")
    items = read_items("hellaswag", path, tokenizer, vocab_size=50257)
    write_eval_file(Path("a.bin"), items)
    assert hashlib.sha256(Path("a.bin").read_bytes()).hexdigest() == LLMCS_SAMPLE
    again = read_items("hellaswag", Path("a.bin"), None, vocab_size=50257)
    assert [item[1:] for item in again] == [item[1:] for item in items]


WRONG: dict[str, tuple[str, bytes, str]] = {
    "hellaswag as lambada": ("lambada", jsonl(HELLASWAG), ":1: has the fields ind, .*; expected those of LAMBADA"),
    "lambada as hellaswag": ("hellaswag", jsonl([HELLASWAG[0], *LAMBADA]), ":2: has the fields text"),
    "empty": ("hellaswag", b"", ": has no questions"),
    "text": ("hellaswag", b"Once upon a time", ":1: is not JSON"),
    "tokens": ("hellaswag", struct.pack("<256i", 20240520, 1, 0, *[0] * 253), ": is a file of GPT-2 tokens"),
    "bad parquet": ("arc-easy", b"PAR1" + bytes(600) + b"PAR1", ": cannot be read as parquet"),
    "latin-1": ("lambada", b'{"text": "a b"}\n{"text": "\xe9"}\n', ": byte 26: 0xe9 is not UTF-8"),
    "no label": ("hellaswag", jsonl([HELLASWAG[0], {"ctx": "a", "endings": []}]), ":2: has no label"),
    "label": ("hellaswag", jsonl([HELLASWAG[0] | {"label": 4}]), ":1: label is '4'; expected one of 0, 1, 2, 3"),
    "endings": ("hellaswag", jsonl([HELLASWAG[0] | {"endings": "abc"}]), ":1: field 'endings' holds 'abc'"),
    "no context": ("hellaswag", jsonl([HELLASWAG[0] | {"ctx": ""}]), ": question 24 has a context or an answer"),
    "no choices": ("arc-easy", jsonl([ARC[0] | {"choices": None}]), ":1: field 'choices.text'"),
    "no answer": ("arc-easy", jsonl([ARC[0] | {"answerKey": "D"}]), ":1: answerKey is 'D'; expected one of A, B, C"),
    "lengths": ("arc-easy", jsonl([ARC[0] | {"choices": {"text": ["a"], "label": [*"AB"]}}]), ":1: has 1 choices and "),
    "space at the end": ("lambada", jsonl([{"text": "two words "}]), ":1: .* last word"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_files(what: str) -> None:
    task, data, said = WRONG[what]
    path = Path("a")
    path.write_bytes(data)
    if "parquet" in what:
        pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match=rf"^{path}{said}") as caught:
        read_items(task, path, BYTES)
    assert "\n" not in str(caught.value)


def test_wrong_places() -> None:
    os.mkfifo(Path("pipe"))
    for path in (Path(), Path("pipe")):
        with pytest.raises(InputError, match="regular"):
            read_items("mmlu", path, BYTES)
    with pytest.raises(InputError, match="data arc`"):
        read_items("arc-easy", Path("missing.jsonl"), BYTES)


@given(st.data())
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    task, made = data.draw(st.sampled_from([("arc-easy", parquet_bytes(ARC)), ("hellaswag", jsonl(HELLASWAG))]))
    at = data.draw(st.integers(0, len(made) - 1))
    changed = made[:at] + data.draw(st.binary(min_size=1, max_size=3)) + made[at + data.draw(st.integers(0, 3)) :]
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(changed)
    try:
        assert read_items(task, path, BYTES)
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)
