"""Results of several models side by side: a table, and plain data for JSON. Leaves out where they come from."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from llmc_jax import text
from llmc_jax.evaluate.choices import Mean
from llmc_jax.evaluate.figures import Figure, difference
from llmc_jax.evaluate.subjects import Result

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DECIMALS = {"perplexity": 3}  # of a figure; else USUAL
USUAL = 4


class Subject(NamedTuple):
    """A text or task, and what each of the models makes of it."""

    kind: str  # data, text or task
    name: str
    results: Sequence[Result]

    def differences(self, figures: Sequence[Sequence[Figure]]) -> list[dict[str, Mean]]:
        """Return by model what its figures, by name, differ by from the first one's; nothing where units differ.

        figures: of each model.
        """
        first = {figure.name: figure for figure in figures[0]}
        return [
            {own.name: difference(own, first[own.name]) for own in each if own.name in first}
            if number and result.key == self.results[0].key
            else {}
            for number, (result, each) in enumerate(zip(self.results, figures, strict=True))
        ]


def table(subjects: Sequence[Subject], positions: int, *, by_position: bool = False, width: int | None = None) -> str:
    """Return the figures of all subjects as lines of text: a column for each model, and their differences to the first.

    by_position: also the loss in each bin of positions.
    """
    models = len(subjects[0].results)
    letters = LETTERS[:models]
    values = list(letters) if models > 1 else ["value"]
    differences = [f"{letter} - A" for letter in letters[1:]]
    rows: list[list[str]] = []
    for subject in subjects:
        rows += [[], *_rows(subject, positions, by_position)] if rows else _rows(subject, positions, by_position)
    headings = ["of", "figure", *values, *differences]
    return text.table(headings, rows, left=("of", "figure"), optional=differences[::-1], width=width)


def _rows(subject: Subject, positions: int, by_position: bool) -> list[list[str]]:
    facts = _facts(subject, positions)
    kinds = [[each.figures for each in subject.results]]
    if by_position and subject.kind != "task":
        kinds.append([[bin._replace(name=f"loss at {bin.name}") for bin in each.bins] for each in subject.results])
    lines = [line for figures in kinds for line in _figure_rows(subject, figures)]
    left = [subject.name, *(f"  {fact}" for fact in facts)]
    filled = max(len(left), len(lines))
    left += [""] * (filled - len(left))
    lines += [[]] * (filled - len(lines))
    return [[name, *line] for name, line in zip(left, lines, strict=True)]


def _facts(subject: Subject, positions: int) -> list[str]:
    """Return how much of a text or task there is, as far as it is the same for all models."""
    first, *others = (result.facts for result in subject.results)
    same = {name for name in first if all(other.get(name) == first[name] for other in others)}
    words = {"tokens": "{:,} tokens", "rows": f"{{:,}} rows, T={positions}", "items": "{:,} items"}
    words["chance"] = "by chance {:.4f}"
    return [words[name].format(first[name]) for name in words if name in same]


def _figure_rows(subject: Subject, figures: Sequence[Sequence[Figure]]) -> list[list[str]]:
    """Return a line for each figure. figures: of each model."""
    names = [figure.name for figure in max(figures, key=len)]
    values = [{figure.name: _mean(figure) for figure in own} for own in figures]
    apart = subject.differences(figures)[1:]

    def cells(name: str) -> list[str]:
        own = [shown(name, each[name]) if name in each else "" for each in values]
        return own + [shown(name, each[name], "+") if name in each else "" for each in apart]

    return [[name, *cells(name)] for name in names]


def _mean(figure: Figure) -> Mean:
    return Mean(figure.value, figure.error)


def shown(name: str, mean: Mean, sign: str = "") -> str:
    """Return a figure and its standard error: 1.2345 ± 0.0012."""
    decimals = DECIMALS.get(name, USUAL)
    value = f"{mean.value:{sign},.{decimals}f}"
    return value if math.isnan(mean.error) else f"{value} ± {mean.error:,.{decimals}f}"


def plain_data(subject: Subject, by_position: bool) -> dict[str, Any]:
    """Return a subject and its results, for JSON."""
    apart = subject.differences([result.figures for result in subject.results])
    results = []
    for result, differences in zip(subject.results, apart, strict=True):
        data: dict[str, Any] = {**result.facts, **{_key(each.name): _mean(each)._asdict() for each in result.figures}}
        if differences:
            data["difference"] = {_key(name): each._asdict() for name, each in differences.items()}
        if by_position and result.positions is not None:
            data["positions"] = result.positions._asdict()
        results.append(data)
    return {"kind": subject.kind, "name": subject.name, "results": results}


def _key(name: str) -> str:
    return name.replace(" ", "_")
