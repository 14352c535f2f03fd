"""Results of several models side by side: a table, and plain data for JSON. Leaves out where they come from."""

import math
from collections.abc import Sequence
from itertools import zip_longest
from string import ascii_uppercase
from typing import Any, NamedTuple

from llmc_jax.base import text
from llmc_jax.evaluate.figures import Mean, difference
from llmc_jax.evaluate.subjects import Result

DECIMALS = {"perplexity": 3}  # of a figure; all others have 4


class Subject(NamedTuple):
    """A text or task, and what each of the models makes of it."""

    kind: str  # data, text or task
    name: str
    results: Sequence[Result]

    def differences(self) -> list[dict[str, Mean]]:
        """Return by model what its figures, by name, differ by from the first one's; nothing where units differ."""
        first = {figure.name: figure for figure in self.results[0].figures}
        return [
            {own.name: difference(own, first[own.name]) for own in result.figures if own.name in first}
            if number and result.key == self.results[0].key
            else {}
            for number, result in enumerate(self.results)
        ]


def table(subjects: Sequence[Subject], positions: int, *, width: int | None = None) -> str:
    """Return the figures of all subjects as a table: a column for each model, and their differences to the first."""
    models = len(subjects[0].results)
    letters = ascii_uppercase[:models]
    values = list(letters) if models > 1 else ["value"]
    differences = [f"{letter} - A" for letter in letters[1:]]
    rows: list[list[str]] = []
    for subject in subjects:
        rows += [[], *_rows(subject, positions)] if rows else _rows(subject, positions)
    headings = ["of", "figure", *values, *differences]
    return text.table(headings, rows, left=("of", "figure"), optional=differences[::-1], width=width)


def _rows(subject: Subject, positions: int) -> list[list[str]]:
    same, apart = _facts(subject, positions)
    left = [subject.name, *(f"  {fact}" for fact in same)]
    return [[name, *line] for name, line in zip_longest(left, _figure_rows(subject) + apart, fillvalue="")]


def _facts(subject: Subject, positions: int) -> tuple[list[str], list[list[str]]]:
    """Return how much of a text or task there is: in words what is the same for all models, and a line for each fact
    that is not, since they read other tokens.
    """
    words = {"tokens": "{:,} tokens", "rows": f"{{:,}} rows, T={positions}", "items": "{:,} items"}
    same, apart = list[str](), list[list[str]]()
    for name, word in (words | {"chance": "by chance {:.4f}"}).items():
        values = [result.facts.get(name) for result in subject.results]
        if len(set(values)) > 1:
            apart.append([name, *(f"{value:,}" for value in values)])
        elif values[0] is not None:  # of a task, where this is a text's
            same.append(word.format(values[0]))
    return same, apart


def _figure_rows(subject: Subject) -> list[list[str]]:
    """Return a line for each figure."""
    figures = [each.figures for each in subject.results]
    names = [figure.name for figure in max(figures, key=len)]
    values = [{figure.name: figure.mean for figure in own} for own in figures]
    apart = subject.differences()[1:]

    def cells(name: str) -> list[str]:
        own = [shown(name, each[name]) if name in each else "" for each in values]
        return own + [shown(name, each[name], "+") if name in each else "" for each in apart]

    return [[name, *cells(name)] for name in names]


def shown(name: str, mean: Mean, sign: str = "") -> str:
    """Return a figure and its standard error: 1.2345 ± 0.0012."""
    decimals = DECIMALS.get(name, 4)
    value = f"{mean.value:{sign},.{decimals}f}"
    return value if math.isnan(mean.error) else f"{value} ± {mean.error:,.{decimals}f}"


def plain_data(subject: Subject) -> dict[str, Any]:
    """Return a subject and its results, for JSON."""
    results = []
    for result, differences in zip(subject.results, subject.differences(), strict=True):
        data: dict[str, Any] = {**result.facts, **{_key(each.name): each.mean._asdict() for each in result.figures}}
        if differences:
            data["difference"] = {_key(name): each._asdict() for name, each in differences.items()}
        results.append(data)
    return {"kind": subject.kind, "name": subject.name, "results": results}


def _key(name: str) -> str:
    return name.replace(" ", "_")
