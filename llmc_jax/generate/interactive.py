"""A text written in turns: a line is typed, the model continues all that stands there, and so on.

Leaves out how tokens are drawn and shown (answer.py).
"""

import contextlib
import sys
from collections.abc import Callable
from typing import TextIO

from llmc_jax.base.errors import InputError
from llmc_jax.data.tokenizers import sample_text
from llmc_jax.generate.answer import STOPPED, Screen, ask, until_ctrl_c
from llmc_jax.generate.engine import Request, check_request, kept_after_drop
from llmc_jax.generate.model import Model
from llmc_jax.generate.text import typed_ids

HELP = (
    "what you type is put behind the text, and the model continues it. An empty line: it just continues; a backslash "
    "at the end of a line: a line end in the text, and more is to come; /again: take back what it added last, and draw "
    "anew; /undo: take back the last turn; /reset: a new text; //: a text that begins with /. Ctrl-C stops the model, "
    "Ctrl-D ends"
)


class Session:
    """A text that grows, and what can be done with it."""

    def __init__(self, model: Model, request: Request, out: TextIO, note: Callable[[str], None]) -> None:
        """Begin with a request, whose prompt is the beginning of the text. note: says what is not the text."""
        self.model, self.request = model, request
        self.ids: list[int] = []
        self._turns: list[tuple[int, int]] = []  # where in the text each begins, and where in it what was typed ends
        self._out, self._note = out, note
        if request.prompt:
            self.go_on(list(request.prompt))

    def take(self, text: str) -> None:
        """Do what was typed. Raises InputError for what cannot be."""
        commands = {"/again": self.again, "/undo": self.undo, "/reset": self.reset}
        if text in commands:
            commands[text]()
        elif text.startswith("/") and not text.startswith("//"):
            raise InputError(f"{text}: unknown command; there are {', '.join(commands)}; // begins a text with /")
        else:
            typed = text[1:] if text.startswith("//") else text
            self.go_on(list(typed_ids(self.model.tokenizer, typed, "this model has no tokenizer")))

    def go_on(self, typed: list[int]) -> None:
        """Put ids behind the text, and let the model continue; Ctrl-C stops it."""
        begin = len(self.ids)
        request = self.request._replace(prompt=(*self.ids, *typed))
        check_request(self.model, request)
        self.ids += typed
        self._turns.append((begin, len(self.ids)))
        self._draw(request)

    def again(self) -> None:
        """Take back what the model added last, and let it draw anew, with the next seed."""
        del self.ids[self._last()[1] :]
        sampling = self.request.sampling
        self.request = self.request._replace(sampling=sampling._replace(seed=(sampling.seed + 1) % (1 << 64)))
        self._draw(self.request._replace(prompt=tuple(self.ids)))

    def undo(self) -> None:
        """Take back the last turn."""
        del self.ids[self._last()[0] :]
        self._turns.pop()
        self._note(f"the text has {len(self.ids)} tokens now")

    def reset(self) -> None:
        """Begin a new text."""
        self.ids.clear()
        self._turns.clear()

    def _last(self) -> tuple[int, int]:
        if not self._turns:
            raise InputError("the text is empty; type its beginning, or an empty line")
        return self._turns[-1]

    def _draw(self, request: Request) -> None:
        """Show what was typed in this turn, let the model continue, and put that behind the text."""
        tokenizer, T = self.model.tokenizer, self.model.config.max_seq_len
        typed = sample_text(tokenizer, self.ids[slice(*self._last())])
        with until_ctrl_c() as stop, Screen(self._out, typed) as screen:
            answer = ask(self.model, request, screen.add, stop)
        (sample,) = answer.samples
        if sample.end == "stop" and tokenizer is not None:  # the stop string is no part of the text
            self.ids += tokenizer.encode(sample.text).tolist()
        else:
            self.ids += sample.ids
        if answer.drops:
            kept = kept_after_drop(self.model.config)
            self._note(f"the text is longer than T={T}: the model sees its newest {kept} to {T} tokens")
        if sample.end in ("end of text", STOPPED):
            self._note(STOPPED if sample.end == STOPPED else f"the model drew its {sample.end}")


def talk(
    model: Model,
    request: Request,
    out: TextIO,
    note: Callable[[str], None],
    read: Callable[[str], str] = input,
) -> None:
    """Read turns until the end of the input. read: returns a line after a mark, or raises EOFError."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  with it lines can be edited
    session, before = Session(model, request, out, note), ""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = read(("... " if before else "> ") if terminal else "")
            if line.endswith("\\"):
                before += line[:-1] + "\n"
                continue
            text, before = before + line, ""
            session.take(text)
        except EOFError:
            if terminal:
                print(file=out)  # or the shell's mark would stand behind ours
            return
        except KeyboardInterrupt:  # at the mark: what was typed is dropped
            before = ""
            note("Ctrl-D ends")
        except InputError as error:
            note(str(error))
