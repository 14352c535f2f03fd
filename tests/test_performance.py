"""The pages that show what a card measured: they are what its committed records say."""

from pathlib import Path

import pytest

from benchmarks import performance

CARD = performance.results()


@pytest.mark.parametrize("path", performance.PAGES, ids=lambda path: path.name)
def test_pages_show_the_records(path: Path) -> None:
    text = path.read_text()
    assert performance.BLOCK.search(text)
    assert performance.page_of(text, CARD) == text


@pytest.mark.parametrize("name", performance.BLOCKS)
def test_every_table_names_the_card_and_stands_on_a_page(name: str) -> None:
    assert CARD.card in performance.BLOCKS[name](CARD).splitlines()[0]
    assert any(f"performance.py: {name} -->" in path.read_text() for path in performance.PAGES)


def test_losses_of_both_programs() -> None:
    ours, theirs = (performance.steps_of(performance.file_of(f"losses_{who}.txt")) for who in ("ours", "llmc"))
    assert [step for step, *_ in ours] == [step for step, *_ in theirs] == list(range(1, 21))
    assert abs(ours[0][1] - theirs[0][1]) < 2e-5
    assert max(abs(a[1] - b[1]) for a, b in zip(ours, theirs, strict=True)) < 0.02
    assert ours[1][3] == 25.71 and theirs[1][3] == 29.25


def test_picture(tmp_path: Path) -> None:
    performance.draw(CARD, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
