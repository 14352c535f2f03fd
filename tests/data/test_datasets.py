"""Data sets by name, from small files of the published formats: a server on this machine, copies, llm.c's rules."""

import hashlib
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import GPT2_VOCAB
from llmc_jax.data import hub, tables, tokenizers
from llmc_jax.data.command import main
from llmc_jax.data.datasets import DATASETS, Dataset, own_name, remote, sampled
from llmc_jax.data.evalfile import read_eval_file
from llmc_jax.data.tasks import TASKS
from llmc_jax.data.tokenizers import bin_tokenizer, bytes_tokenizer, load_tokenizer, write_tokenizer_bin
from tests.data.files import parquet_bytes, tokens_of
from tests.data.server import Files

ENDINGS = ["sits down.", "flies away.", "sings.", "is a fish."]


Publish = Callable[[str, list[bytes]], Dataset]


@pytest.fixture
def publish(server: Files, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Puts small contents where the first files of a data set are, and their sizes and digests into its row."""

    def put(name: str, contents: list[bytes]) -> Dataset:
        row = DATASETS[name]
        names = ["000_00000.parquet", "001_00000.parquet", "002_00000.parquet"]
        known = row.files or [hub.File(name, None, None, f"{row.listed}/{name}") for name in names]
        files = []
        for file, data in zip(known, contents, strict=False):
            file = file._replace(size=len(data), sha256=hashlib.sha256(data).hexdigest(), url="")
            server.content[remote(row, file).url.removeprefix(server.address)] = data
            files.append(file)
        if row.listed and row.place:
            other = {"type": "file", "path": f"{row.listed}/.gitattributes", "size": 5, "oid": "0"}
            listed = [
                {"type": "file", "path": f.path, "size": 130, "oid": "0", "lfs": {"size": f.size, "oid": f.sha256}}
                for f in reversed(files)
            ]
            server.listings[f"/api/{row.place[0]}/tree/{row.place[1]}/{row.listed}"] = ([*listed, other], None)
        monkeypatch.setitem(DATASETS, name, row._replace(files=tuple(files)))
        return DATASETS[name]

    return put


def test_another_sample_is_another_folder() -> None:
    edu = sampled(DATASETS["fineweb-edu"], "100BT")
    assert (edu.folder, edu.listed) == ("edu_fineweb100B", "sample/100BT")
    assert sampled(DATASETS["mmlu"], "100BT") == DATASETS["mmlu"]


@pytest.mark.parametrize("row", DATASETS.values(), ids=DATASETS)
def test_a_row(row: Dataset) -> None:
    assert row.place is None or (len(row.place[1]) == 40 and int(row.place[1], 16))
    assert len({file.name for file in row.files}) == len(row.files)
    assert all(file.sha256 is None or (len(file.sha256) == 64 and int(file.sha256, 16)) for file in row.files)
    assert all(file.size and ".." not in file.path for file in row.files)
    assert bool(row.makes) != bool(row.tasks)
    assert bool(row.files) == (row.listed is None)
    if row.tasks:  # the file is where an evaluation looks for it
        assert [TASKS[task].file for task in row.tasks] == [Path("dev/data") / row.folder / f.name for f in row.files]


def test_names_tell_the_tokenizer(small_bin: Path) -> None:
    gpt2 = replace(bytes_tokenizer(), name="gpt2")
    assert own_name("a_val.bin", gpt2) == "a_val.bin"
    assert own_name("a_val.bin", bytes_tokenizer()) == "a_val_bytes.bin"
    assert own_name("a", bin_tokenizer(small_bin)) == "a_small"


def items_of(path: Path) -> list[tuple[list[int], list[list[int]], int]]:
    return [(list(i.context), list(map(list, i.completions)), i.label) for i in read_eval_file(path)]


def test_hellaswag_downloaded(server: Files, publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"A man walks in and number {n}" for n in range(6)]
    rows = [{"ind": n, "ctx": text, "endings": ENDINGS, "label": f"{n % 4}"} for n, text in enumerate(texts)]
    publish("hellaswag", [parquet_bytes(rows)])
    for _ in range(2):
        assert main(["hellaswag", "--tokenizer", "bytes"]) == 0
    assert len(server.asked) == 1
    assert items_of(Path("dev/data/hellaswag/hellaswag_val_bytes.bin")) == [
        ([*text.encode()], [[*f" {end}".encode()] for end in ENDINGS], n % 4) for n, text in enumerate(texts)
    ]
    shown = capsys.readouterr()
    assert "6 questions in dev/data/hellaswag/hellaswag_val.parquet" in shown.out
    assert "--tasks hellaswag\n" in shown.out
    assert shown.err == ""


def test_arc_has_two_parts(publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    choices = [{"text": ["one", word, "three"], "label": ["A", "B", "C"]} for word in ("easy", "hard")]
    rows = [{"id": "x", "question": "Which?", "choices": each, "answerKey": "B"} for each in choices]
    contents = [parquet_bytes([row]) for row in rows]
    publish("arc", contents)
    assert main(["arc"]) == 0
    assert "--tasks arc-easy arc-challenge\n" in capsys.readouterr().out
    for name, data in zip(("ARC-Easy-Test.parquet", "ARC-Challenge-Test.parquet"), contents, strict=True):
        assert (Path("dev/data/arc") / name).read_bytes() == data


def test_mmlu_becomes_llmcs_file(publish: Publish) -> None:
    rows = {"question": ["What?\nSay", "Why?"], "subject": ["a", "b"], "choices": [[*"wxyz"]] * 2, "answer": [2, 0]}
    publish("mmlu", [parquet_bytes(rows)])
    assert main(["mmlu", "--tokenizer", "bytes"]) == 0
    [first, second] = items_of(Path("dev/data/mmlu/mmlu_test_bytes.bin"))
    assert bytes(first[0]) == b"Question: What?\nSay\n\nAnswer:"
    assert [bytes(choice) for choice in second[1]] == [b" w", b" x", b" y", b" z"]
    assert (first[2], second[2]) == (2, 0)


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


@pytest.mark.parametrize(("name", "stem"), [("fineweb", "fineweb"), ("fineweb-edu", "edu_fineweb")])
@pytest.mark.parametrize("size", [50, 133, 500])
def test_fineweb_is_cut_as_llmc_cuts_it(server: Files, publish: Publish, name: str, stem: str, size: int) -> None:
    contents = [parquet_bytes({"text": [*TEXTS[start : start + 20]]}) for start in (0, 20, 40)]
    folder = Path("dev/data") / publish(name, contents).folder
    assert main([name, "--tokenizer", "bytes", "--shard-size", str(size), "--files", "2"]) == 0
    made = sorted(folder.glob("*.bin"), key=lambda path: path.stem[-6:])
    expected = llmc_fineweb([[256, *text.encode()] for text in TEXTS[:40]], size)
    assert [tokens_of(path) for path in made] == expected
    names = [f"{stem}_bytes_{'train' if index else 'val'}_{index:06d}.bin" for index in range(len(expected))]
    assert [path.name for path in made] == names
    assert len(server.asked) == 3  # the list, and two of the files


def test_what_is_made_is_not_downloaded_for_again(
    server: Files, publish: Publish, capsys: pytest.CaptureFixture[str]
) -> None:
    publish("fineweb", [parquet_bytes({"text": [*TEXTS]})])
    words = ["fineweb", "--tokenizer", "bytes", "--shard-size", "200"]
    assert main(words) == 0
    server.asked.clear()
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err and server.asked == []
    assert main([*words, "--force"]) == 0
    assert len(server.asked) == 1  # the list; the file is there already
    assert "Next: " in capsys.readouterr().out


def test_openwebtext_is_split_by_document(publish: Publish) -> None:
    texts = [f"Page {number} " * 3 for number in range(4000)]
    publish("openwebtext", [parquet_bytes({"text": [*texts[at : at + 2000]]}) for at in (0, 2000)])
    assert main(["openwebtext", "--tokenizer", "bytes", "--workers", "1"]) == 0
    folder = Path("dev/data/openwebtext")
    val, train = (tokens_of(folder / f"openwebtext_bytes_{name}.bin") for name in ("val_000000", "train_000001"))
    assert 0 < val.count(256) < 10
    documents = "".join(map(chr, val + train)).split(chr(256))[1:]
    assert sorted(documents) == sorted(texts)


STORIES = [
    [{"story": f" Story {part}.{number}\n", "source": "x"} for number in range(7)] + [{"story": " "}]
    for part in range(4)
]


def stories_archive(order: list[int]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for part in order:
            stories = json.dumps(STORIES[part]).encode()
            for name, data in ((f"data{part:02}.json", stories), (f"._data{part:02}.json", b"of a Mac")):
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


def test_tinystories_is_llmcs(server: Files, publish: Publish) -> None:
    publish("tinystories", [stories_archive([2, 0, 3, 1])])
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
def test_an_archive_that_is_damaged(publish: Publish, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    publish("tinystories", [content])
    assert main(["tinystories", "--tokenizer", "bytes"]) == 2
    assert "cannot be unpacked" in capsys.readouterr().err
    assert list(Path().glob("dev/data/tinystories/*.bin")) == []


@pytest.mark.parametrize("words", [["mmlu"], ["lambada"], ["openwebtext", "--files", "8"], ["fineweb", "--files", "0"]])
def test_one_line_says_what_is_wrong(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([*words, *(["--tokenizer", "bytes"] if words[0] != "lambada" else [])]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("llmc-jax data: ")
    assert not Path("dev").exists()


TEXT = "First Citizen:\nBefore we proceed\n\nAll:\nSpeak\n\n\nHear me.\n"


@pytest.fixture
def plays(server: Files, monkeypatch: pytest.MonkeyPatch) -> Files:
    """A server with another text in the place of tinyshakespeare, which is in input.txt too."""
    row = DATASETS["tinyshakespeare"]
    Path("input.txt").write_text(TEXT)
    server.content["/input.txt"] = TEXT.encode()
    digest, url = hashlib.sha256(TEXT.encode()).hexdigest(), f"{server.address}/input.txt"
    file = row.files[0]._replace(size=len(TEXT), sha256=digest, url=url)
    short = row.settings._replace(val_tokens=20)
    monkeypatch.setitem(DATASETS, row.name, row._replace(files=(file,), settings=short))
    return server


def test_sections_and_split(plays: Files) -> None:
    assert main(["tinyshakespeare", "--tokenizer", "bytes"]) == 0
    sections = [b"First Citizen:\nBefore we proceed\n\n", b"All:\nSpeak\n\n", b"\nHear me.\n"]
    tokens = [token for section in sections for token in (256, *section)]
    folder = Path("dev/data/tinyshakespeare")
    assert tokens_of(folder / "tiny_shakespeare_bytes_val.bin") == tokens[:20]
    assert tokens_of(folder / "tiny_shakespeare_bytes_train.bin") == tokens[20:]
    assert len(plays.asked) == 1


def test_the_files_are_llmc_s(shared: Path) -> None:
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
    assert main(["tinyshakespeare", "--tokenizer", "elsewhere/gpt2_tokenizer.bin"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("train.py --preset tinyshakespeare")
    config = parse_args(["--preset", "tinyshakespeare"])
    ((_, found),) = tables.of_token_files([Path(config.train_data)])
    assert found.pieces == pieces and found.name == "gpt2"
    assert len(tokens_of(Path(config.train_data))) > 0 and len(tokens_of(Path(config.val_data))) == 20
    assert load_tokenizer(config.tokenizer, GPT2_VOCAB).tokenizer is None  # neither in this folder nor in a cache
    assert plays.asked == []
