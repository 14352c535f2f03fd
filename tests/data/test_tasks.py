"""The public files of HellaSwag, MMLU, ARC and LAMBADA, small ones made here in their real formats; and wrong files."""

import csv
import hashlib
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.data.evalfile import write_eval_file
from llmc_jax.data.items import Item
from llmc_jax.data.tasks import TASKS, Question, read_items
from llmc_jax.data.tokenizers import bin_tokenizer, bytes_tokenizer

ROOT = Path(__file__).resolve().parents[2]
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

MMLU = {
    "anatomy": [['Which bone?\nChoose, "one".', "1.50", "None", "NA", "", "C"], ["Why?", "a", "b", "c", "d", "A"]],
    "abstract_algebra": [["Is it\r\na field?", "True, True", "False, False", "1e3", " x", "D"]],
}
MMLU_ASKED = [  # sorted by file
    Question(
        "abstract_algebra:0",
        "Question: Is it\r\na field?\n\nAnswer:",
        (" True, True", " False, False", " 1e3", "  x"),
        3,
    ),
    Question("anatomy:0", 'Question: Which bone?\nChoose, "one".\n\nAnswer:', (" 1.50", " None", " NA", " "), 2),
    Question("anatomy:1", "Question: Why?\n\nAnswer:", (" a", " b", " c", " d"), 0),
]

ARC = [
    {
        "id": "Mercury_7175875",
        "question": {
            "stem": "Which is largest?",
            "choices": [
                {"text": "a star", "label": "A"},
                {"text": "a moon", "label": "B"},
                {"text": "a planet", "label": "C"},
            ],
        },
        "answerKey": "A",
    },
    {
        "id": "NYSEDREGENTS_2015_4_8",
        "question": {
            "stem": "What melts?",
            "choices": [
                {"text": text, "label": str(number)} for number, text in enumerate(["ice", "fire", "air", "ash"], 1)
            ],
        },
        "answerKey": "4",
    },
    {
        "id": "MCAS_5",
        "question": {
            "stem": "Which letter?",
            "choices": [{"text": letter.lower(), "label": letter} for letter in "ABCDE"],
        },
        "answerKey": "E",
    },
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


def mmlu_csv(subject: str) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(MMLU[subject])
    return text.getvalue().encode()


def mmlu_files() -> dict[str, bytes]:
    """The tar's files in no order, with others beside those of the test split."""
    split = {f"data/{split}/{name}_{split}.csv": mmlu_csv(name) for split in ("dev", "test", "val") for name in MMLU}
    return split | {"data/README.txt": b"Read", "data/test/._anatomy_test.csv": b"\0\5\x16\7"}


def mmlu_tar(mode: str = "w") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in mmlu_files().items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


def zip_with_a_name(name: bytes) -> bytes:
    """Return a zip with one member of a two-byte name, said to be UTF-8."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("é", jsonl(ARC))
    return data.getvalue().replace("é".encode(), name)


def arc_zip() -> bytes:
    data, folder = io.BytesIO(), "ARC-V1-Feb2018-2"
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{folder}/", b"")
        archive.writestr(f"{folder}/ARC_Corpus.txt", b"much text\n" * 1000)
        for part, rows in (("ARC-Easy", ARC[:2]), ("ARC-Challenge", ARC[2:])):
            archive.writestr(f"{folder}/{part}/{part}-Test.csv", b"questionID,originalQuestionID\n")
            archive.writestr(f"{folder}/{part}/{part}-Test.jsonl", jsonl(rows))
            archive.writestr(f"{folder}/{part}/{part}-Train.jsonl", jsonl(ARC))
            archive.writestr(f"__MACOSX/{folder}/{part}/{part}-Test.jsonl", b"\0\5\x16\7")
            archive.writestr(f"__MACOSX/{folder}/{part}/._{part}-Test.jsonl", b"\0\5\x16\7")
    return data.getvalue()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    data = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), data, row_group_size=2)
    return data.getvalue()


def hellaswag_parquet() -> bytes:
    return parquet([row | {"label": str(row["label"])} for row in HELLASWAG])


def arc_parquet() -> bytes:
    rows = []
    for row in ARC:
        question: Any = row["question"]
        columns = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
        rows.append({"id": row["id"], "question": question["stem"], "choices": columns, "answerKey": row["answerKey"]})
    return parquet(rows)


def mmlu_parquet() -> bytes:
    rows = [(name, *row) for name in sorted(MMLU) for row in MMLU[name]]
    keys = ("question", "subject", "choices", "answer")
    return parquet([dict(zip(keys, (q, name, a, "ABCD".index(key)), strict=True)) for name, q, *a, key in rows])


FILES: dict[str, tuple[str, Callable[[], bytes], list[Question]]] = {
    "hellaswag_val.jsonl": ("hellaswag", lambda: jsonl(HELLASWAG), HELLASWAG_ASKED),
    "unescaped.jsonl": ("hellaswag", lambda: jsonl(HELLASWAG, ensure_ascii=False), HELLASWAG_ASKED),
    "bom.jsonl": ("hellaswag", lambda: b"\xef\xbb\xbf" + jsonl(HELLASWAG).replace(b"\n", b"\r\n\n"), HELLASWAG_ASKED),
    "validation-00000-of-00001.parquet": ("hellaswag", hellaswag_parquet, HELLASWAG_ASKED),
    "data.tar": ("mmlu", mmlu_tar, MMLU_ASKED),
    "data.tar.gz": ("mmlu", lambda: mmlu_tar("w:gz"), MMLU_ASKED),
    "anatomy_test.csv": ("mmlu", lambda: mmlu_csv("anatomy"), MMLU_ASKED[1:]),
    "test-00000-of-00001.parquet": ("mmlu", mmlu_parquet, MMLU_ASKED),
    "ARC-V1-Feb2018.zip": ("arc-easy", arc_zip, ARC_ASKED[:2]),
    "ARC-V1-Feb2018-2.zip": ("arc-challenge", arc_zip, ARC_ASKED[2:]),
    "ARC-Easy-Test.jsonl": ("arc-easy", lambda: jsonl(ARC), ARC_ASKED),
    "ARC-Challenge-Test.parquet": ("arc-challenge", arc_parquet, ARC_ASKED),
    "lambada_test.jsonl": ("lambada", lambda: jsonl(LAMBADA), LAMBADA_ASKED),
    "en.parquet": ("lambada", lambda: parquet(LAMBADA), LAMBADA_ASKED),
}


@pytest.mark.parametrize("name", FILES)
def test_public_files(tmp_path: Path, name: str) -> None:
    task, made, asked = FILES[name]
    (tmp_path / name).write_bytes(made())
    assert list(TASKS[task].read(tmp_path / name)) == asked
    assert os.listdir(tmp_path) == [name]  # nothing is unpacked
    (tmp_path / name).rename(tmp_path / "test.csv" if name.endswith(".csv") else tmp_path / "x")
    questions = list(TASKS[task].read(next(tmp_path.iterdir())))
    assert [question[1:] for question in questions] == [question[1:] for question in asked]  # known by its content


@pytest.mark.parametrize("below", ["", "data", "data/test"])
def test_mmlus_folder(tmp_path: Path, below: str) -> None:
    for name, content in mmlu_files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert list(TASKS["mmlu"].read(tmp_path / below)) == MMLU_ASKED


def test_tasks() -> None:
    assert list(TASKS) == ["hellaswag", "mmlu", "arc-easy", "arc-challenge", "lambada"]
    assert [name for name, task in TASKS.items() if task.name != name] == []
    assert [name for name, task in TASKS.items() if task.greedy] == ["lambada"]
    assert len({task.file for task in TASKS.values()}) == len(TASKS)


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


ASKED: Any = ARC[0]["question"]
WRONG: dict[str, tuple[str, bytes, str]] = {
    "hellaswag as lambada": ("lambada", jsonl(HELLASWAG), ":1: looks like HellaSwag; expected LAMBADA"),
    "lambada as hellaswag": ("hellaswag", jsonl([HELLASWAG[0], *LAMBADA]), ":2: looks like LAMBADA"),
    "arc as mmlu": ("mmlu", jsonl(ARC), ":1: looks like ARC; expected MMLU"),
    "other": ("hellaswag", jsonl([{"a": 1, "b": 2}]), ":1: has the fields a, b; expected HellaSwag"),
    "no fields": ("hellaswag", b"{}", r":1: has the fields \(none\)"),
    "tar as arc": ("arc-easy", mmlu_tar(), ": has no file of this task; it holds data/dev/"),
    "zip as hellaswag": ("hellaswag", arc_zip(), ": has no file of this task; it holds ARC-V1"),
    "empty": ("hellaswag", b"", ": is empty"),
    "text": ("hellaswag", b"Once upon a time", ": is neither"),
    "tokens": ("hellaswag", struct.pack("<256i", 20240520, 1, 0, *[0] * 253), ": is a file of GPT-2 tokens"),
    "bad zip": ("arc-easy", b"PK\3\4" + bytes(600), ": cannot be unpacked"),
    "a zip's name": ("arc-easy", zip_with_a_name(b"\xff\xfe"), ": cannot be unpacked"),
    "cut zip": ("arc-easy", arc_zip()[:-100], ": cannot be unpacked"),
    "cut tar": ("mmlu", mmlu_tar("w:gz")[:-200], ": cannot be unpacked"),
    "bad parquet": ("arc-easy", b"PAR1" + bytes(600) + b"PAR1", ": cannot be read as parquet"),
    "json": ("lambada", b'{"text": "a b"}\n{"text": ', ":2: is not JSON"),
    "list": ("lambada", b'{"text": "a b"}\n[1]\n', ":2: is a JSON list"),
    "latin-1": ("lambada", b'{"text": "a b"}\n{"text": "\xe9"}\n', ": byte 26: 0xe9 is not UTF-8"),
    "no label": ("hellaswag", jsonl([HELLASWAG[0], without(HELLASWAG[1], "label")]), ":2: has no label"),
    "label": ("hellaswag", jsonl([HELLASWAG[0] | {"label": 4}]), ":1: label is '4'; expected one of 0, 1, 2, 3"),
    "empty label": ("hellaswag", jsonl([HELLASWAG[0] | {"label": ""}]), ":1: has no label"),
    "endings": ("hellaswag", jsonl([HELLASWAG[0] | {"endings": "abc"}]), ":1: field 'endings' holds a str"),
    "an ending": ("hellaswag", jsonl([HELLASWAG[0] | {"endings": ["a", 1]}]), ":1: field 'endings' holds a int"),
    "no context": (
        "hellaswag",
        jsonl([HELLASWAG[0] | {"ctx": ""}]),
        ": question 24 has a context or an answer without",
    ),
    "context": ("hellaswag", jsonl([HELLASWAG[0] | {"ctx": None}]), ":1: field 'ctx' holds a NoneType"),
    "no choices": ("arc-easy", jsonl([ARC[0] | {"question": {"stem": "a", "choices": []}}]), ":1: field 'choices'"),
    "no text": (
        "arc-easy",
        jsonl([ARC[0] | {"question": ASKED | {"choices": [{"label": "A"}]}}]),
        ":1: .*'choices.text'",
    ),
    "no answer": ("arc-easy", jsonl([ARC[0] | {"answerKey": "D"}]), ":1: answerKey is 'D'; expected one of A, B, C"),
    "columns": ("arc-easy", jsonl([ARC[0] | {"question": "a", "choices": None}]), ":1: field 'choices.text'"),
    "lengths": (
        "arc-easy",
        jsonl([ARC[0] | {"question": "a", "choices": {"text": ["a"], "label": ["A", "B"]}}]),
        ":1: has 1 choices and 2 labels",
    ),
    "mmlu's answer": ("mmlu", jsonl([{"question": "a", "choices": ["b", "c"], "answer": 2}]), ":1: answer is '2'"),
    "one word": ("lambada", jsonl([{"text": "word"}]), ":1: .* last word"),
    "space at the end": ("lambada", jsonl([{"text": "two words "}]), ":1: .* last word"),
    "csv's columns": ("mmlu", b"a,b,c,d,e,A\na,b,c,d,A\n", ":2: has 5 columns"),
    "csv's letter": ("mmlu", b'"a\nb",b,c,d,e,E\n', ":2: column 5 is 'E'; expected one of A, B, C, D"),
    "csv's field": ("mmlu", b"a" * 140000, ":1: is not csv"),
    "csv as arc": ("arc-easy", b"a,b,c,d,e,A\n", ":1: looks like MMLU's csv"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_files(tmp_path: Path, what: str) -> None:
    task, data, said = WRONG[what]
    path = tmp_path / f"a{'.csv' if 'csv' in what else ''}"
    path.write_bytes(data)
    if "parquet" in what:
        pytest.importorskip("pyarrow")
    with pytest.raises(InputError, match=rf"^{path}{said}") as caught:
        read_items(task, path, BYTES)
    assert "\n" not in str(caught.value)


def test_wrong_places(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="regular"):
        read_items("mmlu", tmp_path / "pipe", BYTES)
    (tmp_path / "pipe").unlink()
    with pytest.raises(InputError, match="it is empty"):
        read_items("mmlu", tmp_path, BYTES)
    with pytest.raises(InputError, match="data arc`"):
        read_items("arc-easy", tmp_path / "missing.jsonl", BYTES)
    (tmp_path / "ARC-Challenge-Test.jsonl").write_bytes(jsonl(ARC))
    with pytest.raises(InputError, match="is ARC-Challenge by its name"):
        read_items("arc-easy", tmp_path / "ARC-Challenge-Test.jsonl", BYTES)


@given(st.data())
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any file gives questions, or one line that names it."""
    task, made = data.draw(st.sampled_from([("arc-easy", arc_zip()), ("mmlu", mmlu_tar("w:gz")), ("mmlu", mmlu_tar())]))
    at = data.draw(st.integers(0, len(made) - 1))
    changed = made[:at] + data.draw(st.binary(min_size=1, max_size=3)) + made[at + data.draw(st.integers(0, 3)) :]
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(changed)
    try:
        assert read_items(task, path, BYTES)
    except InputError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)


def test_a_question_may_begin_with_the_letters_of_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "physiology_test.csv"
    path.write_text("PK stands for,a,b,c,d,B\n")
    [question] = TASKS["mmlu"].read(path)
    assert (question.context, question.label) == ("Question: PK stands for\n\nAnswer:", 1)


def test_a_python_without_lzma_reads_all_other_archives() -> None:
    code = "import sys; sys.modules['_lzma'] = None; from llmc_jax.data.rows import UNREADABLE; print(len(UNREADABLE))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout.strip()
