"""The one text table: whole where there is room, and what gives way where there is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base import text
from llmc_jax.run.console import format_table

HEADINGS = ["", "operation", "layer", "ms", "share", "bound by"]
ROWS = [
    ["backward", "a name of several words", "12", "1.234", "0.5%", "memory"],
    [],
    ["forward", "x", "", "99.1", "", "products"],
]
WORDS = ["", "operation", "bound by"]


def lines(width: int | None) -> list[str]:
    return text.table(HEADINGS, ROWS, left=WORDS, optional=("bound by", "share"), width=width).splitlines()


def test_with_room_it_is_as_wide_as_its_cells() -> None:
    assert lines(None) == lines(200) == [
        "          operation                layer     ms  share  bound by",
        "----------------------------------------------------------------",
        "backward  a name of several words     12  1.234   0.5%  memory",
        "",
        "forward   x                                99.1         products",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "gone"), [(64, []), (57, []), (56, ["bound by"]), (46, ["share"]), (39, ["share"]), (20, ["share"])]
)
def test_without_room_optional_columns_go_and_then_words_are_folded(width: int, gone: list[str]) -> None:
    head = lines(width)[0]
    assert [heading for heading in ("layer", "ms") if heading in head] == ["layer", "ms"]
    assert all(heading not in head for heading in gone)
    notice = " ".join(" ".join(lines(width)).split()).partition("hidden at this width:")[2]
    assert all(heading.split()[0] in notice for heading in gone) and bool(notice) == bool(gone)
    assert max(map(len, lines(width))) <= max(width, 41)
    shown = " ".join(" ".join(lines(width)).split())
    assert all(word in shown for word in ("1.234", "99.1", "several", "words", "backward"))


def test_a_heading_of_several_words_is_folded_too() -> None:
    """As plan's and evaluate's are on a terminal of 40 columns."""
    rows = [["a step, ms", "107", "113", "119"]]
    found = text.table(["how fast? (by the rates of one NVIDIA H200)", "low", "typical", "high"], rows,
                       left=["how fast? (by the rates of one NVIDIA H200)"], width=40).splitlines()  # fmt: skip
    rule = found.index("-" * len(max(found, key=len)))
    assert max(map(len, found)) <= 40 and found[rule + 1].split() == ["a", "step,", "ms", "107", "113", "119"]
    assert " ".join(" ".join(found[:rule]).split()) == "how fast? (by the rates of one NVIDIA H200) low typical high"

    rows = [["README.md", "loss", "3.7574 ± 0.0258"], ["  16,261 tokens", "bits per byte", "5.4208 ± 0.0372"]]
    assert (
        max(map(len, text.table(["of", "figure", "value"], rows, left=["of", "figure"], width=40).splitlines())) <= 40
    )


def test_the_environment_takes_no_digit_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under these two rich thinks that it knows the width better."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    numbers = ["123456789.12"] * 9
    assert text.table([f"column {n}" for n in range(9)], [numbers]).splitlines()[2].split() == numbers
    assert max(map(len, format_table([[("name", "value " * 20)]], 40).splitlines())) <= 40


CELLS = st.text(st.characters(codec="ascii", exclude_categories=["Cc", "Zs"]), max_size=9)


@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=5), st.none() | st.integers(1, 60))
def test_no_cell_is_ever_lost(rows: list[list[str]], width: int | None) -> None:
    body = text.table(["a", "b", "c"], rows, left=["b"], width=width).splitlines()[2:]
    assert "".join(sorted("".join(body).replace(" ", ""))) == "".join(sorted("".join(map("".join, rows))))


def test_sentences_are_as_wide_as_the_screen() -> None:
    sentence = "word " * 40
    assert max(map(len, text.wrapped(sentence).splitlines())) <= 116
    assert max(map(len, text.wrapped(sentence, 40).splitlines())) <= 40
    assert " ".join(text.wrapped(sentence, 40).split()) == sentence.strip()
