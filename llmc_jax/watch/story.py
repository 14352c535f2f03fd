"""What is known of a run from its events so far. Leaves out how it is shown."""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmc_jax.base.streams import escaped
from llmc_jax.logs.curves import Curve, finite
from llmc_jax.logs.files import figure_of, finite_number, step_of
from llmc_jax.logs.follow import STARTS
from llmc_jax.logs.state import RunState, Seen, after
from llmc_jax.run.console import Pace
from llmc_jax.run.figures import Average, utilization_text

KEPT = 100  # events
QUIET = frozenset({"train", "val", "eval", "sample", "gpu"})  # have places of their own
LARGEST = 10**15  # of whole numbers


@dataclass
class Story:
    """What is known of a run from its events so far."""

    seen: Seen = field(default_factory=Seen)
    losses: dict[str, array] = field(default_factory=lambda: {"train": array("d"), "val": array("d")})  # step, loss, …
    latest: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # the last event of each kind that is quiet
    events: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))  # the last of other kinds
    skipped: int = 0  # steps that updated nothing
    pace: Pace = field(default_factory=Pace)
    speed: Average = field(default_factory=Average)

    def take(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take some more events."""
        for event in events:
            self.seen = after(self.seen, event)
            kind, step, loss = event["event"], step_of(event), figure_of(event.get("loss"))
            if kind in QUIET:
                self.latest[kind] = event
            else:
                self.events.append(event)
            if kind in self.losses and step is not None and loss is not None:
                self.losses[kind].extend((step, loss))
            if kind in STARTS:
                self.pace, self.speed = Pace(), Average()
            elif kind == "train":
                self._take_step(event)

    def _take_step(self, event: Mapping[str, Any]) -> None:
        self.skipped += bool(event.get("skipped"))
        ms, speed = figure_of(event.get("ms")), figure_of(event.get("tokens_per_second"))
        if ms is not None and 0 <= ms < LARGEST:
            now = self.pace.last + ms / 1000 if self.seen.time is None else self.seen.time
            self.pace = self.pace.then(now)
        if speed is not None and 0 <= speed < LARGEST:
            self.speed = self.speed.then(speed)

    def curve(self, kind: str) -> Curve:
        """Return the losses of training or validations, those that are no finite numbers left out."""
        pairs = np.array(self.losses[kind]).reshape(-1, 2)
        return finite(Curve(pairs[:, 0].astype(np.int64), pairs[:, 1]))

    def tokens_per_second(self) -> float | None:
        """Return the speed as llm.c averages it; of the only step its own."""
        last = self.latest.get("train")
        return self.speed.mean or (figure_of(last.get("tokens_per_second")) if last else None)

    def utilization(self) -> str:
        """Return how well the devices are used, in words; empty where it is not known."""
        start, speed = self.seen.start or {}, self.tokens_per_second()
        flops, peak = finite_number(start.get("flops_per_token")), finite_number(start.get("peak_flops"))
        if flops is None or speed is None:
            return ""
        return escaped(utilization_text(flops * speed, peak or None, str(start.get("precision"))))

    def left(self, state: RunState, now: float) -> float | None:
        """Return the seconds to the end of a running run, None where they are unknown."""
        if state.state != "running" or state.step is None or state.steps is None:
            return None
        left = self.pace.left(state.steps - state.step)
        return None if left is None else max(0.0, left - max(0.0, now - self.pace.last))
