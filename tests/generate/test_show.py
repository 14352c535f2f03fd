"""What a terminal is sent."""

import io

import pytest

from llmc_jax.generate.answer import DIM, PLAIN, Screen
from llmc_jax.generate.engine import Drawn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_the_prompt_dim_and_is_sent_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for no_color, file in (("", Terminal()), ("1", Terminal()), ("", io.StringIO())):
        monkeypatch.setenv("NO_COLOR", no_color)
        dim, plain = (DIM, PLAIN) if file.isatty() and not no_color else ("", "")
        with Screen(file, "p\x1b[2J") as screen:
            screen.add(Drawn(0, 0, 0, 0.0, (), "x\x1b[1m", "length"))
        assert file.getvalue() == f"{dim}p[2J{plain}x[1m\n"
