"""A learning-rate range test: what each rate made of the loss, when it has exploded, and which rate that suggests.

All follows from the losses of the steps, which lie in each checkpoint and are the same in every process. Leaves out the
rates (training/schedule.py), the configuration (`of_test`, config/train.py) and what a test writes (find_lr_files.py).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

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
