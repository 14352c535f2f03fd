"""The loss of a model over texts: all of a text or its first batches, by row and by position in the context.

A text is one or more pieces of tokens: token files, or a text made into tokens. It is cut into rows of T positions; no
row goes beyond a piece. Leaves out tokenizers, several models (report.py) and the model itself (scorer.py).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.data.tokenfile import TokenFile, expand_pattern, open_token_file
from llmc_jax.evaluate.figures import Figure, exponential, ratio, scaled
from llmc_jax.generate.scorer import Row, Scorer, cut, score


class Piece(NamedTuple):
    """Tokens in a row without a gap. read(start, count) gives some of them, (count,) of any integer dtype."""

    name: str
    tokens: int
    read: Callable[[int, int], np.ndarray]


class Span(NamedTuple):
    """A row: the ids of a piece from `start` to `end`, of which those from number `first` on are scored."""

    piece: int
    start: int
    first: int
    end: int

    @property
    def scored(self) -> int:
        """Return how many ids are scored."""
        return self.end - self.start - self.first


class Losses(NamedTuple):
    """What a model makes of a text, row by row.

    sums, counts, bytes: (R,) of the scored tokens' losses, their number, and the bytes that they stand for (None: not
    known). bins: (R, bins) sums and counts of positions 1, 2, 3-4, 5-8, … (`bin_edges`).
    """

    sums: np.ndarray
    counts: np.ndarray
    bytes: np.ndarray | None
    bin_sums: np.ndarray
    bin_counts: np.ndarray

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


def rows_of_text(
    pieces: Sequence[Piece], positions: int, stride: int | None = None, batches: int | None = None, batch_rows: int = 1
) -> list[Span]:
    """Return the rows of a text, all or those of so many batches. Raises InputError where there is none."""
    if batches is not None:
        return first_batches(pieces, positions, batch_rows, batches)
    if not (found := spans(pieces, positions, stride)):
        tokens = sum(piece.tokens for piece in pieces)
        raise InputError(f"{pieces[0].name}: holds {tokens} tokens; a loss takes two, one to be given another")
    return found


def spans(pieces: Sequence[Piece], positions: int, stride: int | None = None) -> list[Span]:
    """Return the rows of whole pieces: each of T positions, the last one of a piece of what is left.

    stride: ids from the beginning of a row to that of the next, at most T; None: T, so that no id is read twice. Every
    id but a piece's first is scored once, in the first row that has it as a target.
    """
    stride = stride or positions
    return [Span(at, *each) for at, piece in enumerate(pieces) for each in cut(piece.tokens, positions, stride)]


def first_batches(pieces: Sequence[Piece], positions: int, rows: int, batches: int) -> list[Span]:
    """Return the rows of the first batches of `rows` rows each, which are those that training validates on.

    As in training, what is left of a piece after its last whole batch is left out. Fewer where there are not as many:
    training would begin anew. Raises InputError for a piece that is too small for a batch.
    """
    needed = rows * positions + 1
    for piece in pieces:
        if piece.tokens < needed:
            raise InputError(
                f"{piece.name}: holds {piece.tokens:,} tokens; one batch takes {needed:,} (-b {rows} * T={positions} + "
                "1 for the last target): lower -b or -t, or leave --batches out"
            )
    whole = [
        Span(number, row * positions, 1, (row + 1) * positions + 1)
        for number, piece in enumerate(pieces)
        for row in range((piece.tokens - 1) // (rows * positions) * rows)
    ]
    return whole[: batches * rows]


def bin_edges(positions: int) -> list[int]:
    """Return where bins of positions (from 0) begin and the last one ends: each has twice as many as the one before."""
    return [0, *(1 << power for power in range((positions - 1).bit_length())), positions]


def bin_names(positions: int) -> list[str]:
    """Return the bins as a reader counts positions: 1, 2, 3-4, 5-8, …"""
    edges = bin_edges(positions)
    return [f"{low + 1}" if high == low + 1 else f"{low + 1}-{high}" for low, high in itertools.pairwise(edges)]


# ----- losses -------------------------------------------------------------------------------------------------------


def losses(
    scorer: Scorer,
    pieces: Sequence[Piece],
    rows: Sequence[Span],
    positions: int,
    bytes_of: np.ndarray | None = None,
    told: Callable[[int], None] = lambda tokens: None,
) -> Losses:
    """Return what a model makes of rows of a text.

    bytes_of: (V,) the bytes that each id stands for; None: not known. told: is called with the tokens of each row that
    is done. The figures are the same on any number of devices.
    """
    sizes = np.zeros(len(rows), np.int64)

    def read() -> Iterator[Row]:
        for number, span in enumerate(rows):
            ids = pieces[span.piece].read(span.start, span.end - span.start)
            if bytes_of is not None:
                sizes[number] = bytes_of[ids[span.first :]].sum()
            yield Row(ids, span.first)

    kept = [np.zeros(0, np.float32)] * len(rows)  # 4 bytes a token
    for each in score(scorer, read()):
        told(rows[each.row].scored)
        kept[each.row] = each.losses
    edges = bin_edges(positions)
    sums, bin_sums = np.zeros(len(rows)), np.zeros((len(rows), len(edges) - 1))
    for number, (span, narrow) in enumerate(zip(rows, kept, strict=True)):  # in an order that no devices decide
        wide = narrow.astype(np.float64)
        sums[number], bin_sums[number] = wide.sum(), binned(span, wide, edges)
    counts = np.array([span.scored for span in rows], np.int64)
    bin_counts = np.array([binned(span, np.ones(span.scored), edges) for span in rows], np.int64)
    return Losses(sums, counts, None if bytes_of is None else sizes, bin_sums, bin_counts)


def binned(span: Span, values: np.ndarray, edges: Sequence[int]) -> np.ndarray:
    """Return the sums of a row's values (k,) in each bin of positions."""
    places = np.clip(np.asarray(edges) - (span.first - 1), 0, len(values))
    return np.array([values[low:high].sum() for low, high in itertools.pairwise(places)])


# ----- figures ------------------------------------------------------------------------------------------------------


def figures(found: Losses) -> list[Figure]:
    """Return loss, perplexity and, where bytes are known, bits per byte. The units are rows."""
    loss = ratio("loss", found.sums, found.counts)
    usual = [loss, exponential("perplexity", loss)]
    if found.bytes is None or not found.bytes.any():
        return usual
    return [*usual, scaled("bits per byte", ratio("", found.sums, found.bytes), 1 / math.log(2))]


def figures_by_position(found: Losses, positions: int) -> list[Figure]:
    """Return the loss in each bin of positions that has tokens."""
    names = bin_names(positions)
    columns = zip(names, found.bin_sums.T, found.bin_counts.T, strict=True)
    return [ratio(name, sums, counts) for name, sums, counts in columns if counts.any()]
