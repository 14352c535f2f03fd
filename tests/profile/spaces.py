"""Traces made by hand, with what of jax.profiler's ProfileData is read."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One event; start and duration in microseconds."""

    name: str
    start: float
    duration: float = 0.0
    stats: Mapping[str, int | str] = {}

    @property
    def start_ns(self) -> float:
        return 1e3 * self.start

    @property
    def duration_ns(self) -> float:
        return 1e3 * self.duration


def instruction(name: str, start: float, duration: float, program: str = "jit_step", **stats: int | str) -> Event:
    """An instruction that ran."""
    return Event(name, start, duration, {"hlo_op": name, "hlo_module": program, **stats})


def handed_in(start: float, number: int) -> Event:
    """A task given to XLA's threads."""
    return Event("ThreadpoolListener::Record", start, 0, {"_p": number})


def task(start: float, stop: float, number: int) -> list[Event]:
    """A task that a thread worked on."""
    return [
        Event("ThreadpoolListener::StartRegion", start, 0, {"_c": number}),
        Event("ThreadpoolListener::StopRegion", stop),
    ]


def space(planes: Mapping[str, Mapping[str, Sequence[Event]]]) -> Any:
    """Planes, each with its lines, each with its events."""
    return SimpleNamespace(
        planes=[
            SimpleNamespace(
                name=plane, lines=[SimpleNamespace(name=line, events=events) for line, events in lines.items()]
            )
            for plane, lines in planes.items()
        ]
    )
