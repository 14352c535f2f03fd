"""The built-in corpus, `stdlib`: the source of Python's standard library (nothing to download); and its baseline.

Leaves out other text (prepare.py, datasets.py) and the reading of token files during a run (loader.py).
"""

import functools
import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder, refusing
from llmc_jax.data import tables
from llmc_jax.data.tokenfile import open_token_file, write_token_file
from llmc_jax.data.tokenizers import Tokenizer, bytes_tokenizer

# Not text to learn a language from (tables, generated files), or not installed everywhere (Tk, IDLE, other packages)
STDLIB_WITHOUT_FOLDERS = frozenset({
    "__pycache__", "dist-packages", "encodings", "idle_test", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "tkinter",
})  # fmt: skip
STDLIB_WITHOUT_FILES = frozenset({"sitecustomize.py", "usercustomize.py"})  # the machine's, not Python's
STDLIB_VAL_ONE_IN = 20
STDLIB_RULES = "1"  # count up when the files chosen, their order or the split change: old files are then left alone

BIGRAM_PRIOR = 10.0  # tokens that the unigram model is worth; the figures hardly depend on it


class Corpus(NamedTuple):
    """A corpus on disk: two token files and what is known about them. fingerprint: of the text, in hexadecimal."""

    train: Path
    val: Path
    vocab_size: int
    fingerprint: str
    description: str

    @property
    def bigram_nats(self) -> float:
        """Return the loss per validation token, in nats, of a model that knows how frequent each token is after the
        token before it (`bigram_baseline`): what a language model has to beat.
        """
        return _baseline_of(self)


# ----- stdlib -------------------------------------------------------------------------------------------------------


def stdlib_corpus() -> Corpus:
    """Return the built-in corpus: the *.py files of the running Python's standard library, in bytes (V=257, eot 256).

    Files in the order of their names, an end-of-text token before each; one file in twenty, chosen by a hash of its
    name, is validation. The two token files (uint16) are kept in the user's cache folder, named with the fingerprint,
    so that the corpora of several Pythons stand beside each other.

    Raises InputError if there are no sources, or the folder cannot be written.
    """
    root, folder, tokenizer = Path(sysconfig.get_paths()["stdlib"]), cache_folder(), bytes_tokenizer()
    names = _stdlib_sources(root)
    train, val, fingerprint = _read_stdlib(root, names, tokenizer)
    version = sys.version.split()[0]
    stem = folder / f"stdlib-{version}-{fingerprint}"
    description = f"source of the standard library of Python {version}, {len(names)} files, in bytes"
    paths = Path(f"{stem}_train.bin"), Path(f"{stem}_val.bin")
    advice = "it keeps the built-in corpus; set LLMC_JAX_CACHE to one that can be written"
    with refusing(f"{folder}: cannot be written", advice):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (table := Path(f"{stem}{tables.BESIDE}")).exists():
            tables.write(table, tokenizer)
        for path, tokens in zip(paths, (train, val), strict=True):
            if not _is_whole(path, len(tokens)):
                write_token_file(path, tokens, tokenizer.kind)
    return Corpus(*paths, tokenizer.vocab_size, fingerprint, description)


def _stdlib_sources(root: Path) -> list[str]:
    """Return the paths of the files within the library, in their order."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in STDLIB_WITHOUT_FOLDERS and not n.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata") and name not in STDLIB_WITHOUT_FILES:
                path = Path(folder, name)
                if path.is_file():  # no link that leads nowhere
                    found.append(path.relative_to(root).as_posix())
    if not found:
        raise InputError(
            f"the built-in corpus is Python's own source, but {root} holds no .py files; train on token files of your "
            "own (-i, -j), or use a Python that comes with its source"
        )
    return sorted(found)


def _read_stdlib(root: Path, names: list[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the tokens for training, those for validation, and the fingerprint of names and contents."""
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


def _is_whole(path: Path, tokens: int) -> bool:
    """Return whether a token file is there with so many tokens."""
    try:
        with open_token_file(path) as file:
            return file.num_tokens == tokens
    except InputError:
        return False


# ----- baseline -----------------------------------------------------------------------------------------------------


@functools.cache
def _baseline_of(corpus: Corpus) -> float:
    with open_token_file(corpus.train) as train, open_token_file(corpus.val) as val:
        return bigram_baseline(train.read(), val.read(), corpus.vocab_size)


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
