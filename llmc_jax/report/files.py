"""What a page shows as files for other programs: its curves as CSV, with all points and digits, and as a PNG."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax.base.files import write_atomic
from llmc_jax.logs.picture import draw_curves
from llmc_jax.report.content import BEFORE
from llmc_jax.report.gather import Read
from llmc_jax.report.series import place

COLUMNS = ("run", "step", "tokens", "time")  # of the CSV, before the curves


def write_csv(runs: Sequence[Read], path: Path) -> None:
    """Write all curves into a CSV, a row for each step of each run. Raises InputError.

    tokens and time are those at which the row's last value was logged. A cell is empty where there is no value.
    """
    import csv

    keys = list(dict.fromkeys(key for run in runs for key in run.figures))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *keys])
    for run in runs:
        writer.writerows(csv_rows(run, keys))
    write_atomic(path, text.getvalue().encode(errors="backslashreplace"))


def csv_rows(run: Read, keys: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a run: name, step, tokens, time, and the curves' values."""
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.steps for each in run.figures.values())]))
    cells: dict[str, list[Any]] = {name: [""] * len(steps) for name in ("tokens", "time", *keys)}
    for key in sorted(run.figures, key=BEFORE.__contains__, reverse=True):  # the last word: what a step's update made
        _fill(cells, run, key, np.searchsorted(steps, run.figures[key].steps).tolist())
    name = run.shown.name
    name = f"'{name}" if name.startswith(("=", "+", "-", "@")) else name  # no formula in a spreadsheet
    yield from zip([name] * len(steps), steps.tolist(), *cells.values(), strict=True)


def _fill(cells: dict[str, list[Any]], run: Read, key: str, rows: list[int]) -> None:
    series = run.figures[key]
    x = place(run.axes, key, series.steps, series.times)
    for name, values in ((key, series.values), ("tokens", x.tokens), ("time", x.time)):
        if values is not None:
            for row, value in zip(rows, values.tolist(), strict=True):
                cells[name][row] = value


# ----- PNG ------------------------------------------------------------------------------------------------------------


def write_png(runs: Sequence[Read], path: Path, title: str = "") -> None:
    """Draw runs: one as the run itself does it, several over each other with their differences to the first.

    Raises InputError.
    """
    logs = [run.log._replace(path=run.shown.name) for run in runs]
    if len(logs) == 1:
        draw_curves([logs[0]._replace(path=title or logs[0].path)], path)
        return
    from llmc_jax.compare.logs import differences, draw_logs

    draw_logs(logs, differences(logs), path)
