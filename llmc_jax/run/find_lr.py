"""A learning-rate range test: what each rate made of the loss, when it has exploded, and which rate that suggests.

All follows from the losses of the steps, which lie in each checkpoint and are the same in every process. Leaves out the
rates (training/schedule.py) and the configuration (`of_test`, config/train.py).
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.files import write_atomic
from llmc_jax.base.pictures import PALETTE, save_figure
from llmc_jax.base.plain import to_json
from llmc_jax.config.train import TrainConfig
from llmc_jax.logs.curves import Curve, finite, loss_range
from llmc_jax.logs.picture import plain_panel, show_range

FIND_LR, PICTURE = "find_lr.json", "find_lr.png"
EACH, CHOSEN = PALETTE[:2]
SMOOTHING = 0.9  # share of the mean before in the mean of the losses
WINDOW = 20  # a slope is taken over a tenth of the test, 1 / WINDOW on either side: noise makes single steps steep


class RangeTest(NamedTuple):
    """The steps of a test that have been made."""

    rates: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    means: tuple[float, ...] = ()  # of the losses up to each: exponential, with bias correction

    def then(self, rate: float, loss: float) -> "RangeTest":
        """Return the test with another step. Beyond its end it stays as it is."""
        if self.exploded:
            return self
        before = self.means[-1] if self.means else loss
        weight = (1 - SMOOTHING) / (1 - SMOOTHING ** (len(self.losses) + 1))
        mean = before + weight * (loss - before) if math.isfinite(loss) else loss
        return RangeTest((*self.rates, rate), (*self.losses, loss), (*self.means, mean))

    @property
    def exploded(self) -> bool:
        """Return whether the last loss is not finite, or the mean far above the loss before any update.

        The usual limit, four times the lowest loss, is for losses that begin far above where they end. A language
        model that knows nothing has ln V, and half as much again is worse than any that has learned something.
        """
        if not self.means:
            return False
        return not math.isfinite(self.means[-1]) or self.means[-1] > 1.5 * self.losses[0] + 1

    @property
    def lowest(self) -> int | None:
        """Return the place of the lowest mean; None where there is none that is finite."""
        finite = [(mean, place) for place, mean in enumerate(self.means) if math.isfinite(mean)]
        return min(finite)[1] if finite else None

    @property
    def steepest(self) -> int | None:
        """Return the place up to the lowest mean where the mean falls fastest; None where it falls nowhere.

        The rates are evenly spaced on a logarithmic axis, so a difference between two steps stands for the slope.
        """
        width = max(1, len(self.means) // WINDOW)
        places = range(width, min((self.lowest or 0) + 1, len(self.means) - width))
        falls = [(self.means[place + width] - self.means[place - width], place) for place in places]
        fall, place = min(((fall, place) for fall, place in falls if math.isfinite(fall)), default=(0.0, 0))
        return place if fall < 0 else None

    @property
    def suggestion(self) -> float | None:
        """Return the rate at which the loss falls fastest, to two digits; None where it falls nowhere."""
        return None if self.steepest is None else float(f"{self.rates[self.steepest]:.1e}")

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        losses = [loss if math.isfinite(loss) else str(loss) for loss in self.losses]
        return {"rates": list(self.rates), "losses": losses}


def test_of(stored: Mapping[str, Any] | None) -> RangeTest:
    """Return the test that a checkpoint holds; one that has just begun where it holds none."""
    test = RangeTest()
    for rate, loss in zip((stored or {}).get("rates", ()), (stored or {}).get("losses", ()), strict=True):
        test = test.then(float(rate), float(loss))
    return test


def figures(config: TrainConfig, test: RangeTest) -> dict[str, Any]:
    """Return what a test found: the fields of its event."""
    at = test.lowest
    return {
        "suggestion": test.suggestion,
        "lowest_loss": None if at is None else test.means[at],  # smoothed
        "lowest_at": None if at is None else test.rates[at],
        "exploded_at": test.rates[-1] if test.exploded else None,
        "steps": config.max_steps,
        "range": config.find_lr_range,
    }


def write_found(config: TrainConfig, test: RangeTest, folder: Path) -> None:
    """Write what a test found into the run's folder. Raises InputError."""
    record = {**figures(config, test), **test.to_json(), "smoothed": list(test.means)}
    write_atomic(folder / FIND_LR, (json.dumps(to_json(record), indent=1, allow_nan=False) + "\n").encode())
    draw_test(test, folder / PICTURE, f"{folder.name}: learning-rate range test")


def draw_test(test: RangeTest, out_png: Path, title: str = "") -> None:
    """Draw the loss over the rate into a PNG, the suggestion marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), dpi=110)
    axes = figure.subplots(gridspec_kw={"left": 0.085, "right": 0.975, "top": 0.9, "bottom": 0.12})
    rates, losses, means = (np.array(each, np.float64) for each in (test.rates, test.losses, test.means))
    axes.set_xscale("log")
    axes.plot(rates, losses, ".-", color=EACH, markersize=4, linewidth=0.7, alpha=0.4, label="each step", zorder=2)
    axes.plot(rates, means, color=EACH, linewidth=1.8, label="smoothed", zorder=3)
    chosen = loss_range([finite(Curve(np.arange(len(losses)), losses))], [means])
    if chosen is not None:
        show_range(axes, chosen)
    if (at := test.steepest) is not None:
        words = f"suggestion {test.suggestion:g}: the loss falls fastest"
        axes.axvline(test.rates[at], color=CHOSEN, linestyle=(0, (5, 3)), linewidth=1.4, zorder=1)
        axes.plot([test.rates[at]], [test.means[at]], "o", color=CHOSEN, markersize=8, label=words, zorder=4)
    axes.set_xlabel("learning rate (log scale)")
    axes.set_ylabel(f"loss (nats per token{', log scale' if axes.get_yscale() == 'log' else ''})")
    plain_panel(axes)
    axes.legend(loc="lower left", fontsize=9, edgecolor="none", framealpha=0.9)
    figure.suptitle(title, fontsize=12, fontweight="bold", y=0.985)
    save_figure(figure, out_png)


def words_on_test(config: TrainConfig, test: RangeTest, steps: int) -> Iterator[str]:
    """Yield the lines on a test that is done, after so many steps: what it found."""
    found = figures(config, test)
    yield f"range test:   {steps} of {config.max_steps} steps, rates from {test.rates[0]:.1e} to {test.rates[-1]:.1e}"
    if found["exploded_at"] is not None:
        yield f"exploded:     at {found['exploded_at']:.1e}, where the loss was {test.losses[-1]:.4g}"
    if found["lowest_loss"] is not None:
        yield f"lowest loss:  {found['lowest_loss']:.4f} (smoothed) at {found['lowest_at']:.1e}"
    if test.suggestion is None:
        yield "suggestion:   none: the loss did not fall; try another --find-lr-range, or other weights"
        return
    yield f"suggestion:   -l {test.suggestion:g}, where the loss fell fastest"
