"""A request answered: its samples collected, shown as they come, and timed; Ctrl-C ends it between two tokens.

Screen is the terminal or file that they are shown on. Leaves out how tokens are drawn (engine.py).
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Self, TextIO

from llmc_jax.data.tokenizers import printable
from llmc_jax.generate.engine import Drawn, Dropped, Request, generate
from llmc_jax.generate.model import Model
from llmc_jax.machine.device import refusing_full_memory

STOPPED = "stopped"  # why a sample ended, beside those of `Drawn`: by Ctrl-C


@dataclass
class Sample:
    """One continuation."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    end: str = STOPPED  # until it ends


@dataclass
class Answer:
    """All that came of a request. Times in seconds."""

    samples: list[Sample]
    drops: list[Dropped] = field(default_factory=list)
    first: float = 0.0  # until the first token was there: compiling and prefill
    rest: float = 0.0  # from then on

    @property
    def tokens(self) -> int:
        """Return how many tokens were drawn, of all samples together."""
        return sum(len(sample.ids) for sample in self.samples)

    @property
    def rate(self) -> float | None:
        """Return the tokens of a second after the first one; None where no more came."""
        return (self.tokens - 1) / self.rest if self.rest else None


def ask(
    model: Model,
    request: Request,
    show: Callable[[Drawn], None] = lambda drawn: None,
    stop: threading.Event | None = None,
) -> Answer:
    """Return a request's answer; show gets each token as it comes, and stop, once set, ends it.

    Raises InputError as `generate` does, and where the device's memory is full.
    """
    answer = Answer([Sample() for _ in range(request.samples)])
    begin = time.perf_counter()
    events = generate(model, request)
    with refusing_full_memory("lower --samples or --tokens, or --dtype bf16"), closing(events):  # type: ignore[type-var]
        for event in events:
            if isinstance(event, Dropped):
                answer.drops.append(event)
                continue
            sample, now = answer.samples[event.sample], time.perf_counter() - begin
            sample.ids.append(event.token)
            sample.logprobs.append(event.logprob)
            sample.text += event.text
            sample.end = event.end or sample.end
            answer.first = answer.first or now
            answer.rest = now - answer.first
            show(event)
            if stop is not None and stop.is_set():
                break
    return answer


@contextmanager
def until_ctrl_c() -> Iterator[threading.Event]:
    """Within the block the first Ctrl-C sets the event, for whoever works to stop soon; the second one interrupts.

    Where Ctrl-C is switched off (nohup, jobs in the background), and outside the main thread, nothing happens.
    """
    stop = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None) or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Screen:
    """Shows a text, and what is added to it. Control characters are left out; left as a context, it ends the line."""

    def __init__(self, file: TextIO, prompt: str) -> None:
        """Show the prompt."""
        self._file, self._at_line_start = file, True
        self.write(prompt)

    def add(self, drawn: Drawn) -> None:
        """Show what a token lets out."""
        self.write(drawn.text)

    def write(self, text: str) -> None:
        """Show more of the text."""
        if text := printable(text):
            self._file.write(text)
            self._at_line_start = text.endswith("\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._at_line_start:
            self.write("\n")
