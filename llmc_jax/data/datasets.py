"""Data sets by name: what is published where, how it is checked, and what becomes of it: token files, evaluation files.

A new data set is a row of DATASETS. The files lie in `dev/data/NAME/`, where llm.c's scripts leave theirs. Leaves out
the download itself (download.py, hub.py), the reading of evaluations (tasks.py) and of text (prepare.py).

Revisions on Hugging Face are pinned. Sizes and digests are those that several independent projects state; of corpora in
many files, those that the server lists at the pinned revision.
"""

import re
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import refusing
from llmc_jax.data import hub
from llmc_jax.data.documents import BLANK_LINE, Reading
from llmc_jax.data.download import Remote
from llmc_jax.data.hub import File
from llmc_jax.data.prepare import SHARD_TOKENS, Settings
from llmc_jax.data.tokenfile import MAX_TOKENS
from llmc_jax.data.tokenizers import Tokenizer

DOWNLOADS = "downloads"  # of a corpus, in its folder: token files stay by themselves
ARCHIVE = ".tar.gz"
UNPACKED = ".unpacked"  # says so, beside what was in an archive
SAMPLES = ("10BT", "100BT", "350BT")  # of FineWeb

HubPlace = tuple[str, str]  # repository and revision


class Dataset(NamedTuple):
    """A row of the table.

    folder: its own in dev/data. place: on Hugging Face, if it is there. holds: how much is in it, as whoever published
    it, or llm.c, counts. listed: of a corpus in many files, their folder at its place. about: their bytes in all.
    tasks: the evaluations in its files, one each. eval_file: llm.c's file of them. makes: the name of the token files
    that a corpus becomes, settings: how. pattern: of the files in an archive.
    """

    name: str
    title: str
    folder: str
    place: HubPlace | None
    files: tuple[File, ...]
    holds: str
    listed: str | None = None
    about: int | None = None
    tasks: tuple[str, ...] = ()
    eval_file: str | None = None
    makes: str | None = None
    settings: Settings = Settings()
    pattern: str = "*"

    @property
    def page(self) -> str:
        """Return where people read about it."""
        return f"{hub.ENDPOINT}/{self.place[0]}" if self.place else self.files[0].url


def with_shards(settings: Settings, size: int | None) -> Settings:
    """Return settings for so many tokens in each file, None: as they are. A first file that is for validation stays."""
    if size is None:
        return settings
    first = settings.val_tokens == settings.shard_tokens
    return settings._replace(shard_tokens=size, val_tokens=size if first else settings.val_tokens, numbered=True)


# ----- the table -----------------------------------------------------------------------------------------------------

# As llm.c's dev/data/fineweb.py: the first file is for validation
FINEWEB = Settings(Reading("parquet"), val_tokens=SHARD_TOKENS, keep_empty=True)

# fmt: off
_ROWS = (
    Dataset(
        "tinyshakespeare", "tinyshakespeare: 40,000 lines, for a first look", "tinyshakespeare", None,
        (File("tiny_shakespeare.txt", 1115394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
              "input.txt",
              "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"),),
        "338 k tokens",
        makes="tiny_shakespeare",  # as dev/data/tinyshakespeare.py of llm.c: a document is what an empty line ends
        settings=Settings(Reading("text", split_on=BLANK_LINE), MAX_TOKENS, val_tokens=32768, keep_empty=True,
                          numbered=False),
    ),
    Dataset(
        "hellaswag", "HellaSwag: how does it continue? 4 answers", "hellaswag",
        ("datasets/Rowan/hellaswag", "218ec52e09a7e7462a5400043bb9a69a41d06b76"),
        (File("hellaswag_val.parquet", 6315951, "899813071e1e95efafec90f856e1987d2150fa4d020fc005df6962c259f660cd",
              "data/validation-00000-of-00001.parquet"),),
        "10,042 questions",
        tasks=("hellaswag",), eval_file="hellaswag_val.bin",
    ),
    Dataset(
        "mmlu", "MMLU: exams in 57 subjects, 4 answers", "mmlu",
        ("datasets/cais/mmlu", "c30699e8356da336a370243923dbaf21066bb9fe"),
        (File("mmlu_test.parquet", 3504718, "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7",
              "all/test-00000-of-00001.parquet"),),
        "14,042 questions",
        tasks=("mmlu",), eval_file="mmlu_test.bin",
    ),
    Dataset(
        "arc", "ARC: science at school, easy and hard, 3 to 5 answers", "arc",
        ("datasets/allenai/ai2_arc", "210d026faf9955653af8916fad021475a3f00453"),
        (File("ARC-Easy-Test.parquet", 346257, "4160597d618ae851c7eb04e281574f3f654776216ac6b6641588d64527b47177",
              "ARC-Easy/test-00000-of-00001.parquet"),
         File("ARC-Challenge-Test.parquet", 203808, "62f03257e737aed263f55c6abf87c7bb0028a44a6bdd2a26eb1279eb42c1d1e9",
              "ARC-Challenge/test-00000-of-00001.parquet")),
        "2,376 and 1,172 questions",
        tasks=("arc-easy", "arc-challenge"),
    ),
    Dataset(
        "lambada", "LAMBADA: the last word of a passage (OpenAI's form)", "lambada",
        ("datasets/EleutherAI/lambada_openai", "900124bf3b8235c6daf21033af9948b3f07346c4"),
        (File("lambada_test.jsonl", 1819752, "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226",
              "data/lambada_test.jsonl"),),
        "5,153 passages",
        tasks=("lambada",),
    ),
    Dataset(
        "tinystories", "TinyStories: short stories that a small model can learn", "tinystories",
        ("datasets/roneneldan/TinyStories", "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"),
        (File("TinyStories_all_data.tar.gz", 1608001638,
              "26cf7605aca15bc4ea6fa637256400d9d01317b28ed296172b2d1dd160cd7699", "TinyStories_all_data.tar.gz"),),
        "945 M tokens",
        makes="TinyStories", pattern="*.json",  # as tinystories.py, whose files come as workers end; ours by name
        settings=Settings(Reading("json", "story", strip=True, shuffle=1337), MAX_TOKENS, val_files=1, keep_empty=True,
                          numbered=False),
    ),
    Dataset(
        "openwebtext", "OpenWebText: pages that Reddit linked to, like GPT-2's own data", "openwebtext",
        ("datasets/Skylion007/openwebtext", "79d93d786212f7344586290adb811d4ae6a1762c"), (),
        "9.0 G tokens", listed="plain_text", about=24_300_000_000,
        # nanoGPT's share (data/openwebtext/prepare.py); here a hash of a document chooses its side
        makes="openwebtext", settings=Settings(Reading("parquet"), val_fraction=0.0005),
    ),
    Dataset(
        "fineweb", "FineWeb: cleaned web text (--sample 10BT)", "fineweb10B",
        ("datasets/HuggingFaceFW/fineweb", "9bb295ddab0e05d785b879661af7260fed5140fc"), (),
        "10 G tokens", listed="sample/10BT", about=30_600_000_000,
        makes="fineweb", settings=FINEWEB,
    ),
    Dataset(
        "fineweb-edu", "FineWeb-Edu: of that, what teaches (--sample 10BT)", "edu_fineweb10B",
        ("datasets/HuggingFaceFW/fineweb-edu", "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"), (),
        "10 G tokens", listed="sample/10BT", about=28_500_000_000,
        makes="edu_fineweb", settings=FINEWEB,
    ),
)
# fmt: on

DATASETS = {row.name: row for row in _ROWS}


def sampled(dataset: Dataset, sample: str) -> Dataset:
    """Return a row of FineWeb for one of its samples."""
    folder = dataset.folder.replace("10B", sample.removesuffix("T"))
    return dataset._replace(folder=folder, listed=f"sample/{sample}") if dataset.listed == "sample/10BT" else dataset


# ----- downloads -----------------------------------------------------------------------------------------------------


def published_files(dataset: Dataset, count: int | None = None) -> list[File]:
    """Return a data set's files, the first `count` of them: of a corpus in many files, those that the server lists.

    Raises InputError if the list cannot be had.
    """
    if dataset.listed is None:
        return list(dataset.files[:count])
    assert dataset.place is not None
    entries = hub.list_files(*dataset.place, dataset.listed, _advice(dataset))
    files = [entry for entry in entries if entry.path.endswith(".parquet")]
    if not files:
        raise InputError(f"{dataset.name}: {dataset.listed} of {dataset.place[0]} holds no parquet files")
    return files[:count]


def _advice(dataset: Dataset) -> str:
    return f"or bring it here from another machine ({dataset.page})"


def remote(dataset: Dataset, file: File) -> Remote:
    """Return where a file is, and what is known of it."""
    return Remote(
        url=hub.file_url(*dataset.place, file.path) if dataset.place else file.url,
        what=f"{dataset.name}, {file.name}",
        advice=_advice(dataset),
        size=file.size,
        sha256=file.sha256,
        sha1=file.sha1,
        token=hub.token() if dataset.place else None,
    )


def own_name(name: str, tokenizer: Tokenizer) -> str:
    """Return what a file of a tokenizer's ids is called: llm.c's name for GPT-2's, else with the tokenizer's in it."""
    own, dot, ending = name.partition(".")
    of = "" if tokenizer.name == "gpt2" else "_" + re.sub(r"[^A-Za-z0-9_-]+", "_", tokenizer.name.removesuffix(".bin"))
    return own + of + dot + ending


# ----- archives -------------------------------------------------------------------------------------------------------


def unpacked(archive: Path, pattern: str) -> list[Path]:
    """Unpack an archive's files of a pattern into a folder beside it, once; return them, sorted by name.

    A file that is no archive is returned itself. Raises InputError.
    """
    if not archive.name.endswith(ARCHIVE):
        return [archive]
    folder = archive.with_name(archive.name.removesuffix(ARCHIVE))
    done = folder / UNPACKED
    try:
        with refusing(f"{archive}: cannot be unpacked", "free space, or copy it again"):
            if not done.exists():
                with tarfile.open(archive, "r:gz") as tar:
                    tar.extractall(folder, filter="data")
                done.touch()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise FormatError(f"{archive}: cannot be unpacked ({error}); remove it, to download it again") from error
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
