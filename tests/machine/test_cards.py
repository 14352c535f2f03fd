"""Cards by any of their names, the agreement of the tables, and files that describe a card."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.machine.cards import CARDS, GIB, card_of, named, short_name
from llmc_jax.machine.gpus import GPUS, MIB, TARGETS, machine_of


@pytest.fixture(autouse=True)
def _tables_as_before() -> Iterator[None]:
    """Take what a file has added out of the tables again."""
    tables: list[dict[str, Any]] = [GPUS, TARGETS, CARDS]
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


def own(folder: Path, text: str) -> str:
    path = folder / "card.toml"
    path.write_text(text)
    return str(path)


# ----- the tables -----------------------------------------------------------------------------------------------------


def test_every_card_stands_in_every_table() -> None:
    """CUDA finds at most what is sold, and not much less; those whose chips are alike differ in the right place."""
    assert {target.device_kind for target in TARGETS.values()} == set(CARDS)
    for kind, card in CARDS.items():
        assert 0.9 < card.memory / (GPUS[kind].memory * GIB) < 1.01, kind
        assert machine_of(kind).target is not None
        assert card.node > 1 and 30e9 < card.link < 1e12, kind


def test_pcie_cards_are_slower_than_those_on_boards() -> None:
    for board, pcie in (("h100", "h100-pcie"), ("a100", "a100-pcie")):
        fast, slow = card_of(named(board)), card_of(named(pcie))
        assert fast.link > 5 * slow.link and fast.memory == slow.memory
    assert card_of(named("a100")).memory > 2 * card_of(named("a100-40")).memory


# ----- names ----------------------------------------------------------------------------------------------------------


@given(st.sampled_from(list(TARGETS)), st.booleans(), st.sampled_from(["", " ", "-", "_"]))
def test_a_card_has_its_short_name_and_the_drivers_in_any_case(short: str, upper: bool, hyphen: str) -> None:
    for name in (short.replace("-", hyphen), TARGETS[short].device_kind):
        assert named(name.upper() if upper else name.lower()) is TARGETS[short]
    assert short_name(TARGETS[short]) == short


def test_an_unknown_name_is_answered_with_the_list() -> None:
    with pytest.raises(InputError, match=f"take one of {', '.join(TARGETS)}"):
        named("zzzzzzzzzz")


# ----- a card of your own ---------------------------------------------------------------------------------------------


def test_a_file_says_what_differs_from_a_known_card(tmp_path: Path) -> None:
    file = own(tmp_path, """
        name = "L4"
        like = "l40s"
        device_kind = "NVIDIA L4"
        bf16 = 121
        bandwidth = 300
        memory = 23034
        multiprocessors = 58
        link = 31.5
    """)  # fmt: skip
    target = named(file)
    assert named("l4") is target and named("nvidia l4") is target and short_name(target) == "l4"
    assert (target.multiprocessors, target.architecture, target.clock) == (58, "sm_89", TARGETS["l40s"].clock)
    assert (target.gpu.bf16, target.gpu.fp32, target.gpu.bandwidth) == (121, GPUS["NVIDIA L40S"].fp32, 300)
    assert target.gpu.memory == pytest.approx(24.15, rel=1e-3)
    assert card_of(target) == card_of(TARGETS["l40s"])._replace(memory=23034 * MIB, link=31.5e9)
    assert named(file) == target  # a second time


def test_a_small_file_is_another_name_for_a_card(tmp_path: Path) -> None:
    target = named(own(tmp_path, 'name = "mine"\nlike = "rtx4090"\ncapability = "12.0"'))
    assert card_of(target) == card_of(TARGETS["rtx4090"])
    assert (target.device_kind, target.architecture) == ("mine", "sm_120")
    assert TARGETS["rtx4090"].architecture == "sm_89"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "not TOML"),
        ('like = "h100"', "name is missing"),
        ('name = "mine"', "like is missing"),
        ('name = "mine"\nlike = "h1"', "like: 'h1'"),
        ('name = "h100"\nlike = "h100"', "name: 'h100' is a card that is known already"),
        ('name = "mine"\nlike = "h100"\ndevice_kind = "NVIDIA H200"', "known already"),
        ('name = "mine"\nlike = "h100"\nbandwith = 3', "bandwith: not known"),
        ('name = "mine"\nlike = "h100"\nbandwidth = "fast"', "bandwidth is 'fast'"),
        ('name = "mine"\nlike = "h100"\nbf16 = nan', "bf16 is nan"),
        ('name = "mine"\nlike = "h100"\nmemory = 24', "memory is 24"),
        ('name = "mine"\nlike = "h100"\nnode = 1.5', "node is 1.5"),
        pytest.param(f'name = "mine"\nlike = "h100"\nlink = {10**400}', "too large", id="400 digits"),
        pytest.param(f'name = "mine"\nlike = "h100"\nlink = {"9" * 5000}', "not TOML", id="5000 digits"),
        ('name = "mine"\nlike = "h100"\ncapability = "9"', "capability is '9'"),
    ],
)
def test_every_mistake_is_a_line_that_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    before = dict(GPUS), dict(TARGETS), dict(CARDS)
    with pytest.raises(InputError) as error:
        named(own(tmp_path, text))
    assert said in str(error.value) and "card.toml" in str(error.value) and "\n" not in str(error.value)
    assert before == (GPUS, TARGETS, CARDS)


def test_files_that_are_no_text_and_not_there(tmp_path: Path) -> None:
    (tmp_path / "card.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "none.toml", tmp_path / "card.toml"):
        with pytest.raises(InputError, match=r"cannot be read|not TOML|not known here") as error:
            named(str(path))
        assert str(path) in str(error.value)
