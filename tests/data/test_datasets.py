"""Data sets by name, from small files of the published formats: a server on this machine, copies, llm.c's rules."""

import hashlib
import io
import json
import random
import shutil
import struct
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from server import Files, serving

from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import GPT2_VOCAB
from llmc_jax.data import download, hub, tables, tokenizers
from llmc_jax.data.command import main
from llmc_jax.data.datasets import DATASETS, Dataset, own_name, published_files, remote, sampled
from llmc_jax.data.evalfile import read_eval_file
from llmc_jax.data.tasks import TASKS
from llmc_jax.data.tokenizers import (
    Tokenizer,
    bin_tokenizer,
    bytes_tokenizer,
    load_tokenizer,
    write_tokenizer_bin,
)

ENDINGS = ["sits down.", "flies away.", "sings.", "is a fish."]
QUESTIONS = [
    {"ind": number, "ctx": f"A man walks in and number {number}", "endings": ENDINGS, "label": number % 4}
    for number in range(6)
]


def tokens_of(path: Path) -> list[int]:
    """An independent reader of token files of 16 bits."""
    data = path.read_bytes()
    magic, version, count = struct.unpack("<3i", data[:12])
    assert (magic, version, len(data)) == (20240520, 1, 1024 + 2 * count)
    return np.frombuffer(data[1024:], "<u2").tolist()


def parquet_bytes(rows: dict[str, list[object]]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table(rows), buffer, row_group_size=5)
    return buffer.getvalue()


def hellaswag_parquet() -> bytes:
    return parquet_bytes({
        "ind": [q["ind"] for q in QUESTIONS], "ctx": [q["ctx"] for q in QUESTIONS],
        "endings": [ENDINGS] * len(QUESTIONS), "label": [str(q["label"]) for q in QUESTIONS],
    })  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-login"))
    return tmp_path


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setattr(download, "PAUSES", (0.0,))
    with serving() as files:
        monkeypatch.setenv("HF_ENDPOINT", files.address)
        yield files


def publish(server: Files, monkeypatch: pytest.MonkeyPatch, name: str, contents: list[bytes]) -> Dataset:
    """Put small contents where the first files of a data set are, and their sizes and digests into its row."""
    row = DATASETS[name]
    known = row.files or [
        hub.File(f"{n:03d}_00000.parquet", None, None, f"{row.listed}/{n:03d}_00000.parquet") for n in (0, 1)
    ]
    files = [
        file._replace(size=len(data), sha256=hashlib.sha256(data).hexdigest(), urls=())
        for file, data in zip(known, contents, strict=False)
    ]
    for file, data in zip(files, contents, strict=True):
        server.content[remote(row, file).urls[0].removeprefix(server.address)] = data
    if row.listed:
        listing(server, row, files)
    small = row._replace(files=tuple(files))
    monkeypatch.setitem(DATASETS, name, small)
    return small


# ----- the table -----------------------------------------------------------------------------------------------------


def test_another_sample_is_another_folder() -> None:
    edu = sampled(DATASETS["fineweb-edu"], "100BT")
    assert (edu.folder, edu.listed) == ("edu_fineweb100B", "sample/100BT")
    assert sampled(DATASETS["mmlu"], "100BT") == DATASETS["mmlu"]


@pytest.mark.parametrize("row", DATASETS.values(), ids=DATASETS)
def test_a_row(row: Dataset) -> None:
    assert row.place is None or (len(row.place[1]) == 40 and int(row.place[1], 16))
    assert len({file.name for file in row.files}) == len(row.files)
    assert all(file.sha256 is None or (len(file.sha256) == 64 and int(file.sha256, 16)) for file in row.files)
    assert all(".." not in file.path for file in row.files)
    assert bool(row.recipe) != bool(row.tasks)
    assert all(file.size for file in row.files)
    assert bool(row.files) == (row.listed is None)
    if row.tasks:  # the file is where an evaluation looks for it
        assert [TASKS[task].file for task in row.tasks] == [Path("dev/data") / row.folder / f.name for f in row.files]


def test_names_tell_the_tokenizer(small_bin: Path) -> None:
    gpt2 = replace(bytes_tokenizer(), name="gpt2")
    assert own_name("a_val.bin", gpt2) == "a_val.bin"
    assert own_name("a_val.bin", bytes_tokenizer()) == "a_val_bytes.bin"
    assert own_name("a", bin_tokenizer(small_bin)) == "a_small"


# ----- lists that complete the table ---------------------------------------------------------------------------------


def listing(server: Files, row: Dataset, files: list[hub.File]) -> None:
    entries = [
        {"type": "file", "path": f.path, "size": 130, "oid": "0", "lfs": {"size": f.size, "oid": f.sha256}}
        for f in files
    ]
    assert row.place is not None
    server.listings[f"/api/{row.place[0]}/tree/{row.place[1]}/{row.listed}"] = (entries, None)


def test_the_files_are_those_that_the_server_lists(server: Files) -> None:
    row = DATASETS["fineweb"]
    listing(
        server, row, [hub.File(name, 5, "d" * 64, f"{row.listed}/{name}") for name in ("b.parquet", "a.parquet", "x")]
    )
    assert [(file.name, file.size, file.sha256) for file in published_files(row)] == [
        ("a.parquet", 5, "d" * 64), ("b.parquet", 5, "d" * 64),
    ]  # fmt: skip
    assert [file.name for file in published_files(row, 1)] == ["a.parquet"]


# ----- evaluations ---------------------------------------------------------------------------------------------------


def expected_items(tokenizer: Tokenizer) -> list[tuple[list[int], list[list[int]], int]]:
    return [
        (tokenizer.encode(q["ctx"]).tolist(), [tokenizer.encode(f" {e}").tolist() for e in ENDINGS], q["label"])  # type: ignore[arg-type]
        for q in QUESTIONS
    ]


def items_of(path: Path) -> list[tuple[list[int], list[list[int]], int]]:
    return [(list(i.context), list(map(list, i.completions)), i.label) for i in read_eval_file(path)]


def test_hellaswag_downloaded(
    server: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(server, monkeypatch, "hellaswag", [hellaswag_parquet()])
    for _ in range(2):
        assert main(["hellaswag", "--tokenizer", "bytes"]) == 0
    assert len(server.asked) == 1
    assert items_of(Path("dev/data/hellaswag/hellaswag_val_bytes.bin")) == expected_items(bytes_tokenizer())
    shown = capsys.readouterr()
    assert "6 questions in dev/data/hellaswag/hellaswag_val.parquet" in shown.out
    assert "--tasks hellaswag\n" in shown.out
    assert shown.err == ""


def arc_parquet(word: str) -> bytes:
    choices = {"text": ["one", word, "three"], "label": ["A", "B", "C"]}
    return parquet_bytes({"id": ["x"], "question": ["Which?"], "choices": [choices], "answerKey": ["B"]})


def test_arc_has_two_parts(server: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    contents = [arc_parquet("easy"), arc_parquet("hard")]
    publish(server, monkeypatch, "arc", contents)
    assert main(["arc"]) == 0
    assert "--tasks arc-easy arc-challenge\n" in capsys.readouterr().out
    for name, data in zip(("ARC-Easy-Test.parquet", "ARC-Challenge-Test.parquet"), contents, strict=True):
        assert (Path("dev/data/arc") / name).read_bytes() == data


def test_mmlu_becomes_llmcs_file(server: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"question": ["What?\nSay", "Why?"], "subject": ["a", "b"], "choices": [[*"wxyz"]] * 2, "answer": [2, 0]}
    publish(server, monkeypatch, "mmlu", [parquet_bytes(rows)])
    assert main(["mmlu", "--tokenizer", "bytes"]) == 0
    [first, second] = items_of(Path("dev/data/mmlu/mmlu_test_bytes.bin"))
    assert bytes(first[0]) == b"Question: What?\nSay\n\nAnswer:"
    assert [bytes(choice) for choice in second[1]] == [b" w", b" x", b" y", b" z"]
    assert (first[2], second[2]) == (2, 0)


# ----- corpora -------------------------------------------------------------------------------------------------------


def llmc_fineweb(documents: list[list[int]], size: int) -> list[list[int]]:
    """The shards of llm.c's dev/data/fineweb.py; a rest longer than a shard, which stops it, fills several."""
    shards, current = [], []
    for tokens in documents:
        while len(current) + len(tokens) >= size:
            room = size - len(current)
            shards.append(current + tokens[:room])
            current, tokens = [], tokens[room:]
        current += tokens
    return shards + [current] * bool(current)


TEXTS = ["", "a", "bcd" * 40, "x" * 9, *(f"Page {number} says é. " * (number % 4) for number in range(40))]


def encoded(texts: list[str]) -> list[list[int]]:
    return [[256, *text.encode()] for text in texts]


@pytest.mark.parametrize(("name", "stem"), [("fineweb", "fineweb"), ("fineweb-edu", "edu_fineweb")])
@pytest.mark.parametrize("size", [50, 133, 500])
def test_fineweb_is_cut_as_llmc_cuts_it(
    server: Files, monkeypatch: pytest.MonkeyPatch, name: str, stem: str, size: int
) -> None:
    contents = [parquet_bytes({"text": [*TEXTS[start : start + 20]], "id": [*range(20)]}) for start in (0, 20)]
    folder = Path("dev/data") / publish(server, monkeypatch, name, contents).folder
    assert main([name, "--tokenizer", "bytes", "--shard-size", str(size), "--files", "2"]) == 0
    made = sorted(folder.glob("*.bin"), key=lambda path: path.stem[-6:])
    expected = llmc_fineweb(encoded(TEXTS[:40]), size)
    assert [tokens_of(path) for path in made] == expected
    assert [path.name for path in made] == [
        f"{stem}_bytes_{'train' if index else 'val'}_{index:06d}.bin" for index in range(len(expected))
    ]


def test_what_is_made_is_not_downloaded_for_again(
    server: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(server, monkeypatch, "fineweb", [parquet_bytes({"text": [*TEXTS]})])
    words = ["fineweb", "--tokenizer", "bytes", "--shard-size", "200"]
    assert main(words) == 0
    server.asked.clear()
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert server.asked == []
    assert main([*words, "--force"]) == 0
    assert len(server.asked) == 1  # the list; the file is there already
    assert "Next: " in capsys.readouterr().out


def test_openwebtext_is_split_by_document(server: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Page {number} " * 3 for number in range(4000)]
    publish(server, monkeypatch, "openwebtext", [parquet_bytes({"text": [*texts[at : at + 2000]]}) for at in (0, 2000)])
    assert main(["openwebtext", "--tokenizer", "bytes", "--workers", "1"]) == 0
    folder = Path("dev/data/openwebtext")
    val, train = (tokens_of(folder / f"openwebtext_bytes_{name}.bin") for name in ("val_000000", "train_000001"))
    assert 0 < val.count(256) < 10
    assert sorted(map(bytes, documents(val) + documents(train))) == sorted(map(str.encode, texts))


def documents(tokens: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for token in tokens:
        if token == 256:
            found.append([])
        else:
            found[-1].append(token)
    return found


STORIES = [
    [{"story": f" Story {part}.{number}\n", "source": "x"} for number in range(7)] + [{"story": " "}]
    for part in range(4)
]


def stories_archive(order: list[int]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for part in order:
            for name, data in (
                (f"data{part:02}.json", json.dumps(STORIES[part]).encode()),
                (f"._data{part:02}.json", b"of a Mac"),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def llmc_tinystories(parts: list[list[dict[str, str]]]) -> list[int]:
    """A split of llm.c's dev/data/tinystories.py, its files in the order of their names."""
    tokens = []
    for index, part in enumerate(parts):
        stories = [*part]
        random.Random(1337 + index).shuffle(stories)
        tokens += [token for story in stories for token in (256, *story["story"].strip().encode())]
    return tokens


def test_tinystories_is_llmcs(server: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(server, monkeypatch, "tinystories", [stories_archive([2, 0, 3, 1])])
    folder = Path("dev/data/tinystories")
    assert main(["tinystories", "--tokenizer", "bytes"]) == 0
    assert tokens_of(folder / "TinyStories_bytes_val.bin") == llmc_tinystories(STORIES[:1])
    assert tokens_of(folder / "TinyStories_bytes_train.bin") == llmc_tinystories(STORIES[1:])
    words = ["tinystories", "--tokenizer", "bytes", "--force"]
    assert main([*words, "--shard-size", "400"]) == 0
    assert all(path.stem[-7] == "_" for path in folder.glob("*.bin"))  # those without a number are replaced too
    assert main([*words, "--files", "2", "--shard-size", "40"]) == 0
    shards = [tokens_of(path) for path in sorted(folder.glob("*train*.bin"))]
    assert [token for shard in shards for token in shard] == llmc_tinystories(STORIES[1:2])
    assert {len(shard) for shard in shards[:-1]} == {40}
    assert len(server.asked) == 1
    assert main([*words, "--files", "1"]) == 2  # nothing to train on


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08", stories_archive([0, 1])[:-60]])
def test_an_archive_that_is_damaged(
    server: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    publish(server, monkeypatch, "tinystories", [content])
    assert main(["tinystories", "--tokenizer", "bytes"]) == 2
    assert "cannot be unpacked" in capsys.readouterr().err
    assert list(Path().glob("dev/data/tinystories/*.bin")) == []


@pytest.mark.parametrize("words", [["mmlu"], ["lambada"], ["openwebtext", "--files", "8"], ["fineweb", "--files", "0"]])
def test_one_line_says_what_is_wrong(
    here: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([*words, *(["--tokenizer", "bytes"] if words[0] != "lambada" else [])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("llmc-jax data: ")
    assert not Path("dev").exists()


# ----- tinyshakespeare -----------------------------------------------------------------------------------------------

TEXT = "First Citizen:\nBefore we proceed\n\nAll:\nSpeak\n\n\nHear me.\n"


@pytest.fixture
def plays(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """A server with another text in the place of tinyshakespeare, which is in input.txt too."""
    row = DATASETS["tinyshakespeare"]
    recipe = row.recipe
    assert recipe is not None
    Path("input.txt").write_text(TEXT)
    with serving() as files:
        files.content["/input.txt"] = TEXT.encode()
        digest, urls = hashlib.sha256(TEXT.encode()).hexdigest(), (f"{files.address}/input.txt",)
        file = row.files[0]._replace(size=len(TEXT), sha256=digest, urls=urls)
        recipe = recipe._replace(settings=lambda shard: row.recipe.settings(shard)._replace(val_tokens=20))  # type: ignore[union-attr]
        monkeypatch.setitem(DATASETS, row.name, row._replace(files=(file,), recipe=recipe))
        yield files


def test_sections_and_split(plays: Files, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tinyshakespeare", "--tokenizer", "bytes"]
    assert main(command) == 0
    sections = [b"First Citizen:\nBefore we proceed\n\n", b"All:\nSpeak\n\n", b"\nHear me.\n"]
    tokens = [token for section in sections for token in (256, *section)]
    folder = Path("dev/data/tinyshakespeare")
    assert tokens_of(folder / "tiny_shakespeare_bytes_val.bin") == tokens[:20]
    assert tokens_of(folder / "tiny_shakespeare_bytes_train.bin") == tokens[20:]
    assert len(plays.asked) == 1
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0


def test_the_files_are_llmc_s(shared: Path, here: Path) -> None:
    data = shared / "data"
    Path("downloads").mkdir()
    shutil.copy(data / "tinyshakespeare_input.txt", "downloads/tiny_shakespeare.txt")
    assert main(["tinyshakespeare", "--tokenizer", str(data / "gpt2_tokenizer.bin"), "-o", "."]) == 0
    for name in ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"):
        assert Path(name).read_bytes() == (data / name).read_bytes()
    assert Path("tiny_shakespeare.tokenizer").read_bytes() == (data / "gpt2_tokenizer.bin").read_bytes()


def test_offline_one_command_makes_what_the_preset_reads(
    plays: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of GPT-2's size in any folder, the text in its place, no network and no cache."""
    downloads = Path("dev/data/tinyshakespeare/downloads")
    downloads.mkdir(parents=True)
    Path("input.txt").rename(downloads / "tiny_shakespeare.txt")
    Path("elsewhere").mkdir()
    pieces = tuple(bytes([n]) for n in range(256)) + tuple(b"#%d" % n for n in range(256, GPT2_VOCAB))
    write_tokenizer_bin("elsewhere/gpt2_tokenizer.bin", pieces, GPT2_VOCAB - 1)
    monkeypatch.setattr(tokenizers, "GPT2_PIECES_SHA256", tokenizers._digest(pieces))
    command = ["tinyshakespeare", "--tokenizer", "elsewhere/gpt2_tokenizer.bin"]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("train.py --preset tinyshakespeare")
    config = parse_args(["--preset", "tinyshakespeare"])
    ((_, found),) = tables.of_token_files([Path(config.train_data)])
    assert found.pieces == pieces and found.name == "gpt2"
    assert len(tokens_of(Path(config.train_data))) > 0 and len(tokens_of(Path(config.val_data))) == 20
    assert load_tokenizer(config.tokenizer, GPT2_VOCAB).tokenizer is None  # neither in this folder nor in a cache
    assert plays.asked == []
