"""A text on a terminal or in a file: the prompt, then what the model adds as it comes.

Leaves out where the text comes from (answer.py), and what is said beside it (generate/command.py).
"""

import os
from typing import Self, TextIO

from llmc_jax.data.tokenizers import printable
from llmc_jax.generate.engine import Drawn

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def takes_colors(file: TextIO) -> bool:
    """Return whether colours may be written: to a terminal that knows them, unless NO_COLOR is set (no-color.org)."""
    return file.isatty() and os.environ.get("TERM", "") != "dumb" and not os.environ.get("NO_COLOR")


class Screen:
    """Shows a text, and what is added to it. Control characters are left out; left as a context, it ends the line."""

    def __init__(self, file: TextIO, prompt: str) -> None:
        """Show the prompt."""
        self._file, self._at_line_start = file, True
        dim, plain = (DIM, PLAIN) if prompt and takes_colors(file) else ("", "")
        file.write(dim)
        self.write(prompt)
        file.write(plain)

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
