"""The loss of a model over texts, row by row.

A text is one or more pieces of tokens: token files, or a text made into tokens. It is cut into rows of T positions; no
row goes beyond a piece. Leaves out tokenizers, several models (report.py) and the model itself (scorer.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data.tokenfile import TokenFile, expand_pattern, open_token_file
from llmc_jax.evaluate.figures import Figure, exponential, ratio
from llmc_jax.generate.scorer import Row, Scorer, cut, score


class Piece(NamedTuple):
    """Tokens in a row without a gap. read(start, count) gives some of them, (count,) of any integer dtype."""

    name: str
    tokens: int
    read: Callable[[int, int], np.ndarray]


class Span(NamedTuple):
    """A row: the ids of a piece from `start` to `end`, all but the first of which are scored."""

    piece: int
    start: int
    end: int

    @property
    def scored(self) -> int:
        """Return how many ids are scored."""
        return self.end - self.start - 1


class Losses(NamedTuple):
    """What a model makes of a text, row by row.

    sums, counts, bytes: (R,) of the scored tokens' losses, their number, and the bytes that they stand for (None: not
    known).
    """

    sums: np.ndarray
    counts: np.ndarray
    bytes: np.ndarray | None

    @property
    def tokens(self) -> int:
        """Return how many tokens were scored."""
        return int(self.counts.sum())


# ----- pieces -------------------------------------------------------------------------------------------------------


def pieces_of_files(pattern: str, flag: str, vocab_size: int) -> tuple[Piece, ...]:
    """Return the token files that a pattern names, in order, as pieces of one text. They stay open.

    flag: what named them. Reading a piece raises FormatError for an id that is not below vocab_size.
    """
    files = [open_token_file(path) for path in expand_pattern(pattern, flag)]
    return tuple(_piece_of_file(file, flag, vocab_size) for file in files)


def _piece_of_file(file: TokenFile, flag: str, vocab_size: int) -> Piece:
    def read(start: int, count: int) -> np.ndarray:
        tokens = file.read(start, count)
        if foreign := file.foreign_id(start, tokens, vocab_size):
            raise FormatError(
                f"{flag} {file.path}: {foreign}; the file was probably made with a different tokenizer than the "
                "model's data: make it with the tokenizer that fits"
            )
        return tokens

    return Piece(str(file.path), file.num_tokens, read)


def piece_of_ids(name: str, ids: np.ndarray) -> Piece:
    """Return ids (n,) as a piece."""
    return Piece(name, len(ids), lambda start, count: ids[start : start + count])


# ----- rows ---------------------------------------------------------------------------------------------------------


def rows_of_text(pieces: Sequence[Piece], positions: int, limit: int | None = None) -> list[Span]:
    """Return the rows of a text, or the first `limit`: each of T positions, the last one of a piece of what is left.

    Every id but a piece's first is scored once. The first rows of a token file are those that training validates on.
    Raises InputError where there is none.
    """
    found = [
        Span(number, start, end)
        for number, piece in enumerate(pieces)
        for start, _, end in cut(piece.tokens, positions, positions)
    ]
    if not found:
        tokens = sum(piece.tokens for piece in pieces)
        raise InputError(f"{pieces[0].name}: holds {tokens} tokens; a loss takes two, one to be given another")
    return found[:limit]


# ----- losses -------------------------------------------------------------------------------------------------------


def losses(
    scorer: Scorer,
    pieces: Sequence[Piece],
    rows: Sequence[Span],
    bytes_of: np.ndarray | None = None,
    told: Callable[[int], None] = lambda tokens: None,
) -> Losses:
    """Return what a model makes of rows of a text.

    bytes_of: (V,) the bytes that each id stands for; None: not known. told: is called with the tokens of each row that
    is done. The figures are the same on any number of devices.
    """
    sizes, sums = np.zeros(len(rows), np.int64), np.zeros(len(rows))

    def read() -> Iterator[Row]:
        for number, span in enumerate(rows):
            ids = pieces[span.piece].read(span.start, span.end - span.start)
            if bytes_of is not None:
                sizes[number] = bytes_of[ids[1:]].sum()
            yield Row(ids)

    for each in score(scorer, read()):
        told(rows[each.row].scored)
        sums[each.row] = each.losses.sum(dtype=np.float64)
    return Losses(sums, np.array([span.scored for span in rows], np.int64), None if bytes_of is None else sizes)


# ----- figures ------------------------------------------------------------------------------------------------------


def figures(found: Losses) -> list[Figure]:
    """Return loss, perplexity and, where bytes are known, bits per byte. The units are rows."""
    loss = ratio("loss", found.sums, found.counts)
    usual = [loss, exponential("perplexity", loss)]
    if found.bytes is None or not found.bytes.any():
        return usual
    return [*usual, ratio("bits per byte", found.sums / math.log(2), found.bytes)]
