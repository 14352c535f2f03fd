"""The screen: llm.c's lines to the character, and a bar that leaves a terminal as it found it."""

import io
import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from llmc_jax.base.streams import escaped
from llmc_jax.run import console
from llmc_jax.run.console import BarState, Console, Pace
from llmc_jax.run.figures import StepFigures

STEP: dict[str, Any] = {"norm": 15.3666, "lr": 6e-4, "ms": 140.123, "tokens_per_second": 3.74e6}


def line_of(step: int, total: int, *, scores: bool = False, **figures: Any) -> str:
    words = console.step_words(StepFigures(step, **figures), total, 3.74e6, "38.0% bf16 MFU", scores)
    return console.step_line(words)


def test_step_line_is_llmcs_to_the_column() -> None:
    """Also where llm.c's loss_checker_ci.py reads the loss, columns 20 to 28."""
    rest = "| lr 6.00e-04 | 140.12 ms | 38.0% bf16 MFU | 3740000 tok/s"
    line = line_of(0, 10, loss=5.2700091, **STEP)
    assert line == f"step    1/10 | loss 5.270009 | norm 15.3666 {rest}"
    line = line_of(0, 10, loss=5.2700091, scores=True, **STEP)
    assert line == f"step    1/10 | loss 5.270009 (+nanz)| norm 15.3666 (+nanz){rest}"
    line = line_of(1, 10, loss=float("nan"), **STEP, skipped=True)
    assert "loss     nan |" in line and line.endswith(" tok/s | skipped")
    line = line_of(149, 18865, loss=6.1, z_loss=-0.004, z_norm=11.2694, **STEP, skipped=True, scores=True)
    assert line.startswith("step  150/18865 | loss 6.100000 (-0.00z)| norm 15.3666 (+11.27z)| lr 6.00e-04 | ")
    assert line.endswith(" tok/s | skipped")


@given(st.integers(1, 10**9))
def test_a_run_prints_40_to_100_lines_or_all(steps: int) -> None:
    every = console.automatic_every(steps)
    assert steps / every <= 100 and (every == 1 or steps / every > 40)


def pace_of(steps: list[float]) -> Pace:
    """The pace after steps that took so many seconds, with the pauses before them."""
    pace = Pace()
    for end in itertools.accumulate(steps):
        pace = pace.then(end)
    return pace


def test_time_left_leaves_out_compilation_and_shares_out_pauses() -> None:
    assert Pace().left(10) is None
    assert pace_of([63.0]).left(10) is None
    assert pace_of([63.0] + [2.0] * 9).left(10) == pytest.approx(20.0)
    # a validation of 5 s after every 10 steps of 1 s: 100 more steps will take 150 s
    steps = [30.0] + [6.0 if i % 10 == 0 else 1.0 for i in range(1, 101)]
    assert pace_of(steps).left(100) == pytest.approx(150.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (754, "12:34"), (3723, "1:02:03"), (183840, "2d 03:04"), (-5, "0:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def test_what_is_shown_keeps_text_and_loses_control() -> None:
    text = "a\x1b[31mb\r\x00\x9b\u202e é日\u3000\n\tc\ud800"
    assert escaped(text, keep="\n\t", instead="") == "a[31mb é日\u3000\n\tc"
    assert escaped(text) == "a\\x1b[31mb\\r\\x00\\x9b\\u202e é日\u3000\\n\\tc\\ud800"


# ---- the table


def test_table_is_llmcs_box() -> None:
    table = console.format_table([[("batch size B", 4), ("learning rate", 3e-4)], [("device", "cpu")]])
    assert table.splitlines() == [
        "+-----------------------+----------------------------------------------------+",
        "| Parameter             | Value                                              |",
        "+-----------------------+----------------------------------------------------+",
        "| batch size B          | 4                                                  |",
        "| learning rate         | 0.0003                                             |",
        "+-----------------------+----------------------------------------------------+",
        "| device                | cpu                                                |",
        "+-----------------------+----------------------------------------------------+",
    ]


NOT_SHOWN = ["Cc", "Cf", "Cn", "Co", "Cs", "Mn", "Me", "Mc", "Zs", "Zl", "Zp"]
WORD = st.text(st.characters(exclude_categories=NOT_SHOWN), max_size=150)


@given(WORD, WORD, st.integers(1, 200))
def test_no_value_breaks_the_box_and_nothing_is_lost(name: str, value: str, width: int) -> None:
    lines = console.format_table([[(name, value)]], width).split("\n")
    assert len({cell_len(line) for line in lines}) == 1
    assert cell_len(lines[0]) <= max(24, min(width, 78))
    left = lines[0].index("+", 1)  # between the columns: names and values may hold bars themselves
    rule = [line for line in lines if line.startswith("+-")]
    rows = lines[lines.index(rule[1], 1) + 1 : -1]
    assert "".join(_cells(row, 2, left - 3) for row in rows).replace(" ", "") == name
    assert "".join(_cells(row, left + 2, cell_len(row) - left - 4) for row in rows).replace(" ", "") == value


def _cells(line: str, start: int, width: int) -> str:
    """The characters of a line that lie in `width` cells from cell `start` on."""
    out, position = "", 0
    for character in line:
        if start <= position < start + width:
            out += character
        position += cell_len(character)
    return out


# ---- the bar


@given(
    st.integers(0, 10**7), st.integers(1, 10**7), st.integers(1, 250), st.none() | st.floats(0, 1e7),
    st.none() | st.floats(),
)  # fmt: skip
def test_bar_fits_every_width(done: int, total: int, width: int, left: float | None, loss: float | None) -> None:
    state = BarState(min(done, total), total, 5.0, left, loss, loss, 1.5e6)
    for ascii_only in (False, True):
        text = console.bar(state, width, ascii_only).plain
        assert 0 < cell_len(text) <= width
        assert "\n" not in text
        assert text.isascii() or not ascii_only


def test_bar_shows_what_matters_most_first() -> None:
    state = BarState(30, 120, 65.0, 754.0, 3.25, 3.5, 12345.0)

    def bar(width: int, state: BarState = state) -> str:
        return console.bar(state, width, ascii_only=True).plain

    assert bar(80) == "30/120 loss 3.2500 #####............... 12:34 left val 3.5000 25% 1:05"
    assert bar(42) == "30/120 loss 3.2500 ##........ 12:34 left"
    assert bar(20) == "30/120 loss 3.2500"
    assert (bar(8), bar(2)) == ("30/120", "30")
    assert "compiling" in bar(60, BarState(0, 9, 1.0))
    assert bar(44, state._replace(doing="HellaSwag 7%")) == bar(44).replace("12:34 left", "HellaSwag 7%")


# ---- the screen


class Terminal(io.StringIO):
    """A file that says it is a terminal and keeps what was written to it."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(written: str) -> list[str]:
    """The lines that were written, whatever the cursor did; the bar, which is written over, among them."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


def lines_of(written: str) -> list[str]:
    return [line for line in shown(written) if not re.match(r"\d+/\d+ ", line)]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "COLORTERM", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    return Terminal()


def _run(file: Any) -> None:
    with Console(12, 5, file, utilization=lambda _: "38.0% bf16 MFU") as screen:
        screen.note("[bold]not markup[/bold] :smile:")
        screen.val(5.5)
        for step in range(12):
            screen.step(StepFigures(step, loss=5.0 - step / 10, **STEP, skipped=step == 6))
        screen.warning("careful\x1b[31m")
        screen.sample("x = 1\x1b[2J\ny")


EXPECTED = [
    "[bold]not markup[/bold] :smile:",
    "val loss 5.500000",
    *(line_of(step, 12, loss=5.0 - step / 10, **STEP, skipped=step == 6) for step in (0, 4, 6, 9, 11)),
    r"warning: careful\x1b[31m",
    "generating:",
    "---",
    "x = 1[2J",
    "y",
    "---",
]


def test_elsewhere_and_on_a_dumb_terminal_lines_are_plain(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for file in (io.StringIO(), terminal):
        _run(file)
        assert file.getvalue() == "\n".join([*EXPECTED, ""])


@pytest.mark.parametrize("refused", [False, True])
def test_a_terminal_shows_the_same_lines_above_a_bar_and_is_given_back(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """NO_COLOR takes the colours away, not the bar."""
    if refused:
        monkeypatch.setenv("NO_COLOR", "1")
    _run(terminal)
    written = terminal.getvalue()
    assert lines_of(written) == EXPECTED
    assert "\x1b[?25l" in written and written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # the cursor
    assert written.endswith("\x1b[2K")  # the bar is gone
    assert bool(re.findall(r"\x1b\[(?:\d+;)*[349]\dm", written)) == (not refused)


def test_the_bar_shows_steps_that_are_not_printed(terminal: Terminal) -> None:
    with pytest.raises(RuntimeError), Console(12, 0, terminal) as screen:
        for step in range(3):
            screen.step(StepFigures(step, loss=5.0 - step / 10, **STEP))
        screen.close()
        raise RuntimeError  # a run that fails gives the terminal back too
    *_, bar = shown(terminal.getvalue())
    assert bar.startswith("3/12 ") and "loss 4.8000" in bar and " left" in bar
    assert terminal.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize(("columns", "figures"), [(1, 1), (30, 2), (80, 5), (120, 7)])
def test_a_narrow_terminal_shows_the_first_figures(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, figures: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _run(terminal)
    assert all(line in shown(terminal.getvalue()) for line in EXPECTED if not line.startswith("step"))
    lines = [line for line in shown(terminal.getvalue()) if line.startswith("step ") and "skipped" not in line]
    assert len(lines) >= 4 and all(len(line) <= max(columns, 12) for line in lines)
    assert {line.count(" | ") + 1 for line in lines} == {figures}


def test_a_narrow_terminal_gets_a_narrow_table(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with Console(12, 1, terminal) as screen:
        screen.table([[("train data pattern", "a/long/path/" * 9)]])
    rows = lines_of(terminal.getvalue())
    assert all(len(row) == 40 for row in rows) and len(rows) > 5


def test_an_encoding_without_the_characters_does_not_stop_the_run() -> None:
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="ascii", errors="backslashreplace")  # as the command line sets it
    with Console(1, 1, file) as screen:
        screen.sample("日本 é x")
        assert buffer.getvalue() == b"generating:\n---\n\\u65e5\\u672c \\xe9 x\n---\n"  # at once


def printed(total: int, every: int, first: int = 0, last: int | None = None) -> list[int]:
    """The steps, from 1, whose lines a pipe gets."""
    file = io.StringIO()
    with Console(total, every, file, first_step=first) as screen:
        for step in range(first, total if last is None else last):
            screen.step(StepFigures(step, loss=1.0, **STEP))
    return [int(line.split()[1].split("/")[0]) for line in file.getvalue().splitlines()]


def test_which_steps_are_printed() -> None:
    assert printed(100, 50, first=7, last=10) == [8]  # the first one after a resume
    assert printed(7, 3) == [1, 3, 6, 7]
    assert printed(7, 0) == []
    assert printed(100, -1) == list(range(1, 101))
    assert printed(500, -1) == [1, 2, 3, *range(5, 501, 5)]
    assert printed(501, -1, first=300) == [301, 302, 303, *range(310, 501, 10), 501]
    assert printed(500, 1) == list(range(1, 501))
