"""Questions with several answers: which completion a model holds for likeliest, and how often that is the right one.

Pure: items become rows, what the model thinks of the rows becomes answers, answers become figures. All figures are
float64 sums of the rows' float32 losses. Leaves out the files (data/) and the model (scorer.py).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from llmc_jax.data.items import Item
from llmc_jax.evaluate.scorer import Row, Scored


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
    def by_sum(self) -> int:
        """Return the completion that is likeliest as a whole; of equals the first."""
        return _smallest(self.losses)

    @property
    def by_mean(self) -> int:
        """Return the completion of the smallest mean loss per token, which is llm.c's choice; of equals the first."""
        return _smallest([loss / count for loss, count in zip(self.losses, self.tokens, strict=True)])


class Share(NamedTuple):
    """How many of some items are right."""

    right: int
    items: int

    @property
    def value(self) -> float:
        """Return the share of right ones; nan of no items."""
        return self.right / self.items if self.items else math.nan

    @property
    def error(self) -> float:
        """Return its standard error; nan of fewer than two items."""
        return math.sqrt(self.value * (1 - self.value) / (self.items - 1)) if self.items > 1 else math.nan


class Mean(NamedTuple):
    """A mean and its standard error; nan of too few values."""

    value: float
    error: float


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
    written = tuple(bool(each.best.all()) for each in scored if each.best is not None)
    return Answer(label, losses, tuple(len(each.losses) for each in scored), written or None)


def accuracy(found: Sequence[Answer]) -> Share:
    """Return how often the completion that is likeliest as a whole is the right one."""
    return Share(sum(each.by_sum == each.label for each in found), len(found))


def accuracy_norm(found: Sequence[Answer]) -> Share:
    """Return how often the completion of the smallest mean loss per token is the right one: llm.c's accuracy."""
    return Share(sum(each.by_mean == each.label for each in found), len(found))


def accuracy_written(found: Sequence[Answer]) -> Share:
    """Return how often the model would have written the right completion itself (LAMBADA). Asks for `written`."""
    return Share(sum(each.written is not None and each.written[each.label] for each in found), len(found))


def perplexity(found: Sequence[Answer]) -> Mean:
    """Return e to the mean loss of the right completions, each as a whole; the error is that of first order."""
    losses = np.array([each.losses[each.label] for each in found])
    mean = mean_of(losses)
    value = float(np.exp(mean.value))
    return Mean(value, value * mean.error)


def mean_of(values: np.ndarray) -> Mean:
    """Return the mean of values (n,) and its standard error."""
    count = len(values)
    value = float(np.mean(values, dtype=np.float64)) if count else math.nan
    error = float(np.std(values, ddof=1, dtype=np.float64)) / math.sqrt(count) if count > 1 else math.nan
    return Mean(value, error)


def _smallest(values: Sequence[float]) -> int:
    """Return the place of the smallest value, as llm.c finds it: of equals the first, nan is smaller than nothing."""
    return min(range(len(values)), key=values.__getitem__)
