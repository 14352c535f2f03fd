"""A request answered: its samples collected, shown as they come, and timed; Ctrl-C ends it between two tokens.

And a text written in turns: a line is typed, the model continues all that stands there, and so on.
Screen is the terminal or file that they are shown on. Leaves out how tokens are drawn (engine.py).
"""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self, TextIO

from llmc_jax.base.errors import InputError
from llmc_jax.data.tokenizers import printable, sample_text
from llmc_jax.generate.engine import Drawn, Dropped, Request, check_request, generate, kept_after_drop
from llmc_jax.generate.model import Model
from llmc_jax.generate.text import typed_ids
from llmc_jax.machine.device import refusing_full_memory

HELP = (
    "what you type is put behind the text, and the model continues it. An empty line: it just continues; a backslash "
    "at the end of a line: a line end in the text, and more is to come. Ctrl-C stops the model, Ctrl-D ends"
)
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


# ----- in turns -----------------------------------------------------------------------------------------------------


def talk(
    model: Model,
    request: Request,
    out: TextIO,
    note: Callable[[str], None],
    read: Callable[[str], str] = input,
) -> list[int]:
    """Read turns until the end of the input, and return the text. It begins with the request's prompt.

    read: returns a line after a mark, or raises EOFError. note: says what is not the text.
    """
    with suppress(ImportError):
        import readline  # noqa: F401  with it lines can be edited
    ids = continued(model, request, [], list(request.prompt), out, note) if request.prompt else []
    before = ""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = read(("... " if before else "> ") if terminal else "")
            if line.endswith("\\"):
                before += line[:-1] + "\n"
                continue
            text, before = before + line, ""
            typed = typed_ids(model.tokenizer, text, "this model has no tokenizer")
            ids = continued(model, request, ids, list(typed), out, note)
        except EOFError:
            if terminal:
                print(file=out)  # or the shell's mark would stand behind ours
            return ids
        except KeyboardInterrupt:  # at the mark: what was typed is dropped
            before = ""
            note("Ctrl-D ends")
        except InputError as error:
            note(str(error))


def continued(
    model: Model, request: Request, ids: list[int], typed: list[int], out: TextIO, note: Callable[[str], None]
) -> list[int]:
    """Show what was typed, let the model continue until it ends or Ctrl-C stops it, and return the whole text."""
    request = request._replace(prompt=(*ids, *typed))
    check_request(model, request)
    with until_ctrl_c() as stop, Screen(out, sample_text(model.tokenizer, typed)) as screen:
        answer = ask(model, request, screen.add, stop)
    (sample,) = answer.samples
    new = sample.ids
    if sample.end == "stop" and model.tokenizer is not None:  # the stop string is no part of the text
        new = model.tokenizer.encode(sample.text).tolist()
    if answer.drops:
        kept, T = kept_after_drop(model.config), model.config.max_seq_len
        note(f"the text is longer than T={T}: the model sees its newest {kept} to {T} tokens")
    if sample.end in ("end of text", STOPPED):
        note(STOPPED if sample.end == STOPPED else f"the model drew its {sample.end}")
    return [*request.prompt, *new]
