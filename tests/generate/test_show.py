"""What is shown of samples that are computed together, and in which order."""

import io

import pytest

from llmc_jax.generate.engine import Drawn
from llmc_jax.generate.show import DIM, PLAIN, Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(sample: int, text: str, end: str = "") -> Drawn:
    return Drawn(sample, 0, 0, 0.0, (), text, end)


def test_the_first_sample_that_has_not_ended_is_shown_as_it_comes() -> None:
    file = io.StringIO()
    screen = Screen(file, "p ", 3)
    shown = []
    for each in (drawn(0, "a"), drawn(1, "x"), drawn(2, "k", "stop"), drawn(0, "b", "stop"), drawn(1, "y\n", "stop")):
        screen.add(each)
        shown.append(file.getvalue())
    begin = [f"--- sample {number} of 3 ---\np " for number in (1, 2, 3)]
    first, second = f"{begin[0]}ab\n{begin[1]}x", "y\n" + begin[2] + "k\n"
    assert shown == [f"{begin[0]}a", f"{begin[0]}a", f"{begin[0]}a", first, first + second]
    screen.finish()
    assert file.getvalue() == first + second


def test_what_was_stopped_is_shown_to_where_it_came() -> None:
    file = io.StringIO()
    screen = Screen(file, "", 2)
    screen.add(drawn(0, "a"))
    screen.add(drawn(1, "b"))
    screen.finish()
    assert file.getvalue() == "--- sample 1 of 2 ---\na\n--- sample 2 of 2 ---\nb\n"


def test_a_terminal_has_the_prompt_dim_and_is_sent_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for file, expected in ((Terminal(), f"{DIM}p[2J{PLAIN}x[1m\n"), (io.StringIO(), "p[2Jx[1m\n")):
        screen = Screen(file, "p\x1b[2J")
        screen.add(drawn(0, "x\x1b[1m", "length"))
        assert file.getvalue() == expected
