"""A text written in turns: a line is typed, the model continues all that stands there, and so on.

Leaves out how tokens are drawn and shown (answer.py, show.py).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import reason
from llmc_jax.base.text import wrapped
from llmc_jax.data.tokenizers import sample_text
from llmc_jax.generate.answer import STOPPED, ask, until_ctrl_c
from llmc_jax.generate.engine import Request, check_request, kept_after_drop
from llmc_jax.generate.model import Model
from llmc_jax.generate.show import Screen
from llmc_jax.generate.text import typed_ids

HISTORY_LINES = 2000
HELP = """\
What you type is appended to the text, and the model continues. An empty line: it just continues. A backslash
at the end of a line: the text has a line end there, and more is to come. Ctrl-C: the model stops. Ctrl-D: the end.
  /again             take back what the model added last, and let it draw anew (with the next seed)
  /undo              take back what it added last, and what was typed before
  /reset             begin a new text
  /text              show the whole text
  /set               show the settings; /set NAME VALUE changes one: {names}
  /help, /quit
  //...              a text that begins with /"""
WORDS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


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

    def take(self, text: str) -> bool:
        """Do what was typed; return False where that was to end it. Raises InputError for what cannot be."""
        word, _, rest = text.partition(" ")
        if word in ("/quit", "/exit", "/q"):
            return False
        if not text.startswith("/") or text.startswith("//"):
            typed = text[1:] if text.startswith("//") else text
            self.go_on(list(typed_ids(self.model.tokenizer, typed, "this model has no tokenizer")))
        elif (command := getattr(self, f"do_{word[1:]}", None)) is not None:
            command(rest.strip())
        else:
            meant = f"did you mean /set {word[1:]} {rest}? " if word[1:] in self._settings() else ""
            raise InputError(f"{word}: unknown command; {meant}/help lists them; // begins a text with /")
        return True

    def go_on(self, typed: list[int]) -> None:
        """Put ids behind the text, and let the model continue; Ctrl-C stops it."""
        begin = len(self.ids)
        request = self.request._replace(prompt=(*self.ids, *typed))
        check_request(self.model, request)
        self.ids += typed
        self._turns.append((begin, len(self.ids)))
        self._draw(request)

    def _draw(self, request: Request) -> None:
        """Show what was typed in this turn, let the model continue, and put that behind the text."""
        tokenizer, T = self.model.tokenizer, self.model.config.max_seq_len
        with (
            until_ctrl_c() as stop,
            Screen(self._out, sample_text(tokenizer, self.ids[slice(*self._last())])) as screen,
        ):
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

    def _last(self) -> tuple[int, int]:
        if not self._turns:
            raise InputError("the text is empty; type its beginning, or an empty line")
        return self._turns[-1]

    def _settings(self) -> dict[str, Any]:
        request = self.request
        stop = request.stops[0] if len(request.stops) == 1 else list(request.stops) or "none"
        own = {"tokens": request.tokens, "stop": stop, "ignore-end": request.ignore_end}
        return {name.replace("_", "-"): value for name, value in request.sampling._asdict().items()} | own

    # ----- commands, each with what stands behind it

    def do_again(self, rest: str) -> None:
        """Take back what the model added last, and let it draw anew."""
        del self.ids[self._last()[1] :]
        sampling = self.request.sampling
        self.request = self.request._replace(sampling=sampling._replace(seed=(sampling.seed + 1) % (1 << 64)))
        self._draw(self.request._replace(prompt=tuple(self.ids)))

    def do_undo(self, rest: str) -> None:
        """Take back the last turn."""
        del self.ids[self._last()[0] :]
        self._turns.pop()
        self._note(f"the text has {len(self.ids)} tokens now")

    def do_reset(self, rest: str) -> None:
        """Begin a new text."""
        self.ids.clear()
        self._turns.clear()
        self._note("a new text")

    def do_text(self, rest: str) -> None:
        """Show the whole text."""
        print(sample_text(self.model.tokenizer, self.ids), file=self._out, flush=True)

    def do_help(self, rest: str) -> None:
        """Show what can be typed."""
        lines = HELP.format(names=", ".join(self._settings())).splitlines()
        print(*map(wrapped, lines), sep="\n", file=self._out, flush=True)

    def do_set(self, rest: str) -> None:
        """Change a setting, or show all."""
        name, _, value = rest.partition(" ")
        name, settings = name.removeprefix("--").replace("_", "-"), self._settings()
        if not name:
            print(*(f"  {each:<20} {now}" for each, now in settings.items()), sep="\n", file=self._out, flush=True)
            return
        if name not in settings:
            raise InputError(f"/set {name}: there is no such setting; there are {', '.join(settings)}")
        request = _changed(self.request, name.replace("-", "_"), value.strip(), type(settings[name]))
        check_request(self.model, request._replace(prompt=tuple(self.ids)))
        self.request = request


def _changed(request: Request, name: str, value: str, kind: type) -> Request:
    """Return a request with another value of a setting. Raises InputError for one of another type."""
    if name == "stop":
        return request._replace(stops=() if value in ("", "none") else (value,))
    try:
        new: dict[str, Any] = {name: WORDS[value.lower()] if kind is bool else kind(value)}
    except (KeyError, ValueError):
        expected = {bool: "on or off", int: "a whole number"}.get(kind, "a number")
        raise InputError(f"/set {name}: expected {expected}, found {value!r}") from None
    if name in request.sampling._fields:
        return request._replace(sampling=request.sampling._replace(**new))
    return request._replace(**new)


def talk(
    model: Model,
    request: Request,
    out: TextIO,
    note: Callable[[str], None],
    read: Callable[[str], str] | None = None,
) -> None:
    """Read turns until the end of the input, or /quit. read: returns a line after a mark, or raises EOFError."""
    read = read or line_of_input
    session, mark, before = Session(model, request, out, note), "> ", ""
    while True:
        try:
            line = read("... " if before else mark)
            if line.endswith("\\"):
                before += line[:-1] + "\n"
                continue
            text, before = before + line, ""
            if not session.take(text):
                return
        except EOFError:
            if sys.stdin is not None and sys.stdin.isatty():
                print(file=out)  # or the shell's mark would stand behind ours
            return
        except KeyboardInterrupt:  # at the mark: what was typed is dropped
            before = ""
            note("/quit or Ctrl-D ends")
        except InputError as error:
            note(str(error))


def line_of_input(mark: str) -> str:
    """Return a line of standard input without its end; on a terminal it can be edited. Raises EOFError at the end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input(mark)
    if sys.stdin.isatty():
        print(mark, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


@contextlib.contextmanager
def history(file: Path | None, note: Callable[[str], None]) -> Iterator[None]:
    """Within the block lines can be edited as in a shell, with those of earlier sessions, which the file keeps.

    None, a Python without readline, no terminal: nothing is read or kept. A file that cannot be written is told.
    """
    try:
        import readline
    except ImportError:
        file = None
    if file is None or not sys.stdin.isatty():
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
            file.chmod(0o600)
        except OSError as error:
            note(f"{file}: what was typed cannot be kept ({reason(error)})")
