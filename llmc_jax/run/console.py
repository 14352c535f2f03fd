"""What a run shows on the screen: the start-up table, llm.c's step line, and a progress bar on a terminal.

A pipe or a file gets plain lines without control characters. Leaves out the files of a run (folder.py).
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TextIO

from rich.box import Box
from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from llmc_jax.base.streams import escaped, takes_ascii_only
from llmc_jax.base.text import drawn, screen_width
from llmc_jax.run.figures import Average, StepFigures

NAME_WIDTH, VALUE_WIDTH = 21, 50  # the columns of llm.c's table
LINES = "\n\t"  # the control characters that are shown


# ---- plain functions: numbers and text in, text out


def fitting[Words: (str, Text)](words: Iterable[Words], width: int, gap: int) -> list[Words]:
    """Return as many words as stand together in `width` cells, from the first on; the empty ones left out."""
    filled = [each for each in words if each]
    ends = itertools.accumulate(len(each) + gap for each in filled)
    return filled[: sum(end <= width + gap for end in ends)]


def step_words(
    figures: StepFigures, total_steps: int, tokens_per_second: float, utilization: str, scores: bool = False
) -> list[str]:
    """Return the figures of the step line, without the last one llm.c's.

    tokens_per_second: averaged; utilization: as `utilization_text` gives it; scores: with z-scores, which are NaN, as
    llm.c has it, before there is one. Source: llm.c train_gpt2.cu, end of the training loop.
    """

    def z_text(z: float | None) -> str:
        return f" ({math.nan if z is None else z:+.2f}z)" if scores else ""

    return [
        f"step {figures.step + 1:4d}/{total_steps}",
        f"loss {figures.loss:7.6f}{z_text(figures.z_loss)}",
        f"norm {figures.norm:6.4f}{z_text(figures.z_norm)}",
        f"lr {figures.lr:.2e}",
        f"{figures.ms:.2f} ms",
        utilization,
        f"{tokens_per_second:.0f} tok/s",
        "skipped" if figures.skipped else "",
    ]


def step_line(words: Iterable[str]) -> str:
    """Return one step in llm.c's words. Behind a z-score llm.c has no space."""
    return "".join(f"{each}| " if each.endswith("z)") else f"{each} | " for each in words if each).rstrip("| ")


SHORT_RUN = 100  # steps of which all are printed
FIRST_STEPS = 3  # of a longer run, printed at once: does it learn, and how fast is it?


def automatic_every(total_steps: int) -> int:
    """Return N of "every N-th step has its line", for 40 to 100 lines: 1, 2, 5, 10, 20, 50 …"""
    factors = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return next(every for every in factors if total_steps <= every * SHORT_RUN)


class Pace(NamedTuple):
    """When the first step ended, which compiles, and the last, in seconds: the time left follows from them."""

    steps: int = 0
    first: float = 0.0
    last: float = 0.0

    def then(self, now: float) -> "Pace":
        """Return the pace after another step that ended at clock time `now`."""
        return Pace(self.steps + 1, self.first if self.steps else now, now)

    def left(self, remaining_steps: int) -> float | None:
        """Return the time for the remaining steps, each with its share of the validations and samples between them.

        None until a step without compilation has been seen.
        """
        return None if self.steps < 2 else remaining_steps * (self.last - self.first) / (self.steps - 1)


def duration(seconds: float) -> str:
    """Return seconds as `0:07`, `12:34`, `1:02:03`, `2d 03:04`: short enough for a bar."""
    time = timedelta(seconds=max(0, round(seconds)))
    if time.days:
        hours, minutes = divmod(time.seconds // 60, 60)
        return f"{time.days}d {hours:02d}:{minutes:02d}"
    return str(time).removeprefix("0:").removeprefix("0")


# The corners and lines of llm.c's table: top, head, rule, rows, rule, rule, foot, bottom.
_LLMC_BOX = Box("+-++\n| ||\n+-++\n| ||\n+-++\n+-++\n| ||\n+-++\n", ascii=True)
TABLE_WIDTH = NAME_WIDTH + VALUE_WIDTH + 7
NARROWEST_TABLE = 24


def format_table(sections: Iterable[Sequence[tuple[str, Any]]], width: int | None = None) -> str:
    """Return the start-up table in llm.c's box: sections of (name, value), a rule between them, long values folded.

    width: cells that there are, None for the screen's; where llm.c's table does not fit, the columns are narrower.
    Source: llm.c train_gpt2.cu, `printf("| %-21s | %-50s |")`.
    """
    width = width or screen_width() or TABLE_WIDTH
    whole = width >= TABLE_WIDTH
    table = Table(box=_LLMC_BOX)
    for heading, cells in (("Parameter", NAME_WIDTH), ("Value", VALUE_WIDTH)):
        table.add_column(heading, min_width=cells if whole else 1, max_width=cells, overflow="fold")
    for section in sections:
        for name, value in section:
            table.add_row(_cell(name), _cell(value))
        table.add_section()
    return drawn(table, max(NARROWEST_TABLE, width)).rstrip("\n")


def _cell(value: Any) -> Text:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return Text(escaped(text.replace("\n", " ").replace("\t", " "), instead="").strip())


class BarState(NamedTuple):
    """What the progress bar shows."""

    done: int
    total: int
    elapsed: float
    left: float | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None
    doing: str = ""  # what takes long between two steps, in place of the time left


# rich.progress has a bar too. Its time left knows of no validations and samples between the steps, and on a narrow
# terminal it cuts all columns short. With columns of our own for both, it would save the bar's three lines.
def bar(state: BarState, width: int, ascii_only: bool = False) -> Text:
    """Return the bar as a text that takes at most `width` cells on one line: what matters most, first."""
    left = "" if state.left is None else f"{duration(state.left)} left"
    cells = min(40, width // 4)
    full = cells * state.done // max(1, state.total)
    done, rest = ("#", ".") if ascii_only else ("━", "─")
    words = [
        Text(f"{state.done}/{state.total}"),
        Text("" if state.loss is None else f"loss {state.loss:.4f}", "bold"),
        Text.assemble((done * full, "green"), (rest * (cells - full), "dim")),
        Text(state.doing or ("compiling" if state.loss is None else left), "cyan"),
        Text("" if state.val_loss is None else f"val {state.val_loss:.4f}", "magenta"),
        Text(f"{100 * state.done // max(1, state.total)}%", "dim"),
        Text(duration(state.elapsed), "dim"),
        Text("" if state.tokens_per_second is None else f"{state.tokens_per_second:,.0f} tok/s", "dim"),
    ]
    shown = fitting(words, width, gap=1) or [Text(f"{state.done}"[:width])]
    return Text(" ", no_wrap=True, overflow="crop").join(shown)


# ---- the screen


@dataclass
class Console:
    """The screen of one run. On a terminal lines scroll above a live bar; elsewhere they are simply printed.

    Every `print_every`-th step prints its line, the first and the last too; with 0 none does, with -1 what
    `automatic_every` says and the first few. Skipped ones always do.
    The bar shows each. A pipe gets whole lines, a terminal the figures that it has room for.
    Use it in a `with` block, which takes the bar away in the end and leaves the terminal as it was.
    """

    total_steps: int
    print_every: int
    file: TextIO
    _: KW_ONLY
    first_step: int = 0  # the step (from 0) that a resumed run begins with
    clock: Callable[[], float] = time.monotonic
    utilization: Callable[[float], str] = lambda tokens_per_second: ""  # of the device, in words, at a speed
    scores: bool = False  # z-scores are shown too

    def __post_init__(self) -> None:
        self._ascii = takes_ascii_only(getattr(self.file, "encoding", None))
        self._automatic = self.print_every == -1
        self._every = automatic_every(self.total_steps) if self._automatic else self.print_every
        self._began = self.clock()
        self._pace, self._speed = Pace(), Average()
        self._state = BarState(done=self.first_step, total=self.total_steps, elapsed=0.0)
        takes_control_sequences = self.file.isatty() and os.environ.get("TERM", "") != "dumb"
        self._live = self._new_live() if takes_control_sequences else None

    def _new_live(self) -> Live:
        screen = RichConsole(file=self.file, force_terminal=True, highlight=False, soft_wrap=True)
        render = partial(self._render, screen)
        return Live(get_renderable=render, console=screen, refresh_per_second=4, transient=True)

    def _render(self, screen: RichConsole) -> Text:
        now = self.clock()
        left = self._pace.left(self._state.total - self._state.done)
        if left is not None:  # counts down during a long step instead of standing still
            left = max(0.0, left - (now - self._pace.last))
        state = self._state._replace(elapsed=now - self._began, left=left)
        # one column stays free: a line that fills the last one makes some terminals wrap
        return bar(state, max(1, screen.width - 1), self._ascii)

    def __enter__(self) -> "Console":
        if self._live is not None:
            self._live.start()
        return self

    def table(self, sections: Iterable[Sequence[tuple[str, Any]]]) -> None:
        """Show the start-up table: sections of (name, value) rows."""
        self._print(format_table(sections, TABLE_WIDTH if self._live is None else self._live.console.width))

    def note(self, text: str) -> None:
        """Show a line of information."""
        self._print(escaped(text, keep=LINES))

    def warning(self, text: str) -> None:
        """Show a line that the user should not miss."""
        self._print(f"warning: {escaped(text, keep=LINES)}", "yellow")

    def step(self, figures: StepFigures) -> None:
        """Show a finished training step."""
        self._pace = self._pace.then(self.clock())
        self._speed = self._speed.then(figures.tokens_per_second)
        shown = self._speed.mean or figures.tokens_per_second
        self._state = self._state._replace(done=figures.step + 1, loss=figures.loss, tokens_per_second=shown)
        if self._is_due(figures.step) or figures.skipped:
            utilization = self.utilization(figures.tokens_per_second)
            words = step_words(figures, self._state.total, shown, utilization, self.scores)
            if self._live is not None:
                width, gap = self._live.console.width, len(" | ")
                if words[-1] not in fitting(words, width, gap):  # "skipped" matters more than the norm
                    words = [*words[:2], words[-1], *words[2:-1]]
                words = fitting(words, width, gap) or words[:1]
            self._print(step_line(words), "yellow" if figures.skipped else "")
        else:
            self.file.flush()  # notices a reader that went away: streams.Output

    def _is_due(self, step: int) -> bool:
        if self._every == 0:
            return False
        first = FIRST_STEPS if self._automatic else 1
        return step - self.first_step < first or (step + 1) % self._every == 0 or step + 1 == self._state.total

    def val(self, loss: float) -> None:
        """Show a validation loss, as llm.c prints it."""
        self._state = self._state._replace(val_loss=loss)
        self._print(f"val loss {loss:.6f}", "magenta")

    def doing(self, words: str) -> None:
        """Show what takes long between two steps in the bar, in place of the time left; empty: it has ended."""
        self._state = self._state._replace(doing=words)

    def accuracy(self, correct: int, items: int) -> None:
        """Show HellaSwag's accuracy by the mean loss per token, as llm.c prints it."""
        self._print(f"HellaSwag: {correct}/{items} = {correct / items:.6f}", "magenta")

    def sample(self, text: str) -> None:
        """Show a sample, between llm.c's rules."""
        self._print(f"generating:\n---\n{escaped(text, keep=LINES, instead='')}\n---")

    def close(self, *_: object) -> None:
        """Take the bar away and give the terminal back. May be called twice."""
        if self._live is not None:
            self._live.stop()

    __exit__ = close

    def _print(self, text: str, style: str = "") -> None:
        if self._live is not None:
            self._live.console.print(Text(text, style), soft_wrap=True)
        else:
            self.file.write(f"{text}\n")  # one write: lines of two threads do not mix
            self.file.flush()
