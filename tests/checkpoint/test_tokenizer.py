"""Which tokenizer a checkpoint belongs to. What a whole run makes of it is in tests/run/test_tokenizer.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint.contents import Metadata
from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.checkpoint.tokenizer import choose_tokenizer, own_tokenizer
from llmc_jax.config.model import parse_descriptor
from llmc_jax.data import tables, tokenizers
from llmc_jax.data.tables import Named
from llmc_jax.data.tokenizers import bytes_tokenizer, usual_eot
from tests.own_table import V, made_tokenizer, write_own


def source(kind: str, path: Path, vocab_size: int = V, **metadata: Any) -> Source:
    facts = {"tokenizer": None, "options": {}} | metadata
    opened = SimpleNamespace(metadata=SimpleNamespace(**facts))
    return open_source(f"L1-NH1-C8-V{vocab_size}-T32")._replace(kind=kind, path=path, opened=opened)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without any table, and no caches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("LLMC_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("kind", ["nanogpt", "llmc-model", "llmc-state", "state", "hugging-face"])
@pytest.mark.parametrize("vocab_size", [V, 50304])
def test_gpt2s_table_is_taken_where_none_was_brought_along(here: Path, kind: str, vocab_size: int) -> None:
    """As V suggests, and said with both numbers where the vocabulary is padded. A file here makes up for GPT-2's."""
    (here / "run").mkdir()
    model = source(kind, here / "run" / "model", vocab_size)
    assert own_tokenizer(model) is None
    assert choose_tokenizer(model, "auto").tokenizer is None
    write_own(here / "gpt2_tokenizer.bin")
    found = choose_tokenizer(model, "auto")
    assert found.tokenizer is not None and found.named is None
    assert found.tokenizer.vocab_size == V and ("V=50304" in found.note) == (vocab_size == 50304)
    assert usual_eot(vocab_size) == V - 1
    (here / "run" / "gpt2_tokenizer.bin").write_bytes(tables.contents(made_tokenizer())[1])
    assert choose_tokenizer(model, "auto").note.startswith(str(here / "run"))  # before the one in the current folder


@pytest.mark.parametrize("kind", ["nanogpt", "llmc-model", "llmc-state"])
def test_other_programs_models_in_a_runs_folder_have_its_table(here: Path, kind: str) -> None:
    tables.keep(here, made_tokenizer(326))
    model = source(kind, here / "model_00000002.bin", 512)
    assert choose_tokenizer(model, "auto").tokenizer is None  # any folder may hold a file of this name
    (here / "config.json").write_text("{}")
    found = choose_tokenizer(model, "auto")
    assert found.named and found.tokenizer is not None and found.tokenizer.vocab_size == 326
    refused = choose_tokenizer(source(kind, here / "model_00000002.bin", 300), "auto")
    assert refused.tokenizer is None and refused.named and "326" in refused.note and "300" in refused.note
    assert choose_tokenizer(source("random", Path("d12")), "auto").tokenizer is None


def test_public_tables_are_found_elsewhere_but_never_by_the_network(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpt2(*, allow_network: bool = True) -> Any:
        assert not allow_network
        raise InputError("not in the cache")

    monkeypatch.setattr(tokenizers, "gpt2_tokenizer", gpt2)
    state = here / "run" / "state_00000002"
    named = tables.named(bytes_tokenizer())
    found = own_tokenizer(source("state", state, 257, tokenizer=named))
    assert found is not None and found.tokenizer == bytes_tokenizer()
    for wanted in (Named("gpt2", V, named.sha256), Named("mine", 257, named.sha256), Named("hf", 257, "")):
        missing = own_tokenizer(source("state", state, tokenizer=wanted))
        assert missing is not None and missing.named == wanted and missing.tokenizer is None
        assert wanted.name in missing.note and str(wanted.ids) in missing.note


def test_a_state_names_its_table_and_an_older_one_does_not() -> None:
    stored = {"step": 1, "dtype": "fp32", "model": vars(parse_descriptor("L1-NH1-C8-V9-T8"))}
    assert Metadata.from_json(stored, Path("x")).tokenizer is None
    named = {"name": "a", "ids": 3, "sha256": "0"}
    again = Metadata.from_json(stored | {"tokenizer": named}, Path("x"))
    assert again.tokenizer == Named("a", 3, "0") and again.to_json()["tokenizer"] == named
