"""What a run shows on the screen: the start-up table, llm.c's step line, and a progress bar on a terminal.

A pipe or a file gets plain lines without control characters. Leaves out the files of a run (runlog.py).
"""

import atexit
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

NAME_WIDTH, VALUE_WIDTH = 21, 50  # the columns of llm.c's table
EMA_DECAY = 0.95  # of the smoothed speed, llm.c's


# ---- plain functions: numbers and text in, text out


def step_line(
    step: int,
    total_steps: int,
    *,
    loss: float,
    norm: float,
    lr: float,
    ms: float,
    tokens_per_second: float,
    utilization: str,
    skipped: bool = False,
    z_loss: float | None = None,
    z_norm: float | None = None,
) -> str:
    """One step in llm.c's words. `step` counts from 0 as everywhere in the code; the line counts from 1.

    utilization: as `utilization_text` gives it. z_loss, z_norm: z-scores, which llm.c always prints, `(+nanz)` before
    there are any; without them what follows stands further left than there.
    Source: llm.c train_gpt2.cu, end of the training loop.
    """
    line = (
        f"step {step + 1:4d}/{total_steps} | loss {float(loss):7.6f}{_z_text(z_loss)}| "
        f"norm {float(norm):6.4f}{_z_text(z_norm)}| lr {float(lr):.2e} | "
        f"{ms:.2f} ms | {utilization} | {tokens_per_second:.0f} tok/s"
    )
    return line + " | skipped" if skipped else line


def _z_text(z: float | None) -> str:
    return " " if z is None else f" ({float(z):+.2f}z)"


def utilization_text(flops_per_second: float, peak: float | None, precision: str = "bf16") -> str:
    """`38.0% bf16 MFU` where the peak is known, else the rate itself: `12.3 GFLOP/s`, `98.76 TFLOP/s`.

    flops_per_second and peak in FLOP/s, peak of all devices together. llm.c prints -100% for a card it does not know.
    """
    if peak is not None:
        return f"{100 * flops_per_second / peak:.1f}% {precision} MFU"
    if flops_per_second < 1e12:
        return f"{flops_per_second / 1e9:.1f} GFLOP/s"
    return f"{flops_per_second / 1e12:.2f} TFLOP/s"


class Speed(NamedTuple):
    """The state of the smoothed speed: steps seen, and their biased average without the first."""

    steps: int = 0
    ema: float = 0.0


def smooth_speed(speed: Speed, tokens_per_second: float) -> tuple[Speed, float]:
    """llm.c's smoothed tok/s: an exponential average with bias correction; the first step, which compiles, is left out.

    Returns the new state and the speed to show; for the first step that is its own.
    Source: llm.c train_gpt2.cu, `ema_tokens_per_second`.
    """
    if speed.steps == 0:
        return Speed(1, 0.0), tokens_per_second
    ema = EMA_DECAY * speed.ema + (1 - EMA_DECAY) * tokens_per_second
    return Speed(speed.steps + 1, ema), ema / (1 - EMA_DECAY**speed.steps)


class Pace(NamedTuple):
    """What the time left is reckoned from; all times in seconds."""

    steps: int = 0  # finished in this process
    ema: float = 0.0  # biased average of the step's time, without the first, which compiles
    pauses: float = 0.0  # time between steps since the first: validation, sampling, checkpoints
    last: float = 0.0  # the clock at the end of the last step


def advance(pace: Pace, step_seconds: float, now: float) -> Pace:
    """The pace after another step that took `step_seconds` and ended at clock time `now`."""
    if pace.steps == 0:
        return Pace(steps=1, last=now)
    return Pace(
        steps=pace.steps + 1,
        ema=EMA_DECAY * pace.ema + (1 - EMA_DECAY) * step_seconds,
        pauses=pace.pauses + max(0.0, now - pace.last - step_seconds),
        last=now,
    )


def seconds_left(pace: Pace, remaining_steps: int) -> float | None:
    """Time for the remaining steps: each takes what recent ones took, plus its share of the pauses seen so far.

    Pauses are rare and long, so their share is averaged over the whole run, not over recent steps.
    None until a step without compilation has been seen.
    """
    counted = pace.steps - 1
    if counted < 1:
        return None
    return remaining_steps * (pace.ema / (1 - EMA_DECAY**counted) + pace.pauses / counted)


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`, `2d 03:04`: short enough for a bar."""
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def printable(text: str) -> str:
    """Text without control characters but newline and tab: what a model wrote must not drive the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))


def format_table(sections: Iterable[Sequence[tuple[str, Any]]]) -> str:
    """The start-up table in llm.c's box: sections of (name, value), a rule between them, long values on further rows.

    Source: llm.c train_gpt2.cu, `printf("| %-21s | %-50s |")`.
    """
    rule = f"+-{'-' * NAME_WIDTH}-+-{'-' * VALUE_WIDTH}-+"
    lines = [rule, *_table_rows("Parameter", "Value"), rule]
    for section in sections:
        for name, value in section:
            lines += _table_rows(name, _table_value(value))
        if section:
            lines.append(rule)
    return "\n".join(lines)


def _table_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table_rows(name: str, value: str) -> list[str]:
    names, values = _wrap(name, NAME_WIDTH), _wrap(value, VALUE_WIDTH)
    count = max(len(names), len(values))
    names += [""] * (count - len(names))
    values += [""] * (count - len(values))
    return [
        f"| {set_cell_size(left, NAME_WIDTH)} | {set_cell_size(right, VALUE_WIDTH)} |"
        for left, right in zip(names, values, strict=True)
    ]


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells; broken after a space, comma or path separator where one is near the end."""
    lines = []
    text = printable(text).replace("\n", " ").replace("\t", " ").strip()
    while cell_len(text) > width:
        cut = _cut_at(text, width)
        good = max(text.rfind(mark, 0, cut) for mark in " ,/\\;") + 1
        cut = good if good > cut // 2 else cut
        lines.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    return [*lines, text]


def _cut_at(text: str, width: int) -> int:
    """How many leading characters fit into `width` cells; at least one."""
    cells = 0
    for index, character in enumerate(text):
        cells += cell_len(character)
        if cells > width:
            return max(1, index)
    return len(text)


class BarState(NamedTuple):
    """What the progress bar shows."""

    done: int
    total: int
    elapsed: float
    left: float | None = None
    loss: float | None = None
    val_loss: float | None = None
    tokens_per_second: float | None = None


def bar_segments(state: BarState, width: int, ascii_only: bool = False) -> list[tuple[str, str]]:
    """The bar as (text, style) pieces that together take at most `width` cells on one line.

    What fits is shown, in this order of importance: steps, loss, time left, percentage, a bar of at least 8 cells,
    validation loss, time so far, speed.
    """
    percent = 100 * state.done // max(1, state.total)
    pieces = [  # (importance, text, style) in the order of the line
        (0, f"{state.done}/{state.total}", ""),
        (4, "bar", ""),
        (3, f"{percent}%", "dim"),
        (1, "" if state.loss is None else f"loss {state.loss:.4f}", "bold"),
        (5, "" if state.val_loss is None else f"val {state.val_loss:.4f}", "magenta"),
        (7, "" if state.tokens_per_second is None else f"{state.tokens_per_second:,.0f} tok/s", "dim"),
        (6, duration(state.elapsed), "dim"),
        (2, "compiling" if state.loss is None else _left_text(state.left), "cyan"),
    ]
    sizes = {importance: 8 if text == "bar" else len(text) for importance, text, _ in pieces if text}
    shown: set[int] = set()
    used = 0
    for importance in sorted(sizes):
        need = sizes[importance] + (1 if shown else 0)
        if used + need > width:
            break
        shown.add(importance)
        used += need
    segments: list[tuple[str, str]] = []
    for importance, text, style in pieces:
        if importance not in shown:
            continue
        if segments:
            segments.append((" ", ""))
        segments += _bar(state, min(40, 8 + width - used), ascii_only) if text == "bar" else [(text, style)]
    return segments or [(f"{state.done}"[:width], "")]


def _left_text(left: float | None) -> str:
    return "" if left is None else f"{duration(left)} left"


def _bar(state: BarState, cells: int, ascii_only: bool) -> list[tuple[str, str]]:
    full = cells * state.done // max(1, state.total)
    done, rest = ("#", ".") if ascii_only else ("━", "─")
    return [(done * full, "green"), (rest * (cells - full), "dim")]


# ---- the screen


def is_live(file: TextIO) -> bool:
    """Whether the bar can live there: a terminal that takes control sequences."""
    return file.isatty() and os.environ.get("TERM", "") != "dumb"


class Console:
    """The screen of one run. On a terminal lines scroll above a live bar; elsewhere they are simply printed.

    Every `print_every`-th step prints its line, the first and the last too; with 0 none does. Skipped ones always do.
    The bar shows each.
    Use it in a `with` block or call `close`, which takes the bar away and leaves the terminal as it was.
    """

    def __init__(
        self,
        total_steps: int,
        print_every: int = 1,
        file: TextIO | None = None,
        *,
        first_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """first_step: the step (from 0) that a resumed run begins with; file: where to show (None: standard output)."""
        assert print_every >= 0
        self._file = sys.stdout if file is None else file
        self._print_every = print_every
        self._first_step = first_step
        self._clock = clock
        self._began = clock()
        self._pace = Pace()
        self._state = BarState(done=first_step, total=total_steps, elapsed=0.0)
        self._ascii = not _can_encode(self._file, "━─")
        self._live = self._new_live() if is_live(self._file) else None

    def _new_live(self) -> Live:
        colorless = bool(os.environ.get("NO_COLOR"))  # no-color.org: takes the colours away, not the bar
        screen = RichConsole(file=self._file, force_terminal=True, no_color=colorless, highlight=False, soft_wrap=True)
        return Live(
            get_renderable=lambda: self._render(screen.width),
            console=screen,
            refresh_per_second=4,
            transient=True,
        )

    def _render(self, width: int) -> Text:
        # one column stays free: a line that fills the last one makes some terminals wrap
        state = self._state._replace(elapsed=self._clock() - self._began, left=self._left())
        return Text.assemble(*bar_segments(state, max(1, width - 1), self._ascii), no_wrap=True, overflow="crop")

    def _left(self) -> float | None:
        left = seconds_left(self._pace, self._state.total - self._state.done)
        # counts down during a long step instead of standing still
        return None if left is None else max(0.0, left - (self._clock() - self._pace.last))

    def start(self) -> None:
        """Begin the run: from here on the clock runs and a terminal shows the bar."""
        self._began = self._clock()
        if self._live is not None and not self._live.is_started:
            atexit.register(self.close)
            self._live.start()

    def table(self, sections: Iterable[Sequence[tuple[str, Any]]]) -> None:
        """The start-up table: sections of (name, value) rows."""
        self._print(format_table(sections))

    def note(self, text: str) -> None:
        """A line of information."""
        self._print(text)

    def warning(self, text: str) -> None:
        """A line that the user should not miss."""
        self._print(f"warning: {text}", "yellow")

    def step(
        self,
        step: int,
        *,
        loss: float,
        norm: float,
        lr: float,
        ms: float,
        tokens_per_second: float,
        utilization: str,
        skipped: bool = False,
        z_loss: float | None = None,
        z_norm: float | None = None,
    ) -> None:
        """A finished training step, counted from 0. tokens_per_second: as `smooth_speed` gives it.

        z_loss, z_norm: shown where they are given.
        """
        self._pace = advance(self._pace, ms / 1000, self._clock())
        total = self._state.total
        self._state = self._state._replace(done=step + 1, loss=float(loss), tokens_per_second=tokens_per_second)
        every = self._print_every
        due = every > 0 and (step == self._first_step or (step + 1) % every == 0 or step + 1 == total)
        if due or skipped:
            line = step_line(
                step,
                total,
                loss=loss,
                norm=norm,
                lr=lr,
                ms=ms,
                tokens_per_second=tokens_per_second,
                utilization=utilization,
                skipped=skipped,
                z_loss=z_loss,
                z_norm=z_norm,
            )
            self._print(line, "yellow" if skipped else "")

    def val(self, step: int, loss: float) -> None:
        """The validation loss before step `step`, as llm.c prints it."""
        self._state = self._state._replace(val_loss=float(loss))
        self._print(f"val loss {float(loss):.6f}", "magenta")

    def sample(self, text: str) -> None:
        """A sample, between llm.c's rules."""
        self._print(f"generating:\n---\n{printable(text)}\n---")

    def close(self) -> None:
        """Take the bar away and give the terminal back. May be called twice."""
        if self._live is not None:
            self._live.stop()
            atexit.unregister(self.close)

    def _print(self, text: str, style: str = "") -> None:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if self._live is not None:
            self._live.console.print(Text(text, style), soft_wrap=True)
        else:
            self._file.write(f"{text}\n")  # one write: lines of two threads do not mix
            self._file.flush()

    def __enter__(self) -> "Console":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _can_encode(file: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(file, "encoding", None) or "utf-8")
    except UnicodeError:
        return False
    return True
