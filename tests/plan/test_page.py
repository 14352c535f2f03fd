"""docs/plan.md shows what the command prints now; benchmarks/plan_page.py writes it anew."""

import shlex

import pytest

from benchmarks.plan_page import PAGE, blocks, indented
from llmc_jax.plan.command import main

SHOWN = blocks(PAGE.read_text(encoding="utf-8"))
COMPUTED = [words for words in SHOWN if {"--quick", "--sweep"} & set(shlex.split(words))]


@pytest.mark.parametrize("words", COMPUTED)
def test_the_page_shows_what_is_printed(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(words)) == 0
    assert indented(capsys.readouterr().out) == SHOWN[words]


def test_there_are_such_blocks() -> None:
    assert len(COMPUTED) >= 2
