"""What a learning-rate range test leaves: find_lr.json, find_lr.png, its event, and words on the screen.

matplotlib is imported when the picture is drawn, and used without pyplot.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmc_jax import cluster
from llmc_jax.base.commands import typed
from llmc_jax.base.files import plain, write_atomic
from llmc_jax.base.pictures import PALETTE, save_figure
from llmc_jax.config.flags import given_options
from llmc_jax.config.train import OPTIONS, TrainConfig
from llmc_jax.logs.curves import Curve, finite, loss_range
from llmc_jax.logs.picture import show_range
from llmc_jax.run.find_lr import RangeTest
from llmc_jax.run.state import Progress, Run

FIND_LR, PICTURE = "find_lr.json", "find_lr.png"
EACH, MEAN, CHOSEN = PALETTE[0], PALETTE[0], PALETTE[1]
REPLACED = ("preset", "learning_rate", "find_lr", "find_lr_range", "find_lr_steps")  # in the command that uses a rate


def figures(run: Run, test: RangeTest) -> dict[str, Any]:
    """Return what a test found: the fields of its event."""
    at = test.lowest
    return {
        "suggestion": test.suggestion,
        "lowest_loss": None if at is None else test.means[at],  # smoothed
        "lowest_at": None if at is None else test.rates[at],
        "exploded_at": test.rates[-1] if test.exploded else None,
        "steps": run.setup.steps,
        "range": run.setup.config.find_lr_range,
    }


def write_found(run: Run, progress: Progress) -> None:
    """Write what a test found into the run's folder, and the event. Raises InputError."""
    test, folder = progress.test, run.held.folder
    run.log.event("find_lr", step=progress.step, **figures(run, test))
    if cluster.here().rank:
        return
    run.held.check()
    record = {**figures(run, test), **test.to_json(), "smoothed": list(test.means)}
    write_atomic(folder / FIND_LR, (json.dumps(plain(record), indent=1, allow_nan=False) + "\n").encode())
    draw_test(test, folder / PICTURE, f"{run.setup.name}: learning-rate range test")


def draw_test(test: RangeTest, out_png: Path, title: str = "") -> None:
    """Draw the loss over the rate into a PNG, the suggestion marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=110)
    axes = figure.subplots(gridspec_kw={"left": 0.085, "right": 0.975, "top": 0.9, "bottom": 0.12})
    rates, losses, means = (np.array(each, np.float64) for each in (test.rates, test.losses, test.means))
    axes.set_xscale("log")
    axes.plot(rates, losses, ".-", color=EACH, markersize=4, linewidth=0.7, alpha=0.4, label="each step", zorder=2)
    axes.plot(rates, means, color=MEAN, linewidth=1.8, label="smoothed", zorder=3)
    chosen = loss_range([finite(Curve(np.arange(len(losses)), losses))], [means])
    if chosen is not None:
        show_range(axes, chosen)
    _mark_suggestion(axes, test)
    axes.set_xlabel("learning rate (log scale)")
    axes.set_ylabel(f"loss (nats per token{', log scale' if axes.get_yscale() == 'log' else ''})")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower left", fontsize=9, edgecolor="none", framealpha=0.9)
    figure.suptitle(title, fontsize=12, fontweight="bold", y=0.985)
    save_figure(figure, out_png)


def _mark_suggestion(axes: Any, test: RangeTest) -> None:
    """Mark the suggested rate by a line and a point on the curve."""
    at = test.steepest
    if at is None:
        return
    words = f"suggestion {test.suggestion:g}: the loss falls fastest"
    axes.axvline(test.rates[at], color=CHOSEN, linestyle=(0, (5, 3)), linewidth=1.4, zorder=1)
    axes.plot([test.rates[at]], [test.means[at]], "o", color=CHOSEN, markersize=8, label=words, zorder=4)


def words_on_test(run: Run, progress: Progress) -> Iterator[str]:
    """Yield the lines on a test that is done: what it found, and the command to use it."""
    test, found = progress.test, figures(run, progress.test)
    made = f"{progress.read} of {run.setup.steps} steps, " if test.exploded else f"{progress.read} steps, "
    yield f"range test:   {made}rates from {test.rates[0]:.1e} to {test.rates[-1]:.1e}"
    if found["exploded_at"] is not None:
        yield f"exploded:     at {found['exploded_at']:.1e}, where the loss was {test.losses[-1]:.4g}"
    if found["lowest_loss"] is not None:
        yield f"lowest loss:  {found['lowest_loss']:.4f} (smoothed) at {found['lowest_at']:.1e}"
    if test.suggestion is None:
        yield "suggestion:   none: the loss did not fall; try another --find-lr-range, or other weights"
        return
    yield f"suggestion:   -l {test.suggestion:g}, where the loss fell fastest"
    flags = flags_with_rate(run.setup.asked, f"{test.suggestion:g}")
    yield f"to use it:    {typed('train')} {flags}"


def flags_with_rate(asked: TrainConfig, learning_rate: str) -> str:
    """Return the flags of the run that a test was made for, with a learning rate."""
    base = given_options(["--preset", asked.preset]).config if asked.preset else TrainConfig()
    words = ["--preset", asked.preset] if asked.preset else []
    for about in OPTIONS:
        value = getattr(asked, about.name)
        if value != getattr(base, about.name) and about.name not in REPLACED and not about.of_this_start:
            shown = value if about.type is str else about.show(value)
            words += [about.flags[0]] if about.switch else [about.flags[0], shown]
    return shlex.join([*words, "-l", learning_rate])
