"""Questions with several answers: which completion a model holds for likeliest, and whether that is the right one.

Pure: items become rows, what the model thinks of the rows becomes answers. Losses are float64 sums of the rows' float32
ones. Leaves out the files (data/), the model (scorer.py), and shares with their standard errors (figures.py).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmc_jax.data.evalfile import Item
from llmc_jax.generate.scorer import Row, Scored


class Answer(NamedTuple):
    """What the model thinks of an item's completions, each field in their order.

    losses: summed over the completion's tokens, nats. written: the model holds no other token for likelier, from the
    completion's first to its last; None where that was not asked for.
    """

    label: int
    losses: tuple[float, ...]
    tokens: tuple[int, ...]
    written: tuple[bool, ...] | None = None

    @property
    def right(self) -> bool:
        """Return whether the completion that is likeliest as a whole is the right one; of equals the first is."""
        return _smallest(self.losses) == self.label

    @property
    def right_norm(self) -> bool:
        """Return whether the completion of the smallest mean loss per token is the right one, as llm.c counts."""
        return _smallest([loss / count for loss, count in zip(self.losses, self.tokens, strict=True)]) == self.label


def rows_of_items(items: Iterable[Item]) -> Iterator[Row]:
    """Yield a row for each completion of each item: the context, and the completion, which alone is scored."""
    for item in items:
        for completion in item.completions:
            yield Row(np.asarray(item.context + completion, np.int32), len(item.context))


def answers(items: Sequence[Item], scored: Iterable[Scored]) -> list[Answer]:
    """Return the answers to items, given what the model thinks of all their rows, in whatever order."""
    found = {each.row: each for each in scored}
    rows = itertools.count()
    return [_answer(item.label, [found.pop(next(rows)) for _ in item.completions]) for item in items]


def _answer(label: int, scored: Sequence[Scored]) -> Answer:
    losses = tuple(float(each.losses.sum(dtype=np.float64)) for each in scored)
    written = tuple(not each.rank.any() for each in scored if each.rank is not None)
    return Answer(label, losses, tuple(len(each.losses) for each in scored), written or None)


def _smallest(values: Sequence[float]) -> int:
    """Return the place of the smallest value, as llm.c finds it: of equals the first, nan is smaller than nothing."""
    return min(range(len(values)), key=values.__getitem__)
