"""Tables as files: what tells one from another, which lie beside token files, which a run's folder keeps."""

from dataclasses import replace
from pathlib import Path

import pytest

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data import tables
from llmc_jax.data.tokenizers import Tokenizer, bytes_tokenizer, file_tokenizer
from tests.own_table import made_tokenizer


def renamed(tokenizer: Tokenizer, first: int, second: int) -> Tokenizer:
    """The tokenizer with the pieces of two ids exchanged."""
    pieces = list(tokenizer.pieces)
    pieces[first], pieces[second] = pieces[second], pieces[first]
    return replace(tokenizer, pieces=tuple(pieces))


def test_a_table_is_told_by_its_contents_alone() -> None:
    own = made_tokenizer(326)
    assert tables.named(own) == tables.named(replace(own, spec="elsewhere"))
    assert tables.named(own).ids == 326
    others = (renamed(own, 3, 5), replace(own, eot=3), replace(own, json="{}"), bytes_tokenizer())
    assert len({tables.named(each).sha256 for each in (own, *others)}) == 5


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("mine_train_000001.bin", "mine.tokenizer"), ("mine_val_000000.bin", "mine.tokenizer"),
        ("a_train_b_val.bin", "a_train_b.tokenizer"), ("a.b_train.bin", "a.b.tokenizer"), ("train.bin", None),
        ("_train.bin", None), ("mine_train_1.bin", None), ("mine_test_000001.bin", None), ("mine_train_000001", None),
    ],
)  # fmt: skip
def test_which_table_belongs_to_a_token_file(tmp_path: Path, name: str, beside: str | None) -> None:
    for other in ("mine.tokenizer", "a_train_b.tokenizer", "a.b.tokenizer", ".tokenizer", "train.tokenizer"):
        tables.write(tmp_path / other, made_tokenizer(326))
    found = tables.of_token_files([tmp_path / name, tmp_path / name])
    assert [path for path, _ in found] == ([] if beside is None else [tmp_path / beside])


def test_a_table_that_is_damaged_is_no_absence() -> None:
    Path("mine.tokenizer").write_bytes(tables.contents(made_tokenizer(326))[1][:-1])
    with pytest.raises(FormatError, match=r"mine\.tokenizer: truncated"):
        tables.of_token_files([Path("mine_train.bin")])


def test_a_run_keeps_its_table_and_moves_another_aside(tmp_path: Path) -> None:
    """For the states of before name that one."""
    assert tables.of_run(tmp_path) == []
    tables.keep(tmp_path, None)
    assert list(Path().iterdir()) == []
    first, second = made_tokenizer(326), made_tokenizer(300)
    Path("tokenizer_config.json").write_text("{}")  # is no table
    tables.keep(tmp_path, first)
    before = Path("tokenizer.bin").stat().st_ino
    tables.keep(tmp_path, first)  # is there already
    assert Path("tokenizer.bin").stat().st_ino == before
    tables.keep(tmp_path, second)
    aside = f"tokenizer-{tables.named(first).sha256[:12]}.bin"
    assert [path.name for path in tables.of_run(tmp_path)] == ["tokenizer.bin", aside]
    assert [file_tokenizer(path).pieces for path in tables.of_run(tmp_path)] == [second.pieces, first.pieces]
    tables.keep(tmp_path, first)  # back again
    assert file_tokenizer("tokenizer.bin").pieces == first.pieces
    tables.keep(tmp_path, replace(first, json="{}"))
    first_one, *others = tables.of_run(tmp_path)
    assert first_one.name == "tokenizer.json" and len(others) == 2


def test_the_table_of_a_link_to_a_token_file() -> None:
    Path("data").mkdir()
    tables.write(Path("data/mine.tokenizer"), made_tokenizer(326))
    Path("data/mine_train.bin").touch()
    Path("train.bin").symlink_to("data/mine_train.bin")
    ((path, _),) = tables.of_token_files([Path("train.bin")])
    assert path.name == "mine.tokenizer"


def test_which_tables_agree() -> None:
    """On all ids that both have; the end of text may be called otherwise."""
    own = made_tokenizer(326)
    ended = replace(own, pieces=(*own.pieces[:-1], b"</s>"))
    more = replace(own, pieces=(*own.pieces, b"<|pad|>"))
    for other in (own, ended, more):
        tables.check_alike("a", own, "b", other)
    for other in (renamed(own, 3, 5), bytes_tokenizer(), replace(ended, eot=7), replace(own, eot=7)):
        with pytest.raises(InputError, match="a and b are two tokenizers"):
            tables.check_alike("a", own, "b", other)


@pytest.mark.parametrize("size", [257, 326, 50257])
def test_the_file_is_the_tokenizer(size: int) -> None:
    own = made_tokenizer(size)
    tables.write(Path("x.tokenizer"), own)
    found = file_tokenizer(Path("x.tokenizer"))
    assert (found.pieces, found.eot, found.vocab_size) == (own.pieces, own.eot, size)
    assert found.encode("the cat").tolist() == own.encode("the cat").tolist()
    assert found.name == "x.tokenizer"  # of 50,257 pieces it is not GPT-2's, nor of 257 the bytes
    tables.write(Path("bytes.tokenizer"), bytes_tokenizer())
    assert file_tokenizer("bytes.tokenizer").encode(b"\xff").tolist() == [255]
