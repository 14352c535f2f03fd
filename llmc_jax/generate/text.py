"""Tokens to text that can be shown as they come: whole characters only, and nothing that may begin a stop string.

And from what is typed to tokens, where there may be no tokenizer.
Leaves out control characters, which a terminal must not be sent (data/tokenizers.py, `printable`).
"""

import codecs
from typing import Any

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import show_value
from llmc_jax.base.streams import escaped
from llmc_jax.data.tokenizers import Tokenizer

LONGEST_NUMBER = 18  # digits; Python refuses to read very many


class TextStream:
    """The text of one sample. Without a tokenizer the ids themselves, a space behind each."""

    def __init__(self, tokenizer: Tokenizer | None, stops: tuple[str, ...] = ()) -> None:
        """Begin a text. stops: it ends before the one of these that is complete first; none is empty."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._held = ""  # decoded and not let out: it may be the beginning of a stop string
        self.stopped = False  # a stop string has come

    def add(self, token: int) -> str:
        """Return the text that is certain after one more token; bytes that are not UTF-8 become U+FFFD."""
        if self._tokenizer is None:
            return self._out(f"{token} ")
        return self._out(self._decoder.decode(self._tokenizer.piece(token)))

    def finish(self) -> str:
        """Return what was held back, at the end of the text: half a character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._out(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + ("" if self.stopped else rest)

    def _out(self, text: str) -> str:
        self._held += text
        found = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, place = min(found)  # the first that is complete, however the text is cut into tokens
            text, self._held = self._held[:place], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def typed_ids(tokenizer: Tokenizer | None, text: str | bytes, place: str) -> tuple[int, ...]:
    """Return the ids of a text; without a tokenizer those that it lists, with spaces or commas between them.

    Raises InputError, with the place.
    """
    if tokenizer is not None:
        return tuple(tokenizer.encode(text).tolist())
    listed = text if isinstance(text, str) else text.decode(errors="replace")
    words = listed.replace(",", " ").split()
    bad = next((word for word in words if not word.isdecimal() or len(word) > LONGEST_NUMBER), None)
    if bad is not None:
        raise InputError(f"{place}: {show_value(bad)} is no token id; expected whole numbers from 0 on, as in 12 345")
    return tuple(map(int, words))


def piece(tokenizer: Tokenizer | None, token: int) -> str:
    """Return the bytes of an id so that all of them can be seen; nothing in it moves a terminal's cursor.

    Bytes that make no character are escaped, as in Python. Where no tokenizer has the id, it stands for itself.
    """
    if tokenizer is None or token >= tokenizer.vocab_size:
        return str(token)
    return escaped(tokenizer.piece(token).replace(b"\\", b"\\\\").decode(errors="backslashreplace"))


def with_pieces(tokenizer: Tokenizer | None, each: Any) -> dict[str, Any]:
    """Return a token that was drawn (`Drawn`) or looked at (`Seen`) as JSON has it, with a text beside each id."""
    candidates = [[token, piece(tokenizer, token), logprob] for token, logprob in each.candidates]
    return each._asdict() | {"piece": piece(tokenizer, each.token), "candidates": candidates}


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop`, shorter than itself, that `text` ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
