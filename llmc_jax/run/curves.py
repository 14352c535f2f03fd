"""The picture of a run, drawn anew while it goes on. Leaves out the drawing (logs/picture.py)."""

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llmc_jax.logs.events import read_events
from llmc_jax.logs.files import METRICS
from llmc_jax.logs.picture import draw_curves
from llmc_jax.logs.reading import log_of

CURVES = "curves.png"
REDRAW_SECONDS = 20.0  # between two pictures, and at least
REDRAW_SHARE = 0.03  # of one core's time, which long runs, whose metrics are large, would exceed


@dataclass
class CurveDrawer:
    """Redraws the picture of the curves in a thread of its own, so that the training step does not wait for it.

    A picture that cannot be drawn is worth one warning, not the run.
    """

    folder: Path
    title: str
    baselines: Mapping[str, float]
    warn: Callable[[str], None]  # shows a warning
    is_there: Callable[[], bool]  # whether the folder is still the run's, without which nothing is drawn
    drawing: bool = True  # off in all processes of a run but the first

    def __post_init__(self) -> None:
        self.path = self.folder / CURVES
        self._warned = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmc_jax curves")
        self._next = time.monotonic() + REDRAW_SECONDS

    def _draw(self) -> None:
        """Draw the picture, in the thread, and set when the next one may begin."""
        start = time.monotonic()
        try:
            if self.drawing and self.is_there():
                draw_curves([log_of(read_events(self.folder / METRICS), self.title)], self.path, self.baselines)
        except Exception as error:
            if not self._warned:
                self._warned = True
                self.warn(f"{self.path}: cannot be drawn, training goes on: {type(error).__name__}: {error}")
        end = time.monotonic()
        self._next = end + max(REDRAW_SECONDS, (end - start) / REDRAW_SHARE)

    def refresh(self) -> None:
        """Begin a new picture if the last one is old enough."""
        if time.monotonic() >= self._next:
            self._next = math.inf  # until this one is drawn
            self._pool.submit(self._draw)

    def finish(self) -> None:
        """Draw the last picture, after the one in work."""
        self._pool.submit(self._draw).result()

    def close(self) -> None:
        """End the thread, after the picture in work."""
        self._pool.shutdown()
