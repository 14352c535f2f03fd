"""The built-in corpus from a small library made here, the baseline against plain loops."""

import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import cache_folder
from llmc_jax.data import corpora
from llmc_jax.data.corpora import bigram_baseline, stdlib_corpus
from llmc_jax.data.tokenfile import open_token_file

LEFT_OUT = [
    "test/test_a.py", "json/tests/x.py", "idlelib/a.py", "idlelib/idle_test/b.py", "encodings/utf_8.py",
    "pydoc_data/topics.py", "tkinter/__init__.py", "lib2to3/main.py", "site-packages/pip/a.py", "dist-packages/b.py",
    "_sysconfigdata__linux_.py", "__pycache__/os.py", "config-3.12-x86_64-linux-gnu/python-config.py",
    "sitecustomize.py", "LICENSE.txt", "os.pyc",
]  # fmt: skip


@pytest.fixture()
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A standard library of 60 small files and some that must be left out; what belongs in, by name."""
    root = Path("lib")
    inside = {f"{folder}m{number}.py": f"# {folder}{number}\nx = {number} ** 2\n".encode() for number in range(20)
              for folder in ("", "json/", "email/mime/")}  # fmt: skip
    for name, data in {**inside, **dict.fromkeys(LEFT_OUT, b"\xff left out")}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "broken_link.py").symlink_to(Path("nowhere"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    return inside


def expected_tokens(files: dict[str, bytes], validation: bool) -> list[int]:
    tokens: list[int] = []
    for name in sorted(files):
        chosen = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 20 == 0
        if chosen == validation:
            tokens += [256, *files[name]]
    return tokens


def test_the_corpus_is_the_files_in_order(library: dict[str, bytes]) -> None:
    corpus = stdlib_corpus()
    train, val = open_token_file(corpus.train), open_token_file(corpus.val)
    assert train.kind == val.kind == "gpt2-uint16"
    assert train.read().tolist() == expected_tokens(library, validation=False)
    assert val.read().tolist() == expected_tokens(library, validation=True)
    assert (corpus.vocab_size, corpus.train.parent) == (257, cache_folder())
    assert corpus.fingerprint in corpus.train.name
    made = corpus.train.stat().st_mtime_ns
    assert stdlib_corpus() == corpus and corpus.train.stat().st_mtime_ns == made  # the files are not written again
    assert corpus.bigram_nats == bigram_baseline(train.read(), val.read(), 257)


def test_other_sources_make_another_corpus_beside_the_first(library: dict[str, bytes]) -> None:
    first = stdlib_corpus()
    before = first.train.read_bytes()
    Path("lib/m0.py").write_bytes(b"changed")
    second = stdlib_corpus()
    assert second.fingerprint != first.fingerprint
    assert first.train.read_bytes() == before
    Path("lib/m0.py").write_bytes(library["m0.py"])
    assert stdlib_corpus().fingerprint == first.fingerprint


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_cache_is_made_again(library: dict[str, bytes], damage: str) -> None:
    corpus = stdlib_corpus()
    good = corpus.val.read_bytes()
    if damage == "truncated":
        corpus.val.write_bytes(good[:-2])
    else:
        corpus.val.unlink()
    assert stdlib_corpus() == corpus
    assert corpus.val.read_bytes() == good


def test_a_cache_that_cannot_be_written(library: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("in the way")
    monkeypatch.setenv("LLMC_JAX_CACHE", "file")
    with pytest.raises(InputError, match="set LLMC_JAX_CACHE to one that can be written"):
        stdlib_corpus()


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": "python312.zip"})
    with pytest.raises(InputError, match=r"holds no \.py files"):
        stdlib_corpus()
    Path("a.py").write_text("x")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(InputError, match="too few"):
        stdlib_corpus()


def test_two_processes_at_once_make_the_real_corpus() -> None:
    code = "from llmc_jax.data.corpora import stdlib_corpus as s; c = s(); print(c.fingerprint, c.train, c.val)"
    environment = {**os.environ, "PYTHONPATH": str(Path(corpora.__file__).parents[2])}
    command = [sys.executable, "-c", code]
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate()[0] for run in runs]
    corpus = stdlib_corpus()
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs == [f"{corpus.fingerprint} {corpus.train} {corpus.val}\n"] * 2
    assert len(list(cache_folder().iterdir())) == 3  # token files and their table, nothing half-written
    train, val = open_token_file(corpus.train).read(), open_token_file(corpus.val).read()
    assert train.size > 5_000_000 and 0.02 < val.size / train.size < 0.12
    assert 2.0 < corpus.bigram_nats < 2.8  # text like any Python source
    assert b"import os" in train[:1_000_000].astype(np.uint8).tobytes()


@given(st.data())
@settings(deadline=None)
def test_entropies(data: st.DataObject) -> None:
    """The same figure by loops over a dictionary."""
    vocab = data.draw(st.integers(1, 7))
    tokens = st.lists(st.integers(0, vocab - 1), min_size=2, max_size=50)
    train, val = data.draw(tokens), data.draw(tokens)
    single, pair, before = Counter(train), Counter(itertools.pairwise(train)), Counter(train[:-1])
    q = [(single[token] + 1) / (len(train) + vocab) for token in range(vocab)]
    following = list(itertools.pairwise(val))
    expected = -sum(math.log((pair[a, b] + 10 * q[b]) / (before[a] + 10)) for a, b in following) / len(following)
    arrays = np.array(train, np.uint16), np.array(val, np.uint16)
    np.testing.assert_allclose(bigram_baseline(*arrays, vocab), expected, rtol=1e-12, atol=1e-12)


def test_cache_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_JAX_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("LLMC_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/llmc-jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == Path("/c/.cache/llmc-jax")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_folder() == Path("/c/Library/Caches/llmc-jax")
