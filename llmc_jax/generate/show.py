"""How a text is shown: the prompt, then what the model adds as it comes; several samples one after the other.

Leaves out where the text comes from (answer.py), and what is said beside it (generate/command.py).
"""

from typing import Self, TextIO

from llmc_jax.data.tokenizers import printable
from llmc_jax.generate.engine import Drawn
from llmc_jax.generate.probabilities import takes_colors

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """Shows a text, and what is added to it, on a terminal or in a file. Control characters are left out.

    Samples are computed together, but read one after the other: the first that has not ended is shown as it comes, and
    what has come of the others waits for its turn. Left as a context, it has shown all that came.
    """

    def __init__(self, file: TextIO, prompt: str, samples: int = 1) -> None:
        """Show the prompt. samples: of more than one, each begins with a line that says its number, and the prompt."""
        self._file, self._prompt, self._samples = file, prompt, samples
        self._waiting, self._ended = [""] * samples, [False] * samples
        self._current = 0
        self._at_line_start = True
        self._begin()

    def add(self, drawn: Drawn) -> None:
        """Show what a token lets out, now or when it is its sample's turn."""
        self._waiting[drawn.sample] += drawn.text
        self._ended[drawn.sample] |= bool(drawn.end)
        self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Show what still waits, where it has not come to an end, and end the last line."""
        self._ended = [True] * self._samples
        self._show()

    def _show(self) -> None:
        while self._current < self._samples:
            self._write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._ended[self._current]:
                break
            if not self._at_line_start:
                self._write("\n")
            self._current += 1
            if self._current < self._samples:
                self._begin()
        self._file.flush()

    def _begin(self) -> None:
        if self._samples > 1:
            self._write(f"--- sample {self._current + 1} of {self._samples} ---\n")
        if self._prompt:
            dim, plain = (DIM, PLAIN) if takes_colors(self._file) else ("", "")
            self._file.write(dim)
            self._write(self._prompt)
            self._file.write(plain)
        self._file.flush()

    def _write(self, text: str) -> None:
        text = printable(text)
        if text:
            self._file.write(text)
            self._at_line_start = text.endswith("\n")
