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
    "at the end of a line: a line end in the text, and more is to come. Ctrl-C stops the model, Ctrl-D ends"
)


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
    with contextlib.suppress(ImportError):
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
