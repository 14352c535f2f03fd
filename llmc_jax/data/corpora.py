"""The built-in corpus, `stdlib`: the source of Python's standard library (nothing to download); and its baseline.

Leaves out other text (prepare.py, datasets.py) and the reading of token files during a run (loader.py).
"""

import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, refusing, write_bytes
from llmc_jax.data import tables
from llmc_jax.data.tokenfile import open_token_file, write_token_file
from llmc_jax.data.tokenizers import bytes_tokenizer

# Not text to learn a language from (tables, generated files), or not installed everywhere (Tk, IDLE, other packages)
STDLIB_WITHOUT_FOLDERS = frozenset({
    "__pycache__", "dist-packages", "encodings", "idle_test", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "tkinter",
})  # fmt: skip
STDLIB_WITHOUT_FILES = frozenset({"sitecustomize.py", "usercustomize.py"})  # the machine's, not Python's
STDLIB_VAL_ONE_IN = 20
STDLIB_RULES = "1"  # count up when the files chosen, their order or the split change: old caches are then left alone

BIGRAM_PRIOR = 10.0  # tokens that the unigram model is worth; the figures hardly depend on it


class Corpus(NamedTuple):
    """A corpus on disk: two token files and what is known about them.

    fingerprint: of the text, in hexadecimal. bigram_nats: the loss per validation token, in nats, of a model that knows
    how frequent each token is after the token before it (`bigram_baseline`): what a language model has to beat.
    """

    train: Path
    val: Path
    vocab_size: int
    fingerprint: str
    description: str
    train_tokens: int
    val_tokens: int
    bigram_nats: float


# ----- stdlib -------------------------------------------------------------------------------------------------------


def stdlib_corpus() -> Corpus:
    """Return the built-in corpus: the *.py files of the running Python's standard library, in bytes (V=257, eot 256).

    Files in the order of their names, an end-of-text token before each; one file in twenty, chosen by a hash of its
    name, is validation. The two token files (uint16) are kept in the user's cache folder, named with the fingerprint,
    so that the corpora of several Pythons stand beside each other. As long as names, sizes and times of the sources
    stay the same, they are not read again.

    Raises InputError if there are no sources, or the folder cannot be written.
    """
    root, folder = Path(sysconfig.get_paths()["stdlib"]), cache_folder()
    sources = _stdlib_sources(root)
    listing = json.dumps([STDLIB_RULES, sys.version, str(root), sources])
    index = folder / f"stdlib-{hashlib.sha256(listing.encode()).hexdigest()[:16]}.json"
    if (corpus := _read_corpus(index)) is not None:
        return corpus
    train, val, fingerprint = _read_stdlib(root, [name for name, *_ in sources])
    version = sys.version.split()[0]
    description = f"source of the standard library of Python {version}, {len(sources)} files, in bytes"
    advice = "it keeps the built-in corpus; set LLMC_JAX_CACHE to one that can be written"
    with refusing(f"{folder}: cannot be written", advice):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        corpus = _save(folder / f"stdlib-{version}-{fingerprint}", train, val, fingerprint, description)
        plain = corpus._asdict() | {"train": corpus.train.name, "val": corpus.val.name}
        write_bytes(index, (json.dumps(plain, indent=1) + "\n").encode())
    return corpus


def _stdlib_sources(root: Path) -> list[tuple[str, int, int]]:
    """Return the paths of the files within the library, their sizes and times (ns), which tell an edited one."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in STDLIB_WITHOUT_FOLDERS and not n.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and name not in STDLIB_WITHOUT_FILES:
                path = Path(folder, name)
                if path.is_file():  # no link that leads nowhere
                    state = path.stat()
                    found.append((path.relative_to(root).as_posix(), state.st_size, state.st_mtime_ns))
    if not found:
        raise InputError(
            f"the built-in corpus is Python's own source, but {root} holds no .py files; train on token files of your "
            "own (-i, -j), or use a Python that comes with its source"
        )
    return sorted(found)


def _read_corpus(index: Path) -> Corpus | None:
    """Return the corpus that an index file describes, if its token files are there, whole; None otherwise."""
    try:
        found = json.loads(index.read_bytes())
        corpus = Corpus(**{**found, "train": index.parent / found["train"], "val": index.parent / found["val"]})
        with open_token_file(corpus.train) as train, open_token_file(corpus.val) as val:
            counts = train.num_tokens, val.num_tokens
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return corpus if counts == (corpus.train_tokens, corpus.val_tokens) else None


def _read_stdlib(root: Path, names: list[str]) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the tokens for training, those for validation, and the fingerprint of names and contents."""
    tokenizer = bytes_tokenizer()
    digest = hashlib.sha256(STDLIB_RULES.encode())
    train: list[np.ndarray] = []
    val: list[np.ndarray] = []
    for name in names:
        with refusing(f"{root / name}: cannot be read", "the built-in corpus is made of it"):
            data = (root / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        is_validation = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % STDLIB_VAL_ONE_IN == 0
        (val if is_validation else train).append(tokenizer.encode_document(data))
    if not train or not val:
        raise InputError(f"{root} holds only {len(names)} .py files, too few to train on and to validate with")
    return np.concatenate(train), np.concatenate(val), digest.hexdigest()[:12]


def _save(stem: Path, train: np.ndarray, val: np.ndarray, fingerprint: str, description: str) -> Corpus:
    """Write the two token files, and say what they are. Raises OSError and InputError."""
    tokenizer = bytes_tokenizer()
    corpus = Corpus(
        fingerprint=fingerprint,
        description=description,
        train=Path(f"{stem}_train.bin"),
        val=Path(f"{stem}_val.bin"),
        vocab_size=tokenizer.vocab_size,
        train_tokens=train.size,
        val_tokens=val.size,
        bigram_nats=bigram_baseline(train, val, tokenizer.vocab_size),
    )
    tables.write(Path(f"{stem}{tables.BESIDE}"), tokenizer)
    write_token_file(corpus.val, val, tokenizer.kind)
    write_token_file(corpus.train, train, tokenizer.kind)
    return corpus


# ----- baseline -----------------------------------------------------------------------------------------------------


def bigram_baseline(train: np.ndarray, val: np.ndarray, vocab_size: int) -> float:
    """Return nats per token of val, (n,) ids below V, n >= 2, under the pairs that are counted in train, (m,).

    The unigram model q takes each count one higher, and counts as BIGRAM_PRIOR more tokens after each, so that nothing
    has probability 0: p(b|a) = (count(a,b) + prior q(b)) / (count(a) + prior), count(a) = sum_b count(a,b).
    """
    train, val = np.asarray(train, np.int64), np.asarray(val, np.int64)
    counts = np.bincount(train, minlength=vocab_size) + 1.0  # (V,)
    unigram = counts / counts.sum()
    codes, wanted = (ids[:-1] * vocab_size + ids[1:] for ids in (train, val))  # (m-1,), (n-1,)
    pairs = np.bincount(codes, minlength=vocab_size * vocab_size)[wanted]  # (n-1,)
    before = np.bincount(train[:-1], minlength=vocab_size)[val[:-1]]  # (n-1,)
    bigram = (pairs + BIGRAM_PRIOR * unigram[val[1:]]) / (before + BIGRAM_PRIOR)  # (n-1,)
    return float(-np.log(bigram).mean())
